"""Write requirements.lock: the pins with hashes of the wheels for the tested platforms.

`python tools/write_lock.py` asks pip which wheel it would install for each platform and Python,
using the package index that pip is configured with. torch is excluded, because each platform has
its own builds.
"""

import json
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path

from verify_dependencies import ROOT, normalized, pinned

MACHINES = ("x86_64", "aarch64")
PYTHONS = ("3.11", "3.12")
GLIBCS = ("34", "31", "28", "27", "26", "24", "17")  # manylinux versions of wheels
HEAD = """\
# Every pinned dependency of requirements.txt and requirements-dev.txt except torch, with the hashes
# of its wheels for x86_64 and aarch64 and Python 3.11 and 3.12. Written by tools/write_lock.py; see
# docs/security.md.
"""


def main() -> None:
    pins = sorted((name, version) for name, version in pinned() if name != "torch")
    hashes: dict[str, set[str]] = defaultdict(set)
    for machine in MACHINES:
        for python in PYTHONS:
            for name, digest in wheels(pins, machine=machine, python=python):
                hashes[name].add(digest)
    lines = [entry(name, version, hashes[name]) for name, version in pins]
    (ROOT / "requirements.lock").write_text(HEAD + "".join(lines))


def wheels(
    pins: list[tuple[str, str]], *, machine: str, python: str
) -> list[tuple[str, str]]:  # name, sha256
    platforms = [f"manylinux_2_{glibc}_{machine}" for glibc in GLIBCS]
    platforms += [f"manylinux2014_{machine}", f"linux_{machine}"]
    with tempfile.TemporaryDirectory() as folder:
        wanted, report = Path(folder) / "pins.txt", Path(folder) / "report.json"
        wanted.write_text("".join(f"{name}=={version}\n" for name, version in pins))
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--dry-run", "--no-deps"]
        command += ["--ignore-installed", "--only-binary=:all:", "--target", folder]
        command += [f"--platform={platform}" for platform in platforms]
        command += [f"--python-version={python}", f"--report={report}", f"--requirement={wanted}"]
        subprocess.run(command, check=True)
        chosen = json.loads(report.read_text())["install"]
    return [
        (
            normalized(each["metadata"]["name"]),
            each["download_info"]["archive_info"]["hashes"]["sha256"],
        )
        for each in chosen
    ]


def entry(name: str, version: str, hashes: set[str]) -> str:
    listed = "".join(f" \\\n    --hash=sha256:{digest}" for digest in sorted(hashes))
    return f"{name}=={version}{listed}\n"


if __name__ == "__main__":
    main()
