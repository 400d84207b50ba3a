"""Loss and throughput of training runs as a picture: see scripts/plot."""

import argparse
import json

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402  (after the choice of a backend without a screen)


def main():
    parser = argparse.ArgumentParser(prog="scripts/plot")
    parser.add_argument("metrics", nargs="+")
    parser.add_argument("--out", default="metrics.png")
    options = parser.parse_args()
    figure, (losses, speeds) = plt.subplots(2, 1, figsize=(8, 7), sharex=True, constrained_layout=True)
    for path in options.metrics:
        with open(path) as file:
            lines = [json.loads(line) for line in file]
        steps = [line for line in lines if "loss" in line]
        checks = [line for line in lines if "validation_loss" in line]
        (drawn,) = losses.plot([s["step"] for s in steps], [s["loss"] for s in steps], alpha=0.6, label=path)
        if checks:
            losses.plot([c["step"] for c in checks], [c["validation_loss"] for c in checks], "o-", color=drawn.get_color(), label=f"{path}, validation")
        speeds.plot([s["step"] for s in steps], [s["tokens_per_s"] for s in steps], color=drawn.get_color())
    losses.set_ylabel("loss (nats per token)")
    losses.legend()
    losses.grid(alpha=0.3)
    speeds.set_ylabel("tokens per second")
    speeds.set_xlabel("step")
    speeds.set_ylim(bottom=0)
    speeds.grid(alpha=0.3)
    figure.savefig(options.out, dpi=120)
    print(options.out)


main()
