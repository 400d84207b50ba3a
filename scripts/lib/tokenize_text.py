"""Cuts a text into a model's tokens, the last twentieth for validation.

    python3 tokenize_text.py MODEL_DIR TEXT FOLDER
"""

import json
import pathlib
import sys

import numpy
from transformers import AutoTokenizer

model, text, folder = sys.argv[1], pathlib.Path(sys.argv[2]), pathlib.Path(sys.argv[3])
tokenizer = AutoTokenizer.from_pretrained(model)
ids = tokenizer(text.read_bytes().decode("utf-8", errors="replace"), add_special_tokens=False)["input_ids"]
dtype = "uint16" if len(tokenizer) <= 1 << 16 else "uint32"
border = len(ids) * 19 // 20
folder.mkdir(parents=True, exist_ok=True)
for name, part in [("train", ids[:border]), ("validation", ids[border:])]:  # the last says that both are there
    (folder / f"{name}.json").write_text(json.dumps({"dtype": dtype, "tokens": len(part)}) + "\n")
    numpy.asarray(part, dtype=dtype).tofile(folder / f"{name}.bin.part")
    (folder / f"{name}.bin.part").rename(folder / f"{name}.bin")
print(f"{len(ids)} tokens")
