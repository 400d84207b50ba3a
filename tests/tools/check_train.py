"""Runs fsdp-train as a user does: it learns, world size and accumulation do not change what it computes, mistakes are one clear message.

    python3 check_train.py ROOT PROGRAM
"""

import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time

ROOT, PROGRAM = sys.argv[1:3]

MODEL = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 256, "hidden_size": 32, "intermediate_size": 64,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64, "rms_norm_eps": 1e-6,
    "hidden_act": "silu", "tie_word_embeddings": True, "rope_theta": 10000.0, "initializer_range": 0.02,
}  # fmt: skip
CONFIG = {
    "model": {"config": MODEL},
    "data": {"train": "train.txt", "validation": "validation.txt", "seq_len": 16},
    "train_batch_size": 8, "gradient_accumulation_steps": 1, "max_steps": 6, "seed": 3, "gradient_clipping": 1.0,
    "optimizer": {"type": "AdamW", "params": {"lr": 0.01, "weight_decay": 0.01, "no_decay": ["norm"]}},
    "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 0.01, "warmup_num_steps": 2, "warmup_type": "linear"}},
}  # fmt: skip


def need(condition, what, *shown):
    if not condition:
        raise AssertionError(f"expected: {what}\n" + "\n".join(str(s) for s in shown))


def start(ranks, *overrides):
    command = ["bash", f"{ROOT}/scripts/launch", "-n", str(ranks), PROGRAM, "--config", "config.json"]
    for each in overrides:
        command += ["--set", each]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def run(ranks, *overrides):
    process = start(ranks, *overrides)
    out, err = process.communicate(timeout=120)
    return process.returncode, out, err


def metrics(name):
    with open(name) as file:
        lines = [json.loads(line) for line in file]
    return [line for line in lines if "loss" in line], [line for line in lines if "validation_loss" in line]


def check_same(a, b, what):
    need(len(a) == len(b), f"{what}: as many steps", a, b)
    for x, y in zip(a, b):
        need(abs(x["loss"] - y["loss"]) < 1e-5 * x["loss"], f"{what}: equal losses", x, y)
        need(abs(x["grad_norm"] - y["grad_norm"]) < 1e-4 * x["grad_norm"], f"{what}: equal norms", x, y)
        need(x["lr"] == y["lr"], f"{what}: equal rates", x, y)


def trains():
    code, out, err = run(2, "metrics_file=two.jsonl", "eval_every=3")
    need(code == 0, "two ranks train", out, err)
    steps, validation = metrics("two.jsonl")
    need([s["step"] for s in steps] == [1, 2, 3, 4, 5, 6], "a line a step", steps)
    need([v["step"] for v in validation] == [0, 3, 6], "validation before, between and after", validation)
    need(5.3 < validation[0]["validation_loss"] < 5.8, "a new model knows nothing: log(256) nats", validation)
    need(validation[-1]["validation_loss"] < validation[0]["validation_loss"] - 0.5, "it learns", validation)
    keys = ["step", "loss", "grad_norm", "lr", "tokens_per_s", "step_ms", "peak_unsharded_bytes", "rss_bytes"]
    need(all(k in s for s in steps for k in keys), f"each line has {keys}", steps)
    need("validation loss" in out and "done after 6 of 6 steps" in out, "a person sees it", out)

    code, out, err = run(1, "metrics_file=one.jsonl", "gradient_accumulation_steps=4", "zero_optimization.stage=2", "eval_every=6")
    need(code == 0, "one rank trains", out, err)
    one, one_validation = metrics("one.jsonl")
    check_same(steps, one, "1 rank, 4 micro-batches against 2 ranks, 1")
    need(abs(one_validation[-1]["validation_loss"] - validation[-1]["validation_loss"]) < 1e-4, "equal validation", validation, one_validation)


def refuses():
    with open("short.txt", "w") as file:
        file.write("too short")
    with open("ids.bin", "wb") as file:
        file.write(b"\0\0" * 40 + b"\0\1" + b"\0\0" * 9)  # 256 in the last fifth: the second rank's share
    with open("ids.json", "w") as file:
        file.write('{"dtype": "uint16"}')
    for override, expected in [
        ("model.config.sliding_window_of_mine=4", "sliding_window_of_mine"),
        ("model.config.architectures=[\"MambaForCausalLM\"]", "Mamba"),
        ('model.config={"model_type": "gpt2", "vocab_size": 256, "n_embd": 8, "n_layer": 1, "n_head": 1, "n_positions": 8}',
         "'data.seq_len' is 16, the model has 8 positions"),
        ("data.train=short.txt", "'short.txt' has 9 tokens"),
        ("data.train=nowhere.txt", "'nowhere.txt' cannot be read"),
        ("data.train=ids.bin", "'ids.bin' has the token id 256, the model's ids end at 255"),
        ("train_batch_size=9", "cannot be divided by 2"),
        ("learning_rate=1", "not understood: 'learning_rate'"),
        ("metrics_file=two.jsonl", "'two.jsonl' exists already"),
    ]:
        before = open("two.jsonl").read()
        code, out, err = run(2, override)
        need(code != 0, f"{override}: a failure", out, err)
        need((out + err).count("fsdp-train: ") == 1, f"{override}: one message", out, err)
        need(expected in out + err, f"{override}: {expected}", out, err)
        need(open("two.jsonl").read() == before, "nothing overwritten")


def stops():
    process = start(2, "metrics_file=stopped.jsonl", "max_steps=100000")
    end = time.monotonic() + 60
    while not os.path.exists("stopped.jsonl") or len(open("stopped.jsonl").readlines()) < 3:
        need(time.monotonic() < end, "training begins")
        time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=30)
    need("stopped on request after" in out, "a clean end on all ranks", out, err)
    steps, validation = metrics("stopped.jsonl")
    need(validation and validation[-1]["step"] == steps[-1]["step"], "validation after the last step", steps[-1], validation)


random.seed(1)
with tempfile.TemporaryDirectory() as room:
    os.chdir(room)
    words = ["the quick brown fox ", "jumps over ", "a lazy dog. ", "Pack my box "]
    for name, count in [("train.txt", 400), ("validation.txt", 40)]:
        with open(name, "w") as file:
            file.write("".join(random.choice(words) for _ in range(count)))
    with open("config.json", "w") as file:
        json.dump(CONFIG, file)
    for check in [trains, refuses, stops]:
        begin = time.monotonic()
        check()
        print(f"{check.__name__}: {time.monotonic() - begin:.1f} s")
