"""Compare installed packages with the pins, and look for known vulnerabilities; see `make check`.

It fails if a file was changed after its installation, if requirements.lock does not match the pins,
or if packages conflict. A version that differs from its pin is only reported, because machines
differ. Known vulnerabilities fail only with --strict, so that a commit that passed yesterday does
not fail today. An unreachable vulnerability service is a warning.
"""

import base64
import hashlib
import importlib.metadata
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
PINS = ("requirements.txt", "requirements-dev.txt")
LARGE_BYTES = 64 * 2**20  # of larger files only the size is checked
AUDIT_TIMEOUT_S = 30


def main() -> int:
    pins = dict(pinned())
    for note in other_versions(pins):
        print(f"note: {note}", file=sys.stderr)
    problems = [*lock_mismatches(pins), *changed_files(pins)]
    for problem in problems:
        print(problem, file=sys.stderr)
    consistent = subprocess.run([sys.executable, "-m", "pip", "check"], check=False).returncode == 0
    is_vulnerable = has_known_vulnerabilities()
    return int(bool(problems) or not consistent or (is_vulnerable and "--strict" in sys.argv))


def pinned() -> Iterator[tuple[str, str]]:
    for file in PINS:
        for found in re.finditer(r"^([\w.-]+)==(\S+)", (ROOT / file).read_text(), re.MULTILINE):
            yield normalized(found[1]), found[2]


def other_versions(pins: dict[str, str]) -> Iterator[str]:
    for name, version in pins.items():
        try:
            installed = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            yield f"{name} {version} is pinned, but not installed."
            continue
        if installed.partition("+")[0] != version:  # "+cpu" names a build, not a version
            yield f"{name} {installed} is installed, but {version} is pinned."


def lock_mismatches(pins: dict[str, str]) -> Iterator[str]:
    text = (ROOT / "requirements.lock").read_text()
    found = re.findall(r"^([\w.-]+)==(\S+) \\$", text, re.MULTILINE)
    locked = {normalized(name): version for name, version in found}
    for name in sorted({**pins, **locked}):
        if name != "torch" and pins.get(name) != locked.get(name):
            yield (
                f"{name}: requirements.lock has {locked.get(name, 'no version')}, but the pin is"
                f" {pins.get(name, 'missing')}; run: python tools/write_lock.py"
            )


def changed_files(pins: dict[str, str]) -> Iterator[str]:
    """Installed files that differ from those of their package."""
    for name in pins:
        try:
            files = importlib.metadata.files(name) or []
        except importlib.metadata.PackageNotFoundError:
            continue  # reported by other_versions()
        for file in files:
            path = Path(str(file.locate()))
            if file.hash is None or file.hash.mode != "sha256" or path.suffix == ".pyc":
                continue
            if not path.is_file():
                yield f"{name}: its file {file} is missing; install the package again."
            elif file.size is not None and path.stat().st_size != file.size:
                yield f"{name}: its file {file} has a different size; install the package again."
            elif path.stat().st_size <= LARGE_BYTES and _digest(path) != file.hash.value:
                yield f"{name}: its file {file} was changed; install the package again."


def has_known_vulnerabilities() -> bool:
    command = [sys.executable, "-m", "pip_audit", "--progress-spinner", "off", "--local"]
    command += ["--skip-editable", "--timeout", "10"]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, check=False, timeout=AUDIT_TIMEOUT_S
        )
    except subprocess.TimeoutExpired:
        _warn_not_audited(f"no answer within {AUDIT_TIMEOUT_S} s")
        return False
    if "known vulnerabilit" in done.stderr and done.stderr.lstrip().startswith("Found"):
        print(f"WARNING: {done.stderr}{done.stdout}", file=sys.stderr)
        return True
    num_unknown = done.stdout.count("could not be audited")
    if num_unknown > 10:  # a few packages may be unknown, but not so many
        _warn_not_audited(f"it does not know {num_unknown} of the packages")
    elif done.returncode != 0:
        _warn_not_audited((done.stderr.strip() or "no reason given").splitlines()[-1])
    return False


def _warn_not_audited(reason: str) -> None:
    print(
        f"WARNING: NOT AUDITED: the vulnerability service did not answer ({reason:.200}).",
        file=sys.stderr,
    )


def _digest(path: Path) -> str:
    digest = hashlib.sha256(path.read_bytes()).digest()
    return base64.urlsafe_b64encode(digest).decode().rstrip("=")


def normalized(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


if __name__ == "__main__":
    sys.exit(main())
