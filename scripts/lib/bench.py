"""bench.py PROGRAM OUT [--quick] [--ranks N]: what scripts/bench does once PROGRAM (benchmarks/throughput) is built.

Contestants take turns (A B C A B C ...), so that a machine that slows down slows all of them. Each run is processes of its own.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
WORKLOAD = "W1"  # the defaults of benchmarks/throughput and benchmarks/peers
TOLERANCE = 1e-4  # of losses, relative


class Failure(Exception):
    pass


class Contestant:
    def __init__(self, system, strategy, backend, program):
        self.system, self.strategy, self.backend, self.program = system, strategy, backend, program
        self.reports = []  # one a round

    def __str__(self):
        return f"{self.system} {self.strategy} {self.backend}"

    def medians(self):
        return [statistics.median(report["step_times_ms"]) for report in self.reports]


def contestants(program):
    def python(name):
        return [f"{ROOT}/.venv/bin/python", f"{ROOT}/benchmarks/peers/{name}.py"]

    return [
        Contestant("libfsdp", "FULL_SHARD", "gloo", [program]),
        Contestant("libfsdp", "FULL_SHARD", "none", [program, "--backend", "none"]),
        Contestant("libfsdp", "SHARD_GRAD_OP", "gloo", [program]),
        Contestant("libfsdp", "SHARD_GRAD_OP", "none", [program, "--backend", "none"]),
        Contestant("torch-fsdp2", "FULL_SHARD", "gloo", python("fsdp2")),
        Contestant("torch-fsdp2", "SHARD_GRAD_OP", "gloo", python("fsdp2")),
        Contestant("torch-ddp", "NO_SHARD", "gloo", python("ddp")),
    ]


def run(contestant, ranks, steps, warmup):
    command = [f"{ROOT}/scripts/launch", "-n", str(ranks), *contestant.program, "--strategy", contestant.strategy,
               "--steps", str(steps), "--warmup", str(warmup)]  # fmt: skip
    # Gloo of the peers would otherwise go by the host's name, which may lead over a slower interface than ours.
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo"}
    try:
        result = subprocess.run(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, timeout=600)
    except subprocess.TimeoutExpired:
        raise Failure(f"{contestant} did not end within 600 s") from None
    reports = [line for line in result.stdout.splitlines() if line.startswith("[0] {")]
    if result.returncode or len(reports) != 1:
        raise Failure(f"{contestant} ended with exit code {result.returncode} and {len(reports)} reports; its last words:\n"
                      f"{result.stdout[-1000:]}{result.stderr[-3000:]}")  # fmt: skip
    report = json.loads(reports[0][4:])
    for name, wanted in (("system", contestant.system), ("strategy", contestant.strategy), ("backend", contestant.backend), ("world_size", ranks)):
        if report[name] != wanted:
            raise Failure(f"{contestant}: '{name}' of its report is {report[name]!r}, not {wanted!r}")
    return report


def check_losses(name, losses, reference_name, reference):
    """Times of different work say nothing."""
    if len(losses) != len(reference):
        raise Failure(f"{name} has {len(losses)} losses, {reference_name} {len(reference)}: not the same work")
    for step, (loss, wanted) in enumerate(zip(losses, reference)):
        if not abs(loss - wanted) <= TOLERANCE * abs(wanted):  # false for NaN, too
            raise Failure(f"losses differ: at step {step} that of {name} is {loss:.7f}, that of {reference_name} {wanted:.7f}; "
                          f"they may differ by {TOLERANCE:g} of it. No time counts.")  # fmt: skip


def row(contestant):
    reports = contestant.reports
    times = [ms for report in reports for ms in report["step_times_ms"]]
    low, middle, high = statistics.quantiles(times, n=4, method="inclusive")
    return {
        "workload": WORKLOAD,
        "system": contestant.system,
        "strategy": contestant.strategy,
        "backend": contestant.backend,
        "world_size": reports[0]["world_size"],
        "step_ms": round(middle, 3),
        "step_ms_spread": round(high - low, 3),
        "tokens_per_s": round(statistics.median(r["tokens_per_s"] * r["step_ms"] for r in reports) / middle, 1),
        "peak_rss_mb": round(max(report["peak_rss_mb"] for report in reports), 1),
        "startup_s": round(statistics.median(report["startup_s"] for report in reports), 2),
        "final_loss": reports[-1]["losses"][-1],
    }


def ratios(contestant, base):
    """Round by round: what both met in the same minute."""
    return [own / other for own, other in zip(contestant.medians(), base.medians())]


def of_rounds(values):
    return f"{statistics.median(values):.2f} ({min(values):.2f} to {max(values):.2f})"


def print_results(everybody, rows):
    base = everybody[0]
    print(f"\n{'system':<12} {'strategy':<14} {'backend':<7} {'ms/step':>8} {'spread':>7} {'CPU ms':>7} {'against the first':>22} {'tokens/s':>9} "
          f"{'peak MB':>8} {'start s':>8} {'loss':>8}")  # fmt: skip
    for one, r in zip(everybody, rows):
        loss = f"{r['final_loss']:.4f}" if one.backend != "none" else "-"
        print(f"{r['system']:<12} {r['strategy']:<14} {r['backend']:<7} {r['step_ms']:8.1f} {r['step_ms_spread']:7.1f} {statistics.median(x['step_processor_ms'] for x in one.reports):7.1f} "
              f"{of_rounds(ratios(one, base)):>22} {r['tokens_per_s']:9.0f} {r['peak_rss_mb']:8.0f} {r['startup_s']:8.2f} {loss:>8}")  # fmt: skip
    print("\nms/step: median of all timed steps; spread: between their quartiles. CPU: of all threads of rank 0, per step; a busy machine changes"
          "\nit less. Against the first: ratio of medians, round by round, its median (least to largest). Peak: resident memory of the rank"
          "\nwith most, in 10^6 bytes. Start: until the first step can begin.\n")
    for one in everybody:
        for other in everybody:
            if one.system != "libfsdp" or one.backend == "none" or other.strategy != one.strategy:
                continue
            if other.backend == "none":
                exposed = [a - b for a, b in zip(one.medians(), other.medians())]
                print(f"{one.strategy}: {statistics.median(exposed):.1f} ms of libfsdp's step ({min(exposed):.1f} to {max(exposed):.1f}) are "
                      "communication that computing does not hide")  # fmt: skip
            elif other.system != one.system:
                print(f"{one.strategy}: {other.system} takes {of_rounds(ratios(other, one))} times as long as libfsdp")


def measure(everybody, rounds, run_one, seconds=None):
    """Adds a report a round to each contestant. `run_one` makes one; losses must agree with those of the first contestant. With
    `seconds`, rounds that would end later are left out."""
    reference = None
    started = time.monotonic()
    for number in range(rounds):
        passed = time.monotonic() - started
        if seconds and number and passed / number * (number + 1) > seconds:
            print(f"bench: this machine is slow or busy: {number} of {rounds} rounds have to do, or it would take more than {seconds} s")
            return
        for one in everybody:
            report = run_one(one)
            one.reports.append(report)
            reference = reference or report["losses"]
            if one.backend != "none":
                check_losses(str(one), report["losses"], str(everybody[0]), reference)
        print(f"bench: round {number + 1} of {rounds}, {time.monotonic() - started:.0f} s: "
              + ", ".join(f"{one} {one.medians()[-1]:.0f} ms" for one in everybody), flush=True)  # fmt: skip


def main(arguments):
    parser = argparse.ArgumentParser()
    parser.add_argument("program")
    parser.add_argument("out")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--ranks", type=int, default=2)
    o = parser.parse_args(arguments)
    rounds, steps, warmup, seconds = (3, 15, 5, 200) if o.quick else (7, 40, 5, None)

    everybody = contestants(o.program)
    print(f"bench: {WORKLOAD}, {o.ranks} ranks, {rounds} rounds of {steps} steps; load of the machine before: {os.getloadavg()[0]:.2f}", flush=True)
    measure(everybody, rounds, lambda one: run(one, o.ranks, steps, warmup), seconds)
    print(f"bench: the losses of {warmup + steps} steps agree within {TOLERANCE:g} in every round")

    rows = [row(one) for one in everybody]
    print_results(everybody, rows)
    with open(o.out, "w") as out:
        json.dump(rows, out, indent=1)
        out.write("\n")
    print(f"\nbench: written to {os.path.relpath(o.out)}")


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except Failure as failure:
        sys.exit(f"\nbench: FAILED: {failure}")
