# What the scripts share. Sourced; expects $me, the name of the script for its messages.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
torch_version=2.11.0
libtorch=  # a LibTorch of the user's (--libtorch); empty: the one in .venv

say() { printf '%s: %s\n' "$me" "$*"; }

# fail STEP WHY WHAT-TO-DO
fail() {
  {
    printf '\n%s: FAILED: %s\n' "$me" "$1"
    printf '  why:   %s\n' "$2"
    printf '  to do: %s\n' "$3"
  } >&2
  exit 1
}

# step NAME LOG WHAT-TO-DO COMMAND...: runs a command that is worth a message, its output in a log that is shown when it fails.
step() {
  local name=$1 log=$2 remedy=$3 from=$SECONDS
  shift 3
  mkdir -p "$(dirname "$log")"
  say "$name ..."
  if ! "$@" >"$log" 2>&1; then
    printf '\n--- the last lines of %s\n' "${log#"$root"/}" >&2
    tail -n 25 "$log" >&2
    fail "$name" "the command above ended with an error: $(grep -v '^[[:space:]]*$' "$log" | tail -n 1)" "$remedy"
  fi
  say "$name: done in $((SECONDS - from)) s"
}

need_value() { [ $# -ge 2 ] && [ -n "$2" ] || fail "reading the arguments" "$1 wants a value" "see scripts/$me --help"; }
bad_argument() { fail "reading the arguments" "unknown argument '$1'" "see scripts/$me --help"; }

# Ranks are started by torchrun. The one in .venv comes with LibTorch; a user's LibTorch need not have one.
need_torchrun() {
  [ -z "$libtorch" ] || [ -x "$root/.venv/bin/torchrun" ] || command -v torchrun >/dev/null ||
    fail "torchrun" "scripts/$me starts ranks with torchrun, which comes with the Python package and is not on PATH" \
      "put one on PATH, or leave --libtorch out. Your own programs need none: mpirun, srun or variables set by hand start them as well"
}

# How many compilers at once: one a core, as far as memory goes (LibTorch's headers take about 2 GB in a compiler).
build_jobs() {
  local cores memory
  cores=$(env -u OMP_NUM_THREADS -u OMP_THREAD_LIMIT nproc)  # which would otherwise count the threads that those allow
  memory=$(awk '/MemAvailable/ { print int($2 / 2500000) }' /proc/meminfo)
  [ "$memory" -ge 1 ] || memory=1
  echo $((cores < memory ? cores : memory))
}

# configure FOLDER CMAKE-ARGUMENTS...: only when there is no build there yet, or one with other arguments. Otherwise Ninja itself finds
# out whether CMake must run again.
configure() {
  local folder=$1 wanted
  shift
  local arguments=(-G Ninja "$@")
  [ -z "$libtorch" ] || arguments+=("-DFSDP_LIBTORCH=$libtorch")
  if command -v ccache >/dev/null; then
    arguments+=(-DCMAKE_CXX_COMPILER_LAUNCHER=ccache)
  fi
  wanted="${arguments[*]}"
  if [ -f "$folder/build.ninja" ] && [ "$(cat "$folder/.configured" 2>/dev/null)" = "$wanted" ]; then
    return
  fi
  step "configuring ${folder#"$root"/}" "$root/.deps/log/configure-$(basename "$folder").log" \
    "read the message of CMake above; 'scripts/setup' alone says whether the prerequisites are complete" \
    cmake --fresh -S "$root" -B "$folder" "${arguments[@]}"
  printf '%s' "$wanted" >"$folder/.configured"
}

# On a terminal Ninja overwrites its one line of progress; a log gets every tenth of them, and all else that was said.
run_ninja() { if [ -t 1 ]; then ninja "$@"; else ninja "$@" | sparse_progress; fi; }
sparse_progress() {
  local line
  while IFS= read -r line; do
    if [[ ! $line =~ ^\[([0-9]+)/([0-9]+)\]\  ]] || ((BASH_REMATCH[1] % 10 == 0 || BASH_REMATCH[1] == BASH_REMATCH[2])); then
      printf '%s\n' "$line"
    fi
  done
}

# build FOLDER TARGET...
build() {
  local folder=$1 from=$SECONDS
  shift
  # A precompiled header is cached only if the compiler cache is told that macros and times in it may be trusted.
  export CCACHE_SLOPPINESS=${CCACHE_SLOPPINESS:-pch_defines,time_macros}
  say "building ${folder#"$root"/}"
  run_ninja -C "$folder" -j "${FSDP_BUILD_JOBS:-$(build_jobs)}" "$@" ||
    fail "building ${folder#"$root"/}" "the compiler or linker reported errors, above" \
      "correct them and run scripts/$me again; if a compiler was killed, memory ran out: FSDP_BUILD_JOBS=1 scripts/$me"
  say "building ${folder#"$root"/}: done in $((SECONDS - from)) s"
}
