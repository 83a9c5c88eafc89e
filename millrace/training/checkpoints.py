"""Checkpoint directories: `RUN_DIR/checkpoints/step_N`, written whole or not at all.

Promise: a directory called step_N is complete and on the disk. It is written under a hidden name
beside its place, synced, and renamed; whatever goes wrong before that leaves no trace, and what was
there before is untouched. One process writes; any process may look.
"""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from millrace.core import storage
from millrace.core.errors import CheckpointError, ConfigError

CHECKPOINTS = "checkpoints"
RUN_STATE_FILE = "run_state.json"
CRITIC = "critic"  # folder of a checkpoint, where the run has one
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
    """Make `directory` hold what `write` puts into the folder it is given, plus the run state."""
    unfinished = directory.parent / f"{_HIDDEN}{directory.name}"
    try:
        directory.parent.mkdir(parents=True, exist_ok=True)
        _remove_unfinished(directory.parent)
        _check_room(directory, needed_bytes=needed_bytes)
        unfinished.mkdir()
        write(unfinished)
        (unfinished / RUN_STATE_FILE).write_text(json.dumps(run_state, indent=2) + "\n")
        storage.sync_all(unfinished)
        _move_into_place(unfinished, directory)
    except BaseException as error:
        shutil.rmtree(unfinished, ignore_errors=True)
        if not isinstance(error, _WRITE_ERRORS):
            raise
        raise CheckpointError(
            f"Checkpoint {str(directory)!r} could not be written ({storage.reason(error)}):"
            f" it needs about {_size(needed_bytes)} and {_free(directory.parent)};"
            " make room there, lower checkpoint.keep, or set run_dir to another disk."
        ) from error


def latest_checkpoint(run_dir: Path) -> Path | None:
    """The complete checkpoint of the most steps."""
    complete = [path for _, path in _numbered(run_dir / CHECKPOINTS) if not _missing_files(path)]
    return complete[-1] if complete else None


def read_run_state(directory: Path) -> dict[str, Any]:
    """What the controller put into a checkpoint; the checkpoint is whole if this returns."""
    if missing := _missing_files(directory):
        raise CheckpointError(
            f"{str(directory)!r} is not a complete checkpoint: it has no {missing[0]};"
            " resume from another step, or start anew without --resume."
        )
    try:
        return json.loads((directory / RUN_STATE_FILE).read_text())
    except ValueError as error:
        raise CheckpointError(
            f"{str(directory / RUN_STATE_FILE)!r} is damaged ({error});"
            " remove that checkpoint to resume from the one before it."
        ) from error


def check_same_critic(directory: Path, *, has_critic: bool) -> None:
    """Refuse to go on with a critic that never was, or without the one that was."""
    had_critic = (directory / CRITIC).is_dir()
    if had_critic != has_critic:
        was, remedy = ("with", "add") if had_critic else ("without", "leave out")
        raise ConfigError(
            f"{str(directory)!r} was trained {was} a critic; to resume, {remedy} the [critic]"
            " table, or train its model in a new run_dir."
        )


def prune_checkpoints(folder: Path, *, keep: int) -> None:
    """Remove all but the `keep` checkpoints of the most steps from RUN_DIR/checkpoints."""
    for _, path in _numbered(folder)[:-keep]:
        # Renamed first: a crash half-way must not leave a step_N that lacks files.
        hidden = folder / f"{_HIDDEN}{path.name}"
        try:
            path.rename(hidden)
            shutil.rmtree(hidden)
        except OSError as error:
            raise CheckpointError(
                f"The old checkpoint {str(path)!r} could not be removed ({storage.reason(error)});"
                " remove it by hand, or raise checkpoint.keep."
            ) from error


def _numbered(folder: Path) -> list[tuple[int, Path]]:
    """step_N directories by N."""
    if not folder.is_dir():
        return []
    matches = ((re.fullmatch(r"step_(\d+)", path.name), path) for path in folder.iterdir())
    return sorted((int(match[1]), path) for match, path in matches if match and path.is_dir())


def _missing_files(directory: Path) -> list[str]:
    is_adapter = any((directory / name).is_file() for name in _ADAPTER_FILES)
    required = (*(_ADAPTER_FILES if is_adapter else _MODEL_FILES), *_REQUIRED_FILES)
    return [name for name in required if not (directory / name).is_file()]


def _remove_unfinished(folder: Path) -> None:
    """What a killed process left behind."""
    for path in folder.glob(f"{_HIDDEN}*"):
        shutil.rmtree(path)


def _check_room(directory: Path, *, needed_bytes: int) -> None:
    if shutil.disk_usage(directory.parent).free < needed_bytes:
        raise OSError("the disk is too full")


def _move_into_place(unfinished: Path, directory: Path) -> None:
    replaced = directory.parent / f"{_HIDDEN}replaced_{directory.name}"
    if directory.exists():  # a run that was resumed from an earlier step repeats this one
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
