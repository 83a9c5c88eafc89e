"""Pinned dependencies and their hashes."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
FILES = ("requirements.txt", "requirements-dev.txt", "requirements.lock")


def pins_in(name: str) -> dict[str, str]:
    found = re.findall(r"^([\w.-]+)==(\S+)", (ROOT / name).read_text(), re.MULTILINE)
    return {re.sub(r"[-_.]+", "-", name).lower(): version for name, version in found}


def test_the_lock_has_hashes_of_every_pinned_dependency_but_torch():
    pins = {**pins_in("requirements.txt"), **pins_in("requirements-dev.txt")}
    assert pins.pop("torch")
    assert pins_in("requirements.lock") == pins
    blocks = re.split(r"^(?=[\w.-]+==)", (ROOT / "requirements.lock").read_text(), flags=re.M)[1:]
    assert len(blocks) == len(pins)
    for block in blocks:
        assert re.fullmatch(r"\S+ \\\n( {4}--hash=sha256:[0-9a-f]{64}( \\)?\n)+", block), block


def test_lock_file_names_no_package_index():
    for name in FILES:
        lines = [row for row in (ROOT / name).read_text().splitlines() if not row.startswith("#")]
        assert not [row for row in lines if "://" in row or row.startswith("-")], name
