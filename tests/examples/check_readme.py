"""check_readme.py ROOT: the program that the README shows is the one that tests/package builds and runs, to the letter."""

import re
import sys

root = sys.argv[1]
with open(f"{root}/README.md") as readme:
    blocks = re.findall(r"^```(\w*)\n(.*?)^```$", readme.read(), re.MULTILINE | re.DOTALL)
missing = []
for language, name in (("cmake", "CMakeLists.txt"), ("cpp", "main.cpp")):
    path = f"tests/package/outside/{name}"
    with open(f"{root}/{path}") as file:
        if (language, file.read()) not in blocks:
            missing.append(path)
if missing:
    sys.exit(f"README.md has no code block equal to {' and to '.join(missing)}: copy one to the other")
