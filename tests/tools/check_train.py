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


def start(ranks, *overrides, config="config.json"):
    command = ["bash", f"{ROOT}/scripts/launch", "-n", str(ranks), PROGRAM, "--config", config]
    for each in overrides:
        command += ["--set", each]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def run(ranks, *overrides, config="config.json"):
    process = start(ranks, *overrides, config=config)
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


GOLDEN = f"{ROOT}/tests/golden"


def golden_config(name, kind):
    with open(f"{GOLDEN}/{name}/expected.json") as file:
        expected = json.load(file)
    hyper = expected["hyperparameters"]
    config = {
        "model": {"path": f"{GOLDEN}/{name}"},
        "data": {"train": f"{GOLDEN}/{name}/batches.safetensors"},
        "train_batch_size": 12, "gradient_accumulation_steps": 1, "max_steps": 20, "gradient_clipping": hyper["max_grad_norm"],
        "optimizer": {"type": "AdamW", "params": {k: hyper[k] for k in ["lr", "eps", "weight_decay"]}},
    }  # fmt: skip
    if kind == "lora":
        config["lora"] = {"adapter": f"{GOLDEN}/{name}/adapter"}
    return config, expected[kind]


def trains_as_pytorch_does():
    for name, kind, ranks in [("llama", "full", 2), ("llama", "lora", 3), ("gpt2", "full", 1), ("gpt2", "lora", 2)]:
        case = f"{name}-{kind}"
        config, expected = golden_config(name, kind)
        with open("golden.json", "w") as file:
            json.dump(config, file)
        code, out, err = run(ranks, f"metrics_file={case}.jsonl", f"output_dir={case}", config="golden.json")
        need(code == 0, f"{case} on {ranks} ranks", out, err)
        steps, _ = metrics(f"{case}.jsonl")
        for step, loss, norm in zip(steps, expected["loss"], expected["grad_norm"], strict=True):
            need(abs(step["loss"] - loss) < 1e-5 * loss, f"{case}: PyTorch's loss {loss}", step)
            need(abs(step["grad_norm"] - norm) < 1e-4 * norm, f"{case}: PyTorch's norm {norm}", step)
        need(f"saved in {case}/{'adapter' if kind == 'lora' else 'model'}" in out, f"{case} is saved", out)

    # What was saved is where another run begins.
    config, _ = golden_config("llama", "full")
    config["model"]["path"] = "llama-full/model"
    config["data"]["validation"] = config["data"]["train"]
    with open("golden.json", "w") as file:
        json.dump(config, file)
    code, out, err = run(2, "metrics_file=again.jsonl", "max_steps=1", "eval_every=1", config="golden.json")
    need(code == 0, "a saved model is loaded", out, err)
    code, out, err = run(1, "metrics_file=half.jsonl", "fp16.enabled=true", "fp16.initial_scale_power=8", config="golden.json")
    need(code == 0, "fp16 trains", out, err)
    again, half = metrics("again.jsonl")[0][0], metrics("half.jsonl")[0][0]
    need(abs(again["loss"] - half["loss"]) < 0.01 and half["loss_scale"] == 256, "fp16 loses little", again, half)


def refuses_files():
    config, _ = golden_config("llama", "lora")
    with open("golden.json", "w") as file:
        json.dump(config, file)
    os.makedirs("cut")
    for name in ["config.json", "model.safetensors"]:
        with open(f"{GOLDEN}/llama/{name}", "rb") as file:
            content = file.read()
        with open(f"cut/{name}", "wb") as file:
            file.write(content[:-1] if name.startswith("model") else content)
    for override, expected in [
        ("model.path=nowhere", "'nowhere/config.json' cannot be read"),
        ("model.path=cut", "it is cut off"),
        ('model.path=' + f"{GOLDEN}/gpt2", "no module's path ends in 'q_proj'"),
        ("lora.adapter=nowhere", "'nowhere/adapter_config.json' cannot be read"),
        ("lora.r=4", "not understood: 'lora.r'"),
        ("train_batch_size=6", "'data.train' has batches of 12 rows, 'train_batch_size' is 6"),
        (f"data.train={GOLDEN}/llama/model.safetensors", "expected a tensor 'input_ids'"),
        ("data.seq_len=3", "rows of .safetensors files have a length of their own"),
    ]:
        code, out, err = run(2, override, config="golden.json")
        need(code != 0, f"{override}: a failure", out, err)
        need((out + err).count("fsdp-train: ") == 1, f"{override}: one message", out, err)
        need(expected in out + err, f"{override}: {expected}", out, err)


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


def resumes():
    code, out, err = run(2, "metrics_file=straight.jsonl", "max_steps=12")
    need(code == 0, "a straight run", out, err)
    straight, _ = metrics("straight.jsonl")

    own = ["output_dir=run", "save_every=3", "max_steps=12", "metrics_file=resumed.jsonl", "resume=auto"]
    process = start(2, *own)  # resume=auto where there is nothing yet: a new run
    end = time.monotonic() + 60
    while not os.path.exists("run/checkpoints/step-00000006"):
        need(time.monotonic() < end and process.poll() is None, "two checkpoints")
        time.sleep(0.01)
    process.kill()
    process.wait()
    subprocess.run(["pkill", "-KILL", "-f", "metrics_file=resumed.jsonl"])
    code, out, err = run(2, *own)
    need(code == 0 and "resumed from run/checkpoints/step-000000" in out, "the killed run is taken up", out, err)
    resumed, _ = metrics("resumed.jsonl")
    for a, b in zip(straight, resumed, strict=True):
        need(all(a[k] == b[k] for k in ["step", "loss", "grad_norm", "lr"]), "bit for bit the same run", a, b)
    need(sorted(os.listdir("run/checkpoints")) == ["step-00000009", "step-00000012"], "two are kept", os.listdir("run/checkpoints"))

    more = ["max_steps=14", "resume=run/checkpoints/step-00000009", "output_dir=elsewhere"]
    code, out, err = run(1, *more, "metrics_file=one_rank.jsonl")
    need(code == 0, "another world size, from a given checkpoint", out, err)
    check_same(straight[9:], metrics("one_rank.jsonl")[0][:3], "1 rank goes on with what 2 saved")

    process = start(2, "metrics_file=interrupted.jsonl", "max_steps=100000", "output_dir=interrupted", "save_every=50000")
    while not os.path.exists("interrupted.jsonl") or len(open("interrupted.jsonl").readlines()) < 3:
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    need("stopped on request after" in out and "saved interrupted/checkpoints/step-" in out, "Ctrl-C saves", out, err)

    for override, expected in [
        ("output_dir=run", "'run/checkpoints' is there already"),
        ("resume=nowhere", "there is no checkpoint at 'nowhere'"),
        ("save_every=3", "expected 'output_dir'"),
    ]:
        code, out, err = run(2, override)
        need(code != 0 and expected in out + err and (out + err).count("fsdp-train: ") == 1, f"{override}: {expected}", out, err)
    code, out, err = run(2, "output_dir=run", "resume=auto", "optimizer.params.lr=0.5", "seed=9")
    need(code != 0 and "had other settings: 'optimizer.params.lr', 'seed'" in out + err, "other settings are named", out, err)


random.seed(1)
with tempfile.TemporaryDirectory() as room:
    os.chdir(room)
    words = ["the quick brown fox ", "jumps over ", "a lazy dog. ", "Pack my box "]
    for name, count in [("train.txt", 400), ("validation.txt", 40)]:
        with open(name, "w") as file:
            file.write("".join(random.choice(words) for _ in range(count)))
    with open("config.json", "w") as file:
        json.dump(CONFIG, file)
    for check in [trains, trains_as_pytorch_does, refuses, refuses_files, stops, resumes]:
        begin = time.monotonic()
        check()
        print(f"{check.__name__}: {time.monotonic() - begin:.1f} s")
