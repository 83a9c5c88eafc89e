"""Checkpoint directories: `RUN_DIR/checkpoints/step_N`, written atomically.

Promise: a directory named step_N is complete and on the disk. It is written under a hidden name,
synced and renamed. A failure before that leaves no trace and does not touch an earlier checkpoint.
The manifest is written last and checked before a run resumes, so a checkpoint that was damaged
later is skipped. One process writes; any process may read.
"""

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from millrace.core import files as storage
from millrace.core.errors import CheckpointError, ConfigError
from millrace.training.checkpoints.manifest import damage_in, write_manifest

CHECKPOINTS = "checkpoints"
RUN_STATE_FILE = "run_state.json"
CRITIC = "critic"  # subfolder of a checkpoint, if the run has a critic
_REQUIRED_FILES = ("trainer_state.pt", RUN_STATE_FILE)
_MODEL_FILES = ("config.json",)
_ADAPTER_FILES = ("adapter_config.json", "adapter_model.safetensors")  # of a LoRA run instead
_HIDDEN = ".unfinished_"
# torch and safetensors report a full disk as errors of their own.
_WRITE_ERRORS = (OSError, RuntimeError, SafetensorError)


def write_checkpoint(
    directory: Path,
    *,
    write: Callable[[Path], None],
    run_state: dict[str, Any],
    needed_bytes: int,
) -> None:
    """Fill `directory` with what `write` puts into the folder it is given, and the run state."""
    unfinished = directory.parent / f"{_HIDDEN}{directory.name}"
    try:
        directory.parent.mkdir(parents=True, exist_ok=True)
        _remove_unfinished(directory.parent)
        _check_room(directory, needed_bytes=needed_bytes)
        unfinished.mkdir()
        write(unfinished)
        (unfinished / RUN_STATE_FILE).write_text(json.dumps(run_state, indent=2) + "\n")
        write_manifest(unfinished)
        storage.sync_all(unfinished)
        _move_into_place(unfinished, directory)
    except BaseException as error:
        shutil.rmtree(unfinished, ignore_errors=True)
        if not isinstance(error, _WRITE_ERRORS):
            raise
        raise CheckpointError(
            f"Checkpoint {str(directory)!r} could not be written ({storage.reason(error)}):"
            f" it needs about {_size(needed_bytes)} and {_free(directory.parent)};"
            " free some space, lower checkpoint.keep, or set run_dir to another disk."
        ) from error


@dataclass(frozen=True, kw_only=True, slots=True)
class FoundCheckpoint:
    """The newest undamaged checkpoint of a run."""

    directory: Path | None = None
    refused: tuple[str, ...] = ()  # a sentence about each newer, damaged one, the newest first


def newest_checkpoint(run_dir: Path) -> FoundCheckpoint:
    """The newest undamaged checkpoint of a run; reads all of its files."""
    refused: list[str] = []
    for _, path in reversed(_numbered(run_dir / CHECKPOINTS)):
        damage = damage_to(path)
        if damage is None:
            return FoundCheckpoint(directory=path, refused=tuple(refused))
        refused.append(f"Checkpoint {str(path)!r} is not used: it {damage}.")
    return FoundCheckpoint(directory=None, refused=tuple(refused))


def damage_to(directory: Path) -> str | None:
    """Why a checkpoint cannot be used, as a continuation of "it ..."; None = it is undamaged.

    Reads all of its files."""
    is_adapter = any((directory / name).is_file() for name in _ADAPTER_FILES)
    return damage_in(
        directory, required=(*(_ADAPTER_FILES if is_adapter else _MODEL_FILES), *_REQUIRED_FILES)
    )


def read_run_state(directory: Path) -> dict[str, Any]:
    """The controller's state in a checkpoint that newest_checkpoint() found."""
    return json.loads((directory / RUN_STATE_FILE).read_text())


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
    """Remove checkpoints older than the `keep` newest undamaged ones in RUN_DIR/checkpoints.

    `good` names those known to be undamaged; others are read and added to it. A damaged checkpoint
    does not count, so it never displaces a good one.
    """
    num_kept = 0
    for _, path in reversed(_numbered(folder)):
        if num_kept == keep:
            good.discard(path.name)
            _remove(path)
        elif path.name in good or damage_to(path) is None:
            good.add(path.name)
            num_kept += 1


def _remove(checkpoint: Path) -> None:
    # Rename first: a crash must not leave a step_N that lacks files.
    hidden = checkpoint.parent / f"{_HIDDEN}{checkpoint.name}"
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
    if not folder.is_dir():
        return []
    matches = ((re.fullmatch(r"step_(\d+)", path.name), path) for path in folder.iterdir())
    return sorted((int(match[1]), path) for match, path in matches if match and path.is_dir())


def _remove_unfinished(folder: Path) -> None:
    """What a killed process left behind."""
    for path in folder.glob(f"{_HIDDEN}*"):
        shutil.rmtree(path)


def _check_room(directory: Path, *, needed_bytes: int) -> None:
    if shutil.disk_usage(directory.parent).free < needed_bytes:
        raise OSError("the disk is too full")


def _move_into_place(unfinished: Path, directory: Path) -> None:
    replaced = directory.parent / f"{_HIDDEN}replaced_{directory.name}"
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
        return f"{_size(shutil.disk_usage(folder).free)} are free"
    except OSError:
        return "the folder cannot be reached"


def _size(num_bytes: int) -> str:
    amount = float(num_bytes)
    for unit in ("B", "kB", "MB", "GB"):
        if amount < 1000:
            return f"{amount:.3g} {unit}"
        amount /= 1000
    return f"{amount:.3g} TB"
