"""peft loads an adapter that this library wrote, and finds the validation loss that fsdp-train printed.

    PYTHONPATH=.deps/huggingface .venv/bin/python tests/interop/check_adapter.py MODEL ADAPTER VALIDATION.safetensors [LOSS [TOLERANCE]]
"""

import sys

import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

model_path, adapter, validation, *wanted = sys.argv[1:]
model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32).eval()
ids = load_file(validation)["input_ids"].flatten(0, 1)


def loss_of(model):
    total = 0.0
    with torch.no_grad():
        for rows in ids.split(4):
            logits = model(input_ids=rows).logits[:, :-1].float()
            total += torch.nn.functional.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten(), reduction="sum").item()
    return total / (ids.shape[0] * (ids.shape[1] - 1))


print(f"without the adapter: {loss_of(model):.4f} nats per token")
loss = loss_of(PeftModel.from_pretrained(model, adapter).eval())
print(f"with it: {loss:.4f}")
if wanted:
    difference = abs(loss - float(wanted[0]))
    tolerance = float(wanted[1]) if len(wanted) > 1 else 1e-3
    if difference > tolerance:
        raise SystemExit(f"FAILED: expected {wanted[0]} within {tolerance}")
