"""What `millrace init` writes: a folder that trains as it is, to be changed piece by piece.

Promise: nothing that exists is overwritten, and an interrupted init can be repeated.
"""

import json
import shutil
from collections.abc import Callable, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

from millrace.core.errors import ConfigError
from millrace.demo.task import make_tasks

TEMPLATES = ("run.toml", "rewards.py")
NUM_TASKS, NUM_HELD_OUT = 4096, 256
SEED = 0


def write_starter(directory: Path, *, make_model: Callable[[Path], None]) -> list[Path]:
    """Write settings, rewards, tasks and a model; returns what was written.

    `make_model` fills a directory with a model for the demo's task, in Hugging Face format.
    """
    names = (*TEMPLATES, "tasks.jsonl", "heldout.jsonl", "model")
    paths = [directory / name for name in names]
    for path in paths:
        if path.exists():
            raise ConfigError(f"{path} already exists; name another folder, or move it away.")
    try:
        directory.mkdir(parents=True, exist_ok=True)
        _make_aside(directory / "model", make_model)
        _write_tasks(directory / "tasks.jsonl", make_tasks(NUM_TASKS, SEED))
        held_out = make_tasks(NUM_HELD_OUT, SEED, held_out=True)
        _write_tasks(directory / "heldout.jsonl", held_out)
        for name in TEMPLATES:
            template = resources.files("millrace.cli.starter") / name
            (directory / name).write_text(template.read_text(encoding="utf-8"), encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"Cannot write into {directory}: {error.strerror}.") from None
    return paths


def _make_aside(path: Path, make_model: Callable[[Path], None]) -> None:
    """Half a model must not look like one, whenever this is interrupted."""
    partial = path.with_name(path.name + ".partial")
    if partial.exists():
        shutil.rmtree(partial)
    make_model(partial)
    partial.rename(path)


def _write_tasks(path: Path, tasks: Sequence[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(task) + "\n" for task in tasks), encoding="utf-8")
