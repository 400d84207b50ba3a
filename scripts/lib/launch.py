"""scripts/launch -n N PROGRAM ARGS...: runs N ranks of a program on this machine, through torchrun.

torchrun alone would listen on every network interface, print a Python traceback when a rank of a C++ program fails, and could not say
which of several ranks failed first. So it is run without any listener (its ranks meet in a file, and rank 0 of the program opens the
store, on loopback), and each rank is started by this file once more ("as rank"), which puts the rank in front of its lines
and notes when and how it ended.
"""

import argparse
import ctypes
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import tty

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))


def end_with_parent(sign):
    """For a child about to become another program: it gets `sign` when the process that started it is gone."""

    def prepare():
        ctypes.CDLL(None).prctl(1, sign)  # PR_SET_PDEATHSIG

    return prepare


# --- as rank -------------------------------------------------------------------------------------------------------------------------


def output_pair():
    """(what the program writes to, what is read here). A terminal where there is one to be had: C and C++ streams then hand over each
    line when it is complete. Into a pipe they would write when 4 KB have come together, or never, if the program is killed."""
    try:
        reader, writer = os.openpty()
        tty.setraw(writer)
    except OSError:
        reader, writer = os.pipe()
    return writer, reader


def forward_lines(source, sink, prefix, lock):
    rest = b""
    while True:
        try:
            chunk = os.read(source, 65536)
        except OSError:  # EIO: how a terminal says that its other end is closed
            chunk = b""
        *lines, rest = (rest + chunk).split(b"\n")
        if not chunk and rest:
            lines.append(rest)
        with lock:
            for line in lines:
                sink.write(prefix + line + b"\n")
            sink.flush()
        if not chunk:
            return


def as_rank(notes, command):
    rank = os.environ["RANK"]
    # torchrun signals the whole group of processes: the program ends by it, this one stays to see how.
    for sign in (signal.SIGTERM, signal.SIGINT):
        signal.signal(sign, lambda *_: None)
    writer, reader = output_pair()
    try:
        program = subprocess.Popen(command, stdout=writer, stderr=subprocess.PIPE, stdin=subprocess.DEVNULL,
                                   preexec_fn=end_with_parent(signal.SIGKILL))  # fmt: skip
    except OSError as error:
        note_end(notes, rank, f"could not be started: {error.strerror}: {command[0]}")
        return 127
    os.close(writer)
    lock = threading.Lock()
    prefix = f"[{rank}] ".encode()
    pairs = ((reader, sys.stdout.buffer), (program.stderr.fileno(), sys.stderr.buffer))
    readers = [threading.Thread(target=forward_lines, args=(source, sink, prefix, lock), daemon=True) for source, sink in pairs]
    for reader in readers:
        reader.start()
    code = program.wait()
    if code > 0:
        note_end(notes, rank, f"ended with exit code {code}")
    elif code < 0:
        note_end(notes, rank, f"was ended by signal {-code} ({signal.Signals(-code).name})")
    for reader in readers:
        reader.join(timeout=5)  # a grandchild may hold the pipe open
    return 128 - code if code < 0 else code


def note_end(notes, rank, how):
    """One file a failed rank; the time puts them in order."""
    with open(f"{notes}/{rank}.part", "w") as out:
        out.write(f"{time.monotonic_ns()} {how}")
    os.rename(f"{notes}/{rank}.part", f"{notes}/{rank}.failed")


def first_failure(notes):
    failures = []
    for name in os.listdir(notes):
        if name.endswith(".failed"):
            with open(f"{notes}/{name}") as note:
                when, how = note.read().split(" ", 1)
            failures.append((int(when), int(name.split(".")[0]), how))
    return min(failures, default=None)


# --- as launcher ---------------------------------------------------------------------------------------------------------------------


def fail(what, remedy):
    sys.exit(f"launch: FAILED: {what}\n  to do: {remedy}")


def find_torchrun():
    for candidate in (f"{ROOT}/.venv/bin/torchrun", shutil.which("torchrun")):
        if candidate and os.access(candidate, os.X_OK):
            return candidate
    fail("torchrun was not found, neither in .venv nor on PATH",
         "run scripts/setup, put a torchrun on PATH, or start the ranks by other means (mpirun, srun, or RANK, WORLD_SIZE, LOCAL_RANK, "
         "MASTER_ADDR and MASTER_PORT set by hand)")  # fmt: skip


def parse(arguments):
    parser = argparse.ArgumentParser(
        prog="scripts/launch",
        usage="%(prog)s -n N PROGRAM ARGS...",
        description="Runs N ranks of PROGRAM on this machine. Each line of output begins with its rank. When a rank fails, the others are "
        "ended and it is named. OMP_NUM_THREADS, where not set, becomes the cores divided by N, at least 1.",
    )
    parser.add_argument("-n", type=int, required=True, metavar="N", help="number of ranks")
    parser.add_argument("program", help="what to run in each rank")
    parser.add_argument("args", nargs=argparse.REMAINDER, help="passed on as they are")
    o = parser.parse_args(arguments)
    if o.n < 1:
        parser.error("N must be at least 1")
    program = shutil.which(o.program)
    if program is None:
        fail(f"there is no program '{o.program}' that could be run", "build it, or name it with its folder")
    return o.n, [os.path.abspath(program), *o.args]


def launch(n, command):
    torchrun = find_torchrun()
    environment = dict(os.environ)
    environment.setdefault("OMP_NUM_THREADS", str(max(1, len(os.sched_getaffinity(0)) // n)))
    # Ranks share cores: a thread that spins while it waits takes them from the rank that it waits for.
    environment.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    environment.setdefault("GOMP_SPINCOUNT", "0")
    environment["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        environment.pop(name, None)

    with tempfile.TemporaryDirectory(prefix="fsdp-launch-") as notes:
        runner = subprocess.Popen(
            [torchrun, "--nnodes=1", f"--nproc-per-node={n}", "--rdzv-backend=c10d", f"--rdzv-endpoint={notes}/rendezvous",
             "--rdzv-conf=store_type=file", "--rdzv-id=launch", "--local-addr=127.0.0.1", "--no-python",
             sys.executable, os.path.abspath(__file__), "--as-rank", notes, *command],
            env=environment, stderr=subprocess.PIPE, preexec_fn=end_with_parent(signal.SIGTERM))  # fmt: skip
        received = []

        def pass_on(sign, _):
            received.append(sign)
            runner.send_signal(signal.SIGTERM)

        signal.signal(signal.SIGTERM, pass_on)
        signal.signal(signal.SIGINT, pass_on)

        # Lines of ranks are passed on; torchrun's own are kept for the case that it is torchrun that fails.
        own_words = []
        for line in runner.stderr:
            if re.match(rb"\[\d+\] ", line):
                sys.stderr.buffer.write(line)
                sys.stderr.flush()
            else:
                own_words.append(line)
        code = runner.wait()
        failure = first_failure(notes)
        if received:
            print(f"launch: ended by {signal.Signals(received[0]).name}; all ranks were ended", file=sys.stderr)
            return 128 + received[0]
        if failure:
            print(f"launch: FAILED: rank {failure[1]} {failure[2]}" + ("; the other ranks were ended" if n > 1 else ""), file=sys.stderr)
            return code or 1
        if code:
            sys.stderr.buffer.write(b"".join(own_words[-30:]))
            print(f"launch: FAILED: torchrun ended with {code} before a rank failed; its last words are above", file=sys.stderr)
            return 1
        return 0


if __name__ == "__main__":
    if sys.argv[1:2] == ["--as-rank"]:
        sys.exit(as_rank(sys.argv[2], sys.argv[3:]))
    sys.exit(launch(*parse(sys.argv[1:])))
