"""Uses the library as an outside project does. See CMakeLists.txt beside this for how it is called.

outside/ is the README's own program and its CMakeLists.txt, through find_package. The other ways to reach the library are made from it
by changing a line: C++20 set first (LibTorch's own package fails there when it looks for CUDA), or add_subdirectory.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys

HERE = os.path.dirname(os.path.abspath(__file__))
OUTSIDE = f"{HERE}/outside"


def run(*command, expect_failure=False, env=None):
    print("+", " ".join(command), flush=True)
    result = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=env)
    print(result.stdout, flush=True)
    if (result.returncode != 0) != expect_failure:
        sys.exit(f"exit code {result.returncode}, expected {'a failure' if expect_failure else 'success'}")
    return result.stdout


def need(condition, text):
    if not condition:
        sys.exit(f"not as expected: {text}")


def configure_command(o, source, build, prefixes):
    return [o.cmake, "-S", source, "-B", build, "-G", o.generator, f"-DCMAKE_CXX_COMPILER={o.compiler}",
            f"-DCMAKE_BUILD_TYPE={o.build_type}", f"-DCMAKE_PREFIX_PATH={';'.join(prefixes)}"]  # fmt: skip


def plain_environment():
    """Without a group of processes that this test itself may have been started in."""
    return {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")}


def install(o):
    shutil.rmtree(f"{o.room}/prefix", ignore_errors=True)
    run(o.cmake, "--install", o.build, "--prefix", f"{o.room}/prefix")
    found = {os.path.relpath(os.path.join(base, name), f"{o.room}/prefix") for base, _, names in os.walk(f"{o.room}/prefix") for name in names}
    headers = {f"include/fsdp/{name}" for name in os.listdir(f"{o.source}/include/fsdp") if name.endswith(".h")}
    need(headers <= found, f"headers not installed: {headers - found}")
    strangers = {f for f in found if f.startswith("include/")} - headers
    need(not strangers, f"installed beside the public headers: {strangers}")
    check_symbols(f"{o.build}/lib/libfsdp.so")


def check_symbols(library):
    """Hidden visibility: what the library defines for others is its own interface, or instances of templates of others."""
    listing = subprocess.run(["nm", "-DC", "--defined-only", library], stdout=subprocess.PIPE, text=True, check=True).stdout
    symbols = [line.split(" ", 2)[2] for line in listing.splitlines() if len(line.split(" ", 2)) == 3]
    need(any(s.startswith("fsdp::") for s in symbols), "the library exports nothing")
    internal = [s for s in symbols if s.startswith(("fsdp::comm::", "fsdp::plan::", "fsdp::layout::", "fsdp::runtime::"))]
    need(not internal, f"internal symbols are exported: {internal[:10]}")


def other_torch(o):
    """A LibTorch of another version, and one that was not installed at all: the message must say what is wrong."""
    fake = f"{o.room}/other-torch"
    shutil.rmtree(fake, ignore_errors=True)
    os.makedirs(f"{fake}/share/cmake/Torch")
    with open(f"{o.torch}/share/cmake/Torch/TorchConfigVersion.cmake") as real:
        version = real.read().replace(f'"{o.torch_version}"', '"2.10.3"')
    with open(f"{fake}/share/cmake/Torch/TorchConfigVersion.cmake", "w") as out:
        out.write(version)
    with open(f"{fake}/share/cmake/Torch/TorchConfig.cmake", "w") as out:
        out.write('message(FATAL_ERROR "must not be loaded")\n')
    for standard in ("", "-DCMAKE_CXX_STANDARD=20"):
        build = f"{o.room}/build-other-torch"
        shutil.rmtree(build, ignore_errors=True)
        command = configure_command(o, OUTSIDE, build, [f"{o.room}/prefix", fake]) + ([standard] if standard else [])
        said = " ".join(run(*command, expect_failure=True).split())
        for part in (f"LibTorch {o.torch_version}", "LibTorch 2.10.3", fake):
            need(part in said, f"the message names {part}")
        need("must not be loaded" not in said, "the other LibTorch's configuration is not loaded")


def outside(o, way, cxx20, build_it):
    name = way + ("-cxx20" if cxx20 else "")
    project = f"{o.room}/{name}"
    os.makedirs(project, exist_ok=True)
    with open(f"{OUTSIDE}/CMakeLists.txt") as page:
        lines = page.read()
    find = "find_package(fsdp REQUIRED)\n"
    need(lines.count(find) == 1, f"{OUTSIDE}/CMakeLists.txt has one line {find}")
    replacement = find if way == "find-package" else f'add_subdirectory("{o.source}" fsdp)\n'
    lines = lines.replace(find, ("set(CMAKE_CXX_STANDARD 20)\n" if cxx20 else "") + replacement)
    for file, text in (("CMakeLists.txt", lines), ("main.cpp", open(f"{OUTSIDE}/main.cpp").read())):
        write_if_changed(f"{project}/{file}", text)
    # Once with LibTorch named by the user, once left to what the package remembers.
    prefixes = ([f"{o.room}/prefix"] if way == "find-package" else []) + ([o.torch] if cxx20 else [])
    shutil.rmtree(f"{project}/from-nothing", ignore_errors=True)
    run(*configure_command(o, project, f"{project}/from-nothing", prefixes))
    if not build_it:
        return
    # What is built is kept, so that it is compiled again only when the library or the program has changed.
    run(*configure_command(o, project, f"{project}/build", prefixes))
    jobs = [] if "CMAKE_BUILD_PARALLEL_LEVEL" in os.environ else ["-j", str(os.cpu_count() or 1)]
    run(o.cmake, "--build", f"{project}/build", "--target", "main", *jobs)
    program = f"{project}/build/main"
    needed = subprocess.run(["readelf", "-d", program], stdout=subprocess.PIPE, text=True, check=True).stdout
    need("libtorch_cuda" not in needed and "libcudart" not in needed, "nothing of CUDA is linked")
    alone = run(program, env=plain_environment())
    both = run("bash", f"{o.source}/scripts/launch", "-n", "2", program, env=plain_environment())
    for said in (losses(alone, ""), losses(both, r"\[0\] "), losses(both, r"\[1\] ")):
        need(len(said) == 4 and said[-1] < 0.1 < said[0], f"the program learns: {said}")


def losses(output, prefix):
    return [float(value) for value in re.findall(rf"^{prefix}step \d+: loss ([\d.]+)$", output, re.MULTILINE)]


def write_if_changed(path, text):
    if not os.path.exists(path) or open(path).read() != text:
        with open(path, "w") as out:
            out.write(text)


def main():
    parser = argparse.ArgumentParser()
    for name in ("source", "build", "torch", "torch-version", "cmake", "generator", "compiler", "build-type"):
        parser.add_argument(f"--{name}", required=True)
    parser.add_argument("check", choices=["install", "other-torch", "find-package", "find-package-cxx20", "add-subdirectory", "add-subdirectory-cxx20"])
    parser.add_argument("--run", action="store_true", help="build and run also what is only configured otherwise")
    o = parser.parse_args()
    o.room = f"{o.build}/package"
    os.makedirs(o.room, exist_ok=True)
    if o.check == "install":
        install(o)
    elif o.check == "other-torch":
        other_torch(o)
    else:
        way = o.check.removesuffix("-cxx20")
        outside(o, way, o.check.endswith("-cxx20"), way == "find-package" or o.run)


main()
