"""transformers, peft and safetensors read what fsdp-train writes, and compute what PyTorch computed before.

    .venv/bin/python check_interop.py ROOT PROGRAM
"""

import json
import os
import subprocess
import sys
import tempfile

ROOT, PROGRAM = sys.argv[1:3]
GOLDEN = f"{ROOT}/tests/golden"
sys.path.insert(0, f"{ROOT}/.deps/huggingface")
os.environ.update(HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false")

import numpy  # noqa: E402  (from the folder above)
import safetensors.numpy  # noqa: E402
import torch  # noqa: E402
from peft import PeftModel  # noqa: E402
from transformers import AutoModelForCausalLM  # noqa: E402


def need(condition, what, *shown):
    if not condition:
        raise AssertionError(f"expected: {what}\n" + "\n".join(str(s) for s in shown))


def expected_of(name):
    with open(f"{GOLDEN}/{name}/expected.json") as file:
        return json.load(file)


def batches_of(name):
    return safetensors.numpy.load_file(f"{GOLDEN}/{name}/batches.safetensors")["input_ids"]


def train(name, ranks, output, lr, **more):
    hyper = expected_of(name)["hyperparameters"]
    config = {
        "model": {"path": f"{GOLDEN}/{name}"},
        "data": {"train": f"{GOLDEN}/{name}/batches.safetensors"},
        "train_batch_size": 12, "gradient_accumulation_steps": 1, "max_steps": 20, "gradient_clipping": hyper["max_grad_norm"],
        "optimizer": {"type": "AdamW", "params": {"lr": lr, "eps": hyper["eps"], "weight_decay": hyper["weight_decay"] if lr else 0}},
        "output_dir": output, **more,
    }  # fmt: skip
    with open("config.json", "w") as file:
        json.dump(config, file)
    command = ["bash", f"{ROOT}/scripts/launch", "-n", str(ranks), PROGRAM, "--config", "config.json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    need(done.returncode == 0, f"{name} trains", done.stdout, done.stderr)


def logits_of(model, name):
    ids = torch.from_numpy(batches_of(name)[0])
    with torch.no_grad():
        return model(input_ids=ids).logits[0, -1]


def check_model(name, ranks):
    """Saved without having been changed, a model computes the logits that PyTorch found for the original."""
    train(name, ranks, f"{name}-model", lr=0.0, max_steps=1)
    model, report = AutoModelForCausalLM.from_pretrained(f"{name}-model/model", output_loading_info=True)
    need(not report["missing_keys"] and not report["unexpected_keys"], "every name is known to transformers", report)
    wanted = torch.tensor(expected_of(name)["logits_batch0_row0_last"])
    difference = (logits_of(model.eval(), name) - wanted).abs().max().item()
    need(difference < 1e-5, f"{name}: PyTorch's logits", difference)


def check_adapter(name, ranks):
    """Trained for 20 steps, an adapter has in peft the sums and norms that peft's own training ended with."""
    train(name, ranks, f"{name}-lora", lr=expected_of(name)["hyperparameters"]["lr"], lora={"adapter": f"{GOLDEN}/{name}/adapter"})
    base = AutoModelForCausalLM.from_pretrained(f"{GOLDEN}/{name}").eval()
    before = logits_of(base, name)
    model = PeftModel.from_pretrained(base, f"{name}-lora/adapter").eval()
    wanted = expected_of(name)["lora"]["final_sum_and_norm"]
    found = {n: p.double() for n, p in model.named_parameters() if "lora_" in n}
    need(found.keys() == wanted.keys(), "the same adapters", found.keys(), wanted.keys())
    for key, (total, norm) in wanted.items():
        got = found[key]
        need(abs(got.sum().item() - total) < 1e-4 * norm and abs(got.norm().item() - norm) < 1e-4 * norm, f"{key} as peft trained it", got.norm(), norm)
    need((logits_of(model, name) - before).abs().max() > 1e-3, "an adapter that does something")


def check_checkpoint():
    """Put together as docs/design/checkpoint_format.md shows, a checkpoint of 3 ranks is the model saved beside it."""
    train("llama", 3, "checkpointed", lr=0.003, max_steps=3, save_every=3)
    folder = "checkpointed/checkpoints/step-00000003"
    with open(f"{folder}/manifest.json") as file:
        manifest = json.load(file)["manifest"]
    files = [safetensors.numpy.load_file(f"{folder}/{f['name']}") for f in manifest["files"]]
    weights = safetensors.numpy.load_file("checkpointed/model/model.safetensors")
    for name, weight in weights.items():
        tensor = manifest["tensors"][f"model/{name}"]
        whole = numpy.concatenate([files[p["rank"]][f"model/{name}"] for p in tensor["parts"]]).reshape(tensor["shape"])
        need(numpy.array_equal(whole, weight), f"{name} is the same in both")
    steps = manifest["optimizer"]["steps"]
    need(set(steps) == set(weights) and set(steps.values()) == {3}, "three steps of every parameter", steps)


with tempfile.TemporaryDirectory() as room:
    os.chdir(room)
    for name, ranks in [("llama", 2), ("gpt2", 3)]:
        check_model(name, ranks)
        check_adapter(name, ranks)
        print(f"{name}: transformers and peft read it")
    check_checkpoint()
    print("a checkpoint is put together in Python")
