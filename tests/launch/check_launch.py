"""Checks scripts/launch with programs of a few lines of shell (no LibTorch: only torchrun's own start is paid), and that ranks which
torchrun restarts meet again: TESTS is the program with the cases of launched_test.cpp.

    python3 check_launch.py ROOT TESTS
"""

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time

ROOT, TESTS = sys.argv[1:3]


def start(n, script, *arguments, **kwargs):
    path = f"{ROOM}/program{len(os.listdir(ROOM))}"
    with open(path, "w") as out:
        out.write("#!/bin/bash\n" + script + "\n")
    os.chmod(path, 0o755)
    return subprocess.Popen(["bash", f"{ROOT}/scripts/launch", "-n", str(n), path, *arguments],
                            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **kwargs)  # fmt: skip


def finish(process, limit=60):
    out, err = process.communicate(timeout=limit)
    return process.returncode, out, err


def need(condition, what, *shown):
    if not condition:
        raise AssertionError(f"expected: {what}\n" + "\n".join(str(s) for s in shown))


def gone(pid, limit=10):
    end = time.monotonic() + limit
    while time.monotonic() < end:
        if not os.path.exists(f"/proc/{pid}") or open(f"/proc/{pid}/stat").read().rsplit(")", 1)[1].split()[0] == "Z":
            return True
        time.sleep(0.05)
    return False


def pids_from(process, n):
    """Reads lines '[rank] pid P' until there are n."""
    pids = {}
    while len(pids) < n:
        line = process.stdout.readline()
        need(line, "each rank says its pid", pids)
        match = re.match(r"\[(\d+)\] pid (\d+)", line)
        if match:
            pids[int(match.group(1))] = int(match.group(2))
    return pids


def descendants(pid):
    found = [pid]
    for parent in found:
        for thread in os.listdir(f"/proc/{parent}/task"):
            found += [int(child) for child in open(f"/proc/{parent}/task/{thread}/children").read().split()]
    return found


def ranks_get_variables_arguments_and_prefixes():
    code, out, err = finish(start(2, 'echo "$RANK $WORLD_SIZE $LOCAL_RANK $MASTER_ADDR ${MASTER_PORT:+port} <$1> <$2>"; echo "to stderr" >&2; printf "no newline"',
                                  "a b", "-n"))  # fmt: skip
    need(code == 0, "exit code 0", code, out, err)
    for rank in "01":
        need(f"[{rank}] {rank} 2 {rank} 127.0.0.1 port <a b> <-n>" in out.splitlines(), "variables and arguments", out)
        need(f"[{rank}] no newline" in out.splitlines(), "a last line without its end", out)
        need(f"[{rank}] to stderr" in err.splitlines(), "stderr stays stderr", err)


def openmp_waits_passively_and_shares_the_cores():
    cores = len(os.sched_getaffinity(0))
    script = 'echo "$OMP_NUM_THREADS $OMP_WAIT_POLICY $GOMP_SPINCOUNT"'
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("OMP_", "GOMP_"))}
    _, out, _ = finish(start(1, script, env=environment))
    need(out == f"[0] {cores} PASSIVE 0\n", "all cores for one rank", out)
    _, out, _ = finish(start(3, script, env=environment))
    need(out.count(f"{max(1, cores // 3)} PASSIVE 0") == 3, "a share for each of three", out)
    _, out, _ = finish(start(1, script, env={**environment, "OMP_NUM_THREADS": "7"}))
    need(out == "[0] 7 PASSIVE 0\n", "what the user set is kept", out)


def the_first_failing_rank_is_named():
    # Rank 0 fails because rank 1 did, a moment later and before torchrun looks: the cause must be named, not the lower rank.
    flag = f"{ROOM}/flag"
    script = f'if [ $RANK = 1 ]; then touch {flag}; kill -9 $$; fi; while [ ! -e {flag} ]; do :; done; sleep 0.02; exit 3'
    code, _, err = finish(start(2, script))
    need(code != 0 and "FAILED: rank 1 was ended by signal 9 (SIGKILL)" in err, "rank 1 and its signal", code, err)
    need("Traceback" not in err, "no Python traceback", err)
    code, _, err = finish(start(1, "exit 9"))
    need(code != 0 and "FAILED: rank 0 ended with exit code 9" in err, "the exit code", code, err)


def the_others_are_ended():
    process = start(3, 'echo "pid $$"; [ $RANK = 2 ] && sleep 1 && exit 5; exec sleep 600')
    pids = pids_from(process, 3)
    code, _, err = finish(process, 30)
    need(code != 0 and "rank 2 ended with exit code 5" in err, "rank 2 is named", code, err)
    need(all(gone(pid) for pid in pids.values()), "no rank is left", pids)


def a_stopped_launch_leaves_nothing_behind():
    for sign in (signal.SIGTERM, signal.SIGKILL):
        process = start(2, 'echo "pid $$"; exec sleep 600')
        pids = pids_from(process, 2)
        os.kill(process.pid, sign)
        code, _, _ = finish(process, 40)
        need(code != 0, "a failure", code)
        need(all(gone(pid, 40) for pid in pids.values()), f"no rank is left after {sign.name}", pids)


def nothing_listens():
    process = start(2, 'echo "pid $$"; exec sleep 600')
    pids_from(process, 2)
    sockets = set()
    for pid in descendants(process.pid):
        for fd in os.listdir(f"/proc/{pid}/fd"):
            match = re.match(r"socket:\[(\d+)\]", os.readlink(f"/proc/{pid}/fd/{fd}"))
            if match:
                sockets.add(match.group(1))
    listening = []
    for table in ("tcp", "tcp6"):
        for line in open(f"/proc/net/{table}").read().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and fields[9] in sockets:
                listening.append(fields[1])
    process.terminate()
    finish(process, 40)
    need(not listening, "no listening socket of the launcher or torchrun", listening)


def lines_come_when_they_are_written():
    # Python as the program: like a C++ one it collects what goes into a pipe.
    process = start(1, "exec python3 -c 'import time; print(\"early\"); time.sleep(600)'")
    line = process.stdout.readline()
    process.terminate()
    finish(process, 40)
    need(line == "[0] early\n", "a line while the program runs", line)


def mistakes_are_explained():
    for arguments, text in (
        (["-n", "2", "/no/such/program"], "no program '/no/such/program'"),
        (["-n", "0", "true"], "at least 1"),
        (["true"], "-n"),
    ):
        result = subprocess.run(["bash", f"{ROOT}/scripts/launch", *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        need(result.returncode != 0 and text in result.stderr, text, result)


def restarted_ranks_meet_again():
    """Both with torchrun's own store, in which the keys of the first attempt are still there, and without."""
    torchrun = shutil.which("torchrun", path=f"{ROOT}/.venv/bin:{os.environ['PATH']}")
    need(torchrun, "a torchrun in .venv or on PATH")
    without_store = [f"--rdzv-endpoint={ROOM}/rendezvous", "--rdzv-conf=store_type=file"]
    for arguments, disabled in ((["--rdzv-endpoint=localhost:0"], "0"), (without_store, "1")):
        environment = {**os.environ, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": disabled, "FSDP_TEST_FAILING_RANK": "1"}
        result = subprocess.run(
            [torchrun, "--nnodes=1", "--nproc-per-node=2", "--max-restarts=1", "--monitor-interval=0.1", "--rdzv-backend=c10d", *arguments,
             "--rdzv-id=restarts", "--local-addr=127.0.0.1", "--no-python", TESTS, "trains as launched"],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment, timeout=120)  # fmt: skip
        shown = (arguments, result.returncode, result.stdout, result.stderr)
        need(result.returncode == 0, "exit code 0", *shown)
        need("attempt 0" not in result.stdout, "the first attempt fails", *shown)
        for rank in "01":
            need(f"attempt 1: rank {rank} of 2 trained" in result.stdout, "the second attempt trains", *shown)


def main():
    failed = 0
    for check in (
        ranks_get_variables_arguments_and_prefixes,
        openmp_waits_passively_and_shares_the_cores,
        the_first_failing_rank_is_named,
        the_others_are_ended,
        a_stopped_launch_leaves_nothing_behind,
        nothing_listens,
        lines_come_when_they_are_written,
        mistakes_are_explained,
        restarted_ranks_meet_again,
    ):
        began = time.monotonic()
        try:
            check()
            print(f"ok      {check.__name__} ({time.monotonic() - began:.1f} s)", flush=True)
        except (AssertionError, subprocess.TimeoutExpired) as error:
            failed += 1
            print(f"FAILED  {check.__name__}: {error}", flush=True)
    return 1 if failed else 0


with tempfile.TemporaryDirectory(prefix="fsdp-launch-test-") as ROOM:
    os.environ["TMPDIR"] = ROOM  # a launcher that is killed cannot remove its own temporary folder
    status = main()
sys.exit(status)
