"""Chooses how to fine-tune a model on this machine, and starts fsdp-train so: see scripts/finetune."""

import argparse
import json
import os
import pathlib
import re
import struct
import subprocess
import sys


def fail(why):
    raise SystemExit(f"finetune: FAILED: {why}")


def parameters_of(folder):
    """How many, from the headers of its files."""
    files = sorted(folder.glob("*.safetensors"))
    if not files or not (folder / "config.json").is_file():
        fail(f"'{folder}' is no Hugging Face folder: expected config.json and .safetensors files")
    count = 0
    for path in files:
        with open(path, "rb") as file:
            header = json.loads(file.read(struct.unpack("<Q", file.read(8))[0]))
        for name, entry in header.items():
            size = 1
            for dim in entry["shape"] if name != "__metadata__" else [0]:
                size *= dim
            count += size
    return count


def memory_available():
    with open("/proc/meminfo") as file:
        return int(re.search(r"MemAvailable:\s+(\d+)", file.read())[1]) * 1024


def has_fast_bf16():
    with open("/proc/cpuinfo") as file:
        return re.search(r"\b(amx_bf16|avx512_bf16)\b", file.read()) is not None


def choose(options, parameters):
    """The settings, and why."""
    width = 2 if has_fast_bf16() else 4
    cores = os.cpu_count() or 1
    ranks = options.ranks or max(n for n in (1, 2, 4, 8) if n <= max(1, min(cores, options.batch)) and options.batch % n == 0)
    # Adapters: the frozen model in the compute dtype. Else masters, gradients and two moments in fp32, shared out, and the model whole.
    resting = parameters * (16 if options.full else width)
    whole = parameters * width * ranks  # what stage 2 keeps gathered, on all ranks of this machine together
    fits = resting + whole < 0.6 * memory_available()
    stage = 2 if fits else 3
    reasons = [
        f"{ranks} ranks: {cores} cores",
        f"stage {stage}: {(resting + whole) / 1e9:.1f} GB with units kept whole, {memory_available() / 1e9:.1f} GB available",
        "bf16: the processor multiplies it" if width == 2 else "fp32: the processor multiplies no bf16",
    ]
    if resting > 0.9 * memory_available():
        fail(f"{parameters:,} parameters take {resting / 1e9:.1f} GB to train so; {memory_available() / 1e9:.1f} GB are available")
    config = {
        "model": {"path": str(options.model)},
        "data": {},
        "train_batch_size": options.batch,
        "gradient_accumulation_steps": max(1, options.batch // ranks // 4),
        "optimizer": {"type": "AdamW", "params": {"lr": options.lr or (2e-5 if options.full else 1e-3)}},
        "scheduler": {"type": "WarmupCosineLR", "params": {"warmup_num_steps": max(1, options.steps // 20)}},
        "gradient_clipping": 1.0,
        "zero_optimization": {"stage": stage},
        "max_steps": options.steps,
        "eval_every": max(1, options.steps // 4),
        "save_every": max(1, options.steps // 4),
        "output_dir": str(options.output),
        "metrics_file": str(options.output / "metrics.jsonl"),
        "resume": "auto",
    }
    if width == 2:
        config["bf16"] = {"enabled": True}
    if not options.full:
        config["lora"] = {"r": 8, "lora_alpha": 16, "target_modules": target_modules(options.model)}
    return config, ranks, reasons


def target_modules(folder):
    kind = json.loads((folder / "config.json").read_text()).get("model_type")
    return ["c_attn", "c_proj", "c_fc"] if kind == "gpt2" else ["all-linear"]


def data_settings(options, root):
    data, prepared = options.data, options.output / "data"
    if data.suffix != ".txt":
        return {"train": str(data), **({"seq_len": options.seq_len} if data.suffix == ".bin" else {})}
    settings = {"train": str(prepared / "train.bin"), "validation": str(prepared / "validation.bin"), "seq_len": options.seq_len}
    if not options.dry_run and not (prepared / "validation.bin").exists():
        python, libraries = f"{root}/.venv/bin/python", f"{root}/.deps/huggingface"
        if not pathlib.Path(libraries, ".complete").exists():
            fail("a text is cut by the model's tokenizer with Hugging Face's libraries, which are not there; run scripts/prepare-model")
        command = [python, f"{root}/scripts/lib/tokenize_text.py", str(options.model), str(data), str(prepared)]
        subprocess.run(command, check=True, env={**os.environ, "PYTHONPATH": libraries, "HF_HUB_OFFLINE": "1"})
    return settings


def main():
    root = sys.argv[1]
    parser = argparse.ArgumentParser(prog="scripts/finetune")
    parser.add_argument("model", type=pathlib.Path)
    parser.add_argument("data", type=pathlib.Path)
    parser.add_argument("--full", action="store_true")
    parser.add_argument("--output", type=pathlib.Path, default=pathlib.Path("build/finetune"))
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--seq-len", type=int, default=128)
    parser.add_argument("--lr", type=float)
    parser.add_argument("--ranks", type=int)
    parser.add_argument("--set", action="append", default=[])
    parser.add_argument("--dry-run", action="store_true")
    options = parser.parse_args(sys.argv[2:])
    if not options.data.is_file() or options.data.suffix not in (".txt", ".bin", ".safetensors"):
        fail(f"'{options.data}': expected a .txt, .bin or .safetensors file")
    config, ranks, reasons = choose(options, parameters_of(options.model))
    config["data"] = data_settings(options, root)
    path = options.output / "config.json"
    command = ["bash", f"{root}/scripts/launch", "-n", str(ranks), f"{root}/build/bin/fsdp-train", "--config", str(path)]
    for each in options.set:
        command += ["--set", each]
    for reason in reasons:
        print(f"finetune: {reason}")
    if options.dry_run:
        print(json.dumps(config, indent=2))
        print("finetune: would run", *command)
        return
    options.output.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(config, indent=2) + "\n")
    sys.stdout.flush()
    os.execvp(command[0], command)


main()
