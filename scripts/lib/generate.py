"""The tokenizer around fsdp-generate: see scripts/generate."""

import argparse
import subprocess
import sys

from transformers import AutoTokenizer


def main():
    root = sys.argv[1]
    parser = argparse.ArgumentParser(prog="scripts/generate")
    parser.add_argument("model")
    parser.add_argument("prompt")
    parser.add_argument("--ranks", default="2")
    options, rest = parser.parse_known_args(sys.argv[2:])
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    ids = tokenizer(options.prompt, add_special_tokens=False)["input_ids"]
    command = ["bash", f"{root}/scripts/launch", "-n", options.ranks, f"{root}/build/bin/fsdp-generate", "--model", options.model]
    command += ["--prompt-ids", ",".join(map(str, ids)), *rest]
    if tokenizer.eos_token_id is not None:
        command += ["--end-id", str(tokenizer.eos_token_id)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    if done.returncode != 0:
        raise SystemExit(done.returncode)
    line = done.stdout.strip().splitlines()[-1].removeprefix("[0] ")
    print(options.prompt + tokenizer.decode([int(i) for i in line.split(",")]))


main()
