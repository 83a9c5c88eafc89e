"""Checkpoint directories: `RUN_DIR/checkpoints/step_N`, written atomically.

Promise: a directory named step_N is complete and on the disk. It is written under a hidden name,
synced and renamed. A failure before that leaves no trace and does not touch an earlier checkpoint.
`manifest.json` is written last, with the sizes and checksums of all files. It is checked before a
run resumes, so a checkpoint that was damaged later is skipped; xxh3 does not protect against
deliberate damage. All ranks of a trainer write their parts into the hidden directory, and rank 0
does everything else; any process may read. Torch-free.
"""

import hashlib
import json
import math
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import xxhash
from safetensors import SafetensorError

from millrace.core import files as storage
from millrace.core.errors import CheckpointError, ConfigError
from millrace.monitoring.run_dir import steps_in

if TYPE_CHECKING:
    from millrace.training.parallel.ranks import Ranks
CHECKPOINTS = "checkpoints"
MANIFEST_FILE = "manifest.json"
RUN_STATE_FILE = "run_state.json"
CRITIC = "critic"  # subfolder of a checkpoint, if the run has a critic
PAST = "versions"  # likewise, if roles play earlier versions of the policy: an adapter for each
_REQUIRED_FILES = ("trainer_state.pt", RUN_STATE_FILE)
_MODEL_FILES = ("config.json",)
_ADAPTER_FILES = ("adapter_config.json", "adapter_model.safetensors")  # of a LoRA run instead
HIDDEN = ".unfinished_"
# torch and safetensors report a full disk as errors of their own.
_WRITE_ERRORS = (OSError, RuntimeError, SafetensorError)


def write_checkpoint(
    directory: Path,
    *,
    write: Callable[[Path], None],
    run_state: dict[str, Any],
    needed_bytes: int,
    ranks: "Ranks | None" = None,
) -> None:
    """Fill `directory` with what `write` puts into the folder it is given, and the run state. Of
    several `ranks`, all call this; it is complete when rank 0 returns."""
    is_first = ranks is None or ranks.rank == 0
    unfinished = directory.parent / f"{HIDDEN}{directory.name}"

    def begin() -> None:
        if not is_first:
            return
        directory.parent.mkdir(parents=True, exist_ok=True)
        for leftover in directory.parent.glob(f"{HIDDEN}*"):  # of a killed process
            shutil.rmtree(leftover)
        if shutil.disk_usage(directory.parent).free < needed_bytes:
            raise OSError("the disk is too full")
        unfinished.mkdir()

    try:
        begin() if ranks is None else ranks.together(begin)
        write(unfinished)
        if not is_first:
            return
        (unfinished / RUN_STATE_FILE).write_text(json.dumps(run_state, indent=2) + "\n")
        _write_manifest(unfinished)
        storage.sync_all(unfinished)
        move_into_place(unfinished, directory)
    except BaseException as error:
        if is_first:
            shutil.rmtree(unfinished, ignore_errors=True)
        if not isinstance(error, _WRITE_ERRORS):
            raise
        raise CheckpointError(
            f"Checkpoint {str(directory)!r} could not be written ({storage.reason(error)}):"
            f" it needs about {needed_bytes / 1e9:.3g} GB and {_free(directory.parent)};"
            " free some space, lower checkpoint.keep, or set run_dir to another disk."
        ) from error


@dataclass(frozen=True, kw_only=True, slots=True)
class FoundCheckpoint:
    directory: Path | None = None
    refused: tuple[str, ...] = ()  # a sentence about each newer, damaged one, the newest first


def newest_checkpoint(run_dir: Path) -> FoundCheckpoint:
    """Reads all files of the checkpoints it looks at."""
    refused: list[str] = []
    for _, path in reversed(_numbered(run_dir / CHECKPOINTS)):
        damage = damage_to(path)
        if damage is None:
            return FoundCheckpoint(directory=path, refused=tuple(refused))
        refused.append(f"Checkpoint {str(path)!r} is not used: it {damage}.")
    return FoundCheckpoint(directory=None, refused=tuple(refused))


class CheckpointFile(msgspec.Struct, frozen=True):
    bytes: int
    xxh3: str  # 64 bits, hexadecimal


class _Manifest(msgspec.Struct, frozen=True):
    files: dict[str, CheckpointFile]  # by path inside the directory


def _write_manifest(directory: Path) -> None:
    files = {
        path.relative_to(directory).as_posix(): CheckpointFile(path.stat().st_size, _checksum(path))
        for path in sorted(directory.rglob("*"))
        if path.is_file()
    }
    text = msgspec.json.format(msgspec.json.encode(_Manifest(files)))
    (directory / MANIFEST_FILE).write_bytes(text + b"\n")


def read_manifest(directory: Path) -> dict[str, CheckpointFile]:
    """The files of a checkpoint by their paths in it; raises MsgspecError if it is damaged."""
    data = (directory / MANIFEST_FILE).read_bytes()
    return msgspec.json.decode(data, type=_Manifest).files


def damage_to(directory: Path) -> str | None:
    """Read all files; why the checkpoint cannot be used, to follow "it ", or None if it can."""
    is_adapter = any((directory / name).is_file() for name in _ADAPTER_FILES)
    required = (*(_ADAPTER_FILES if is_adapter else _MODEL_FILES), *_REQUIRED_FILES)
    if not (directory / MANIFEST_FILE).is_file():
        return f"has no {MANIFEST_FILE}"
    try:
        files = read_manifest(directory)
        if missing := [name for name in required if name not in files]:
            return f"has no {missing[0]}"
        reasons = (_damage_to_file(directory, name, file) for name, file in files.items())
        return next(filter(None, reasons), None)
    except msgspec.MsgspecError as error:
        return f"has a {MANIFEST_FILE} that cannot be read ({error})"
    except OSError as error:
        return f"cannot be read ({error.strerror})"


def _damage_to_file(directory: Path, name: str, expected: CheckpointFile) -> str | None:
    path = directory / name
    if not path.is_file():
        return f"has no {name}"
    if (num_bytes := path.stat().st_size) != expected.bytes:
        return f"has a {name} of {num_bytes} bytes instead of {expected.bytes}"
    if _checksum(path) != expected.xxh3:
        return f"has a damaged {name}: its checksum differs"
    return None


def _checksum(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, xxhash.xxh3_64).hexdigest()  # pyright: ignore[reportArgumentType]


def read_run_state(directory: Path) -> dict[str, Any]:
    return json.loads((directory / RUN_STATE_FILE).read_text())


def past_folders(directory: Path) -> dict[int, Path]:
    """The adapters of earlier versions in a checkpoint, by version, ascending."""
    folder = directory / PAST
    numbers = sorted(int(path.name) for path in folder.iterdir()) if folder.is_dir() else []
    return {number: folder / str(number) for number in numbers}


def check_same_critic(directory: Path, *, has_critic: bool) -> None:
    """Refuse to resume with a critic from a checkpoint without one, or vice versa."""
    had_critic = (directory / CRITIC).is_dir()
    if had_critic != has_critic:
        was, remedy = ("with", "add") if had_critic else ("without", "leave out")
        raise ConfigError(
            f"{str(directory)!r} was trained {was} a critic; to resume, {remedy} the [critic]"
            " table, or train its model in a new run_dir."
        )


def prune_checkpoints(folder: Path, *, keep: int, good: set[str]) -> None:
    """Remove checkpoints older than the `keep` newest undamaged ones in RUN_DIR/checkpoints. `good`
    names those known to be undamaged; others are read and added to it. A damaged checkpoint does
    not count, so it never displaces a good one."""
    num_kept = 0
    for _, path in reversed(_numbered(folder)):
        if num_kept == keep:
            good.discard(path.name)
            _remove(path)
        elif path.name in good or damage_to(path) is None:
            good.add(path.name)
            num_kept += 1


def keep_steps(folder: Path, *, like: Path, through: float = math.inf) -> None:
    """Remove the checkpoints in `folder` of steps that `like` has none of, or after `through`."""
    for step, path in _numbered(folder):
        if step > through or not (like / path.name).is_dir():
            _remove(path)


def _remove(checkpoint: Path) -> None:
    # Rename first: a crash must not leave a step_N that lacks files.
    hidden = checkpoint.parent / f"{HIDDEN}{checkpoint.name}"
    try:
        checkpoint.rename(hidden)
        shutil.rmtree(hidden)
    except OSError as error:
        raise CheckpointError(
            f"The old checkpoint {str(checkpoint)!r} could not be removed"
            f" ({storage.reason(error)}); remove it by hand, or raise checkpoint.keep."
        ) from error


def _numbered(folder: Path) -> list[tuple[int, Path]]:
    """step_N directories by N."""
    paths = [(step, folder / f"step_{step}") for step in steps_in(folder, suffix="")]
    return [(step, path) for step, path in paths if path.is_dir()]


def move_into_place(unfinished: Path, directory: Path) -> None:
    replaced = directory.parent / f"{HIDDEN}replaced_{directory.name}"
    if directory.exists():  # a resumed run repeats this step
        directory.rename(replaced)
    try:
        unfinished.rename(directory)
    except OSError:
        if replaced.exists():
            replaced.rename(directory)
        raise
    storage.sync(directory.parent)
    if replaced.exists():
        shutil.rmtree(replaced)


def _free(folder: Path) -> str:
    try:
        return f"{shutil.disk_usage(folder).free / 1e9:.3g} GB are free"
    except OSError:
        return "the folder cannot be reached"
