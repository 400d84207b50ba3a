"""Downloads the Debian packages of a list and unpacks them below a folder, without root and without installing anything.

    python3 fetch_debs.py LIST DEST

apt-get does the work (mirrors, proxies, signatures), with state of its own below DEST, so that neither the machine's package lists
nor its sources change. Where packages come from is taken from the machine's own entries for its Debian release; for a package
of the suite "backports" the same entries are asked for that suite.
"""

import glob
import hashlib
import os
import re
import shutil
import subprocess
import sys


class Failure(Exception):
    pass


def read_list(path):
    packages = []
    with open(path) as file:
        lines = file.read().splitlines()
    for line in lines:
        fields = line.split("#")[0].split()
        if fields:
            if len(fields) != 4 or fields[2] not in ("main", "backports"):
                raise Failure(f"{path}: expected 'package version main|backports sha256', got: {line.strip()}")
            packages.append(fields)
    return packages


def release_name():
    with open("/etc/os-release") as file:
        match = re.search(r'^VERSION_CODENAME="?(\w+)', file.read(), re.MULTILINE)
    if match:
        return match.group(1)
    raise Failure("/etc/os-release names no release (VERSION_CODENAME): is this Debian?")


def one_line_entries(text, release, suite):
    """'deb [options] URI release components' -> the same for `suite`."""
    for line in text.splitlines():
        match = re.match(r"\s*deb\s+((?:\[[^\]]*\]\s+)?\S+)\s+" + re.escape(release) + r"\s+(.*)", line)
        if match:
            yield f"deb {match.group(1)} {suite} {match.group(2)}"


def deb822_entries(text, release, suite):
    """Stanzas of 'Field: value' lines (continued by indented ones) that name `release` -> the same for `suite`."""
    text = "\n".join(line for line in text.splitlines() if not line.startswith("#"))
    for stanza in re.split(r"\n\s*\n", text):
        fields, name = {}, None
        for line in stanza.splitlines():
            if line[:1].isspace() and name:
                fields[name] += "\n" + line
            elif ":" in line:
                name, value = line.split(":", 1)
                name = name.lower()
                fields[name] = value.strip()
        off = fields.get("enabled", "yes").lower() in ("no", "false", "0")
        if off or "deb" not in fields.get("types", "").split() or release not in fields.get("suites", "").split():
            continue
        fields["types"], fields["suites"] = "deb", suite
        yield "\n".join(f"{key}: {value}" for key, value in fields.items())


def write_sources(folder, etc, release, suites):
    found = 0
    for suffix, derive, separator, files in (
        ("list", one_line_entries, "\n", [f"{etc}/sources.list", *sorted(glob.glob(f"{etc}/sources.list.d/*.list"))]),
        ("sources", deb822_entries, "\n\n", sorted(glob.glob(f"{etc}/sources.list.d/*.sources"))),
    ):
        entries = []
        for path in files:
            if os.access(path, os.R_OK):
                with open(path) as file:
                    text = file.read()
                for suite in suites:
                    entries += derive(text, release, suite)
        if entries:
            with open(f"{folder}/derived.{suffix}", "w") as out:
                out.write(separator.join(dict.fromkeys(entries)) + "\n")
        found += len(entries)
    if not found:
        raise Failure(
            f"no package source for the Debian release '{release}' under {etc} (sources.list, sources.list.d). The packages are those "
            "of Debian 12 (bookworm)."
        )


def apt(state, *arguments, cwd=None):
    options = {
        "Dir::Etc::sourcelist": "/dev/null",
        "Dir::Etc::sourceparts": f"{state}/sources.d",
        "Dir::State": f"{state}/state",
        "Dir::State::status": "/var/lib/dpkg/status",
        "Dir::Cache": f"{state}/cache",
        "Acquire::Languages": "none",
        "Acquire::Retries": "3",
        "APT::Sandbox::User": "root",  # the folder need not be readable for apt's own user
    }
    command = ["apt-get", "-q"] + [f"-o{key}={value}" for key, value in options.items()] + list(arguments)
    return subprocess.run(command, cwd=cwd, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def main(list_path, dest):
    packages = read_list(list_path)
    release = release_name()
    state = os.path.join(os.path.abspath(dest), ".apt")
    shutil.rmtree(state, ignore_errors=True)
    for folder in ("sources.d", "state/lists/partial", "cache/archives/partial", "debs"):
        os.makedirs(f"{state}/{folder}")
    suites = [release] + [f"{release}-backports"] * any(p[2] == "backports" for p in packages)
    write_sources(f"{state}/sources.d", os.environ.get("FSDP_APT_ETC", "/etc/apt"), release, suites)

    # An update may fail for a source that has no backports suite while those that matter succeed: the download decides.
    update = apt(state, "update")
    print(update.stdout)
    for name, version, _, expected in packages:
        result = apt(state, "download", f"{name}={version}", cwd=f"{state}/debs")
        print(result.stdout)
        if result.returncode:
            raise Failure(
                f"{name} {version} could not be downloaded. If the network is there, the archive may have another version by now: "
                f"see 'apt-cache policy {name}', and change {os.path.basename(list_path)}."
            )
        (path,) = glob.glob(f"{state}/debs/{name}_*.deb")
        with open(path, "rb") as file:
            got = hashlib.sha256(file.read()).hexdigest()
        if got != expected and path.endswith(("_amd64.deb", "_all.deb")):
            raise Failure(f"{os.path.basename(path)} has the checksum {got}, expected {expected}: it is not the package that was tested.")
    for path in sorted(glob.glob(f"{state}/debs/*.deb")):
        subprocess.run(["dpkg-deb", "-x", path, dest], check=True)
    shutil.rmtree(state)


if __name__ == "__main__":
    try:
        main(*sys.argv[1:])
    except Failure as failure:
        sys.exit(f"error: {failure}")
