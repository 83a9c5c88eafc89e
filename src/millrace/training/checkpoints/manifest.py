"""Sizes and checksums of the files of a checkpoint, in `manifest.json`. Torch-free.

Promise: damage_in() finds every file that is missing, truncated or changed since write_manifest().
xxh3 does not protect against deliberate changes of a file and its checksum. Any process may read.
"""

from pathlib import Path

import msgspec
import xxhash

MANIFEST_FILE = "manifest.json"
_CHUNK_BYTES = 1 << 22


class _File(msgspec.Struct, frozen=True):
    bytes: int
    xxh3: str  # 64 bits, hexadecimal


class _Manifest(msgspec.Struct, frozen=True):
    files: dict[str, _File]  # by path inside the directory


def write_manifest(directory: Path) -> None:
    """Describe every file in the directory; called after the last of them is written."""
    paths = sorted(path for path in directory.rglob("*") if path.is_file())
    files = {path.relative_to(directory).as_posix(): _described(path) for path in paths}
    text = msgspec.json.format(msgspec.json.encode(_Manifest(files=files)))
    (directory / MANIFEST_FILE).write_bytes(text + b"\n")


def damage_in(directory: Path, *, required: tuple[str, ...]) -> str | None:
    """What is wrong with the directory, as a continuation of "it ..."; None = it is undamaged."""
    if not (directory / MANIFEST_FILE).is_file():
        return f"has no {MANIFEST_FILE}"
    try:
        data = (directory / MANIFEST_FILE).read_bytes()
        files = msgspec.json.decode(data, type=_Manifest).files
        if missing := [name for name in required if name not in files]:
            return f"has no {missing[0]}"
        reasons = (_damage_of(directory / name, files[name], name=name) for name in files)
        return next((reason for reason in reasons if reason is not None), None)
    except msgspec.MsgspecError as error:
        return f"has a {MANIFEST_FILE} that cannot be read ({error})"
    except OSError as error:
        return f"cannot be read ({error.strerror})"


def _damage_of(path: Path, expected: _File, *, name: str) -> str | None:
    if not path.is_file():
        return f"has no {name}"
    num_bytes = path.stat().st_size
    if num_bytes != expected.bytes:
        return f"has a {name} of {num_bytes} bytes instead of {expected.bytes}"
    if _checksum(path) != expected.xxh3:
        return f"has a damaged {name}: its checksum differs"
    return None


def _described(path: Path) -> _File:
    return _File(bytes=path.stat().st_size, xxh3=_checksum(path))


def _checksum(path: Path) -> str:
    digest = xxhash.xxh3_64()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()
