"""Compares what every file under csrc includes with the tables of docs/design/layers.md.

    python3 check_layers.py ROOT              checks the project in ROOT
    python3 check_layers.py ROOT --self-check checks that mistakes are found
"""

import os
import re
import sys
import tempfile

INCLUDE = re.compile(r'^\s*#\s*include\s*(["<])([^">]+)[">]', re.MULTILINE)


def tables(text):
    """Each table of the page as a list of dictionaries, by the headings of its columns."""
    result, headings = [], None
    for line in text.splitlines():
        if not line.startswith("|"):
            headings = None
            continue
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
        if headings is None:
            headings = cells
            result.append([])
        elif not set(line) <= set("|- :"):
            if len(cells) != len(headings):
                raise SystemExit(f"layers.md: this row has {len(cells)} columns, its table {len(headings)}: {line}")
            result[-1].append(dict(zip(headings, cells)))
    return result


def quoted(cell):
    return re.findall(r"`([^`]+)`", cell)


def read_rules(page):
    layers, single = {}, {}
    for table in tables(page):
        for row in table:
            if "layer" in row:
                (name,) = quoted(row["layer"])
                layers[name] = (set(quoted(row["may include"])), quoted(row["must not include"]))
            elif "only in" in row:
                single[quoted(row["include"])[0]] = quoted(row["only in"])
    if not layers:
        raise SystemExit("layers.md: no table with a column 'layer' was found")
    for name, (may, _) in layers.items():
        for other in may - set(layers):
            raise SystemExit(f"layers.md: '{name}' may include '{other}', which has no row")
    return layers, single


def sources(folder):
    for base, _, names in os.walk(folder):
        for name in names:
            if name.endswith((".h", ".cpp", ".cc", ".hpp", ".inl")):
                yield os.path.relpath(os.path.join(base, name), folder)


def check(root):
    with open(f"{root}/docs/design/layers.md") as page:
        layers, single = read_rules(page.read())
    csrc, mistakes, count = f"{root}/csrc", [], 0
    for folder in sorted(os.listdir(csrc)):
        if os.path.isdir(f"{csrc}/{folder}") and folder not in layers and any(sources(f"{csrc}/{folder}")):
            mistakes.append(f"csrc/{folder}: no row in docs/design/layers.md")
    for file in sorted(sources(csrc)):
        layer = file.split("/")[0]
        if layer not in layers:
            continue
        count += 1
        may, refused = layers[layer]
        with open(f"{csrc}/{file}") as source:
            includes = INCLUDE.findall(source.read())
        for quote, path in includes:
            here = f"csrc/{file} includes {path}"
            target = path.split("/")[0]
            if os.path.exists(f"{csrc}/{path}"):
                if target != layer and target not in may:
                    mistakes.append(f"{here}: '{layer}' may include {', '.join(sorted(may)) or 'no other layer'}")
            elif quote == '"':
                # One spelling only, from csrc: the path then shows the layer.
                mistakes.append(f"{here}: no such file under csrc (own headers as \"layer/file.h\", all others in <>)")
            for beginning in refused:
                if path.startswith(beginning):
                    mistakes.append(f"{here}: '{layer}' must not include {beginning}")
            for beginning, owners in single.items():
                if path.startswith(beginning) and file not in owners:
                    mistakes.append(f"{here}: belongs to {', '.join(owners)} only")
    # What the library is for its users must not lean on what is not installed.
    for file in sorted(sources(f"{root}/include/fsdp")):
        count += 1
        with open(f"{root}/include/fsdp/{file}") as source:
            for quote, path in INCLUDE.findall(source.read()):
                if quote == '"' or (os.path.exists(f"{csrc}/{path}") and path.split("/")[0] in layers):
                    mistakes.append(f"include/fsdp/{file} includes {path}: public headers include <fsdp/...> and installed headers only")
    return mistakes, count


def self_check(root):
    """Builds a small project of each mistake beside the real tables, and expects it to be named."""
    with open(f"{root}/docs/design/layers.md") as page:
        page = page.read()
    cases = [
        ("nothing wrong", {"csrc/runtime/a.cpp": '#include "comm/b.h"\n#include <fsdp/x.h>\n#include <vector>\n', "csrc/comm/b.h": ""}, None),
        ("a layer below", {"csrc/comm/a.cpp": '#include "runtime/b.h"\n', "csrc/runtime/b.h": ""}, "comm/a.cpp includes runtime/b.h"),
        ("in angle brackets", {"csrc/comm/a.cpp": "#include <runtime/b.h>\n", "csrc/runtime/b.h": ""}, "comm/a.cpp includes runtime/b.h"),
        ("around a corner", {"csrc/comm/a.cpp": '#include "../runtime/b.h"\n', "csrc/runtime/b.h": ""}, "comm/a.cpp includes ../runtime/b.h"),
        ("tensors in layout", {"csrc/layout/a.cpp": "#  include <ATen/core/Tensor.h>\n"}, "must not include ATen/"),
        ("gloo elsewhere", {"csrc/comm/a.cpp": "#include <gloo/context.h>\n"}, "belongs to comm/gloo_backend.cpp only"),
        ("gloo at home", {"csrc/comm/gloo_backend.cpp": "#include <gloo/context.h>\n"}, None),
        ("a folder without a row", {"csrc/cellar/a.cpp": ""}, "csrc/cellar: no row"),
        ("an internal header in a public one", {"include/fsdp/x.h": "#include <comm/b.h>\n", "csrc/comm/b.h": ""}, "fsdp/x.h includes comm/b.h"),
    ]
    wrong = []
    for name, files, expected in cases:
        with tempfile.TemporaryDirectory() as folder:
            for path, text in {"docs/design/layers.md": page, "csrc/comm/.keep": "", **files}.items():
                os.makedirs(os.path.dirname(f"{folder}/{path}"), exist_ok=True)
                with open(f"{folder}/{path}", "w") as out:
                    out.write(text)
            mistakes, _ = check(folder)
            if (expected is None) != (not mistakes) or (expected and not any(expected in mistake for mistake in mistakes)):
                wrong.append(f"self-check '{name}': expected {expected or 'no mistake'}, got {mistakes or 'no mistake'}")
    return wrong, len(cases)


if __name__ == "__main__":
    found, count = (self_check if "--self-check" in sys.argv[2:] else check)(sys.argv[1])
    print("\n".join(found))
    if not count:
        sys.exit("nothing was checked")
    print(f"{count} checked, {len(found)} mistakes")
    sys.exit(1 if found else 0)
