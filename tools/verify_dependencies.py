"""Is what is installed what was pinned, unchanged and without known holes? Part of `make check`.

Fails for files that were changed since they were installed, for a lock that is not that of the
pins, and for distributions that do not go together. Other versions than the pinned ones are told
and no failure: other machines have theirs. So are known vulnerabilities, except with --strict, or
yesterday's commit would fail today; and that the service that knows them cannot be reached.
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
LARGE_BYTES = 64 * 2**20  # libraries beyond this are checked by their size alone
AUDIT_TIMEOUT_S = 30


def main() -> int:
    pins = dict(pinned())
    for note in other_versions(pins):
        print(f"note: {note}", file=sys.stderr)
    flaws = [*unlocked(pins), *changed_files(pins)]
    for flaw in flaws:
        print(flaw, file=sys.stderr)
    consistent = subprocess.run([sys.executable, "-m", "pip", "check"], check=False).returncode == 0
    has_holes = has_known_holes()
    return int(bool(flaws) or not consistent or (has_holes and "--strict" in sys.argv))


def pinned() -> Iterator[tuple[str, str]]:
    for file in PINS:
        for found in re.finditer(r"^([\w.-]+)==(\S+)", (ROOT / file).read_text(), re.MULTILINE):
            yield normal(found[1]), found[2]


def other_versions(pins: dict[str, str]) -> Iterator[str]:
    for name, version in pins.items():
        try:
            installed = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            yield f"{name} {version} is pinned and not installed."
            continue
        if installed.partition("+")[0] != version:  # "+cpu" and the like name a build
            yield f"{name} {installed} is installed, but {version} is pinned."


def unlocked(pins: dict[str, str]) -> Iterator[str]:
    text = (ROOT / "requirements.lock").read_text()
    found = re.findall(r"^([\w.-]+)==(\S+) \\$", text, re.MULTILINE)
    locked = {normal(name): version for name, version in found}
    for name in sorted({**pins, **locked}):
        if name != "torch" and pins.get(name) != locked.get(name):
            there = locked.get(name, "not")
            yield f"requirements.lock has {name} {there}, but pinned is {pins.get(name, 'none')}."


def changed_files(pins: dict[str, str]) -> Iterator[str]:
    """Files that are not what their own distribution brought."""
    for name in pins:
        try:
            files = importlib.metadata.files(name) or []
        except importlib.metadata.PackageNotFoundError:
            continue  # told already
        for file in files:
            path = Path(str(file.locate()))
            if file.hash is None or file.hash.mode != "sha256" or path.suffix == ".pyc":
                continue
            if not path.is_file():
                yield f"{name} lacks its file {file}; install it again."
            elif file.size is not None and path.stat().st_size != file.size:
                yield f"{name} has a file {file} of another size; install it again."
            elif path.stat().st_size <= LARGE_BYTES and _digest(path) != file.hash.value:
                yield f"{name} has a file {file} that was changed; install it again."


def has_known_holes() -> bool:
    command = [sys.executable, "-m", "pip_audit", "--progress-spinner", "off", "--local"]
    command += ["--skip-editable", "--timeout", "10"]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, check=False, timeout=AUDIT_TIMEOUT_S
        )
    except subprocess.TimeoutExpired:
        _skipped(f"no answer within {AUDIT_TIMEOUT_S} s")
        return False
    if "known vulnerabilit" in done.stderr and done.stderr.lstrip().startswith("Found"):
        print(f"WARNING: {done.stderr}{done.stdout}", file=sys.stderr)
        return True
    num_unknown = done.stdout.count("could not be audited")
    if num_unknown > 10:  # a few may be nobody's but ours; so many means that it knows nothing
        _skipped(f"it does not know {num_unknown} of the packages")
    elif done.returncode != 0:
        _skipped((done.stderr.strip() or "no reason given").splitlines()[-1])
    return False


def _skipped(reason: str) -> None:
    print(
        f"WARNING: NOT AUDITED: the vulnerability service could not be asked ({reason:.200}).",
        file=sys.stderr,
    )


def _digest(path: Path) -> str:
    digest = hashlib.sha256(path.read_bytes()).digest()
    return base64.urlsafe_b64encode(digest).decode().rstrip("=")


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


if __name__ == "__main__":
    sys.exit(main())
