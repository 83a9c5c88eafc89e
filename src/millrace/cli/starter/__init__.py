"""The project that `millrace init` writes; it trains as it is.

Promise: nothing that exists is overwritten, and an interrupted init can be repeated.
"""

import json
import re
import shutil
from collections.abc import Callable
from importlib import resources
from pathlib import Path

from millrace.core.errors import ConfigError
from millrace.demo.task import make_tasks

TEMPLATES = ("run.toml", "rewards.py")
NUM_TASKS, NUM_HELD_OUT = 4096, 256
SEED = 0


def write_starter(
    directory: Path, *, make_model: Callable[[Path], None], model: str | None = None
) -> list[Path]:
    """Write settings, rewards, tasks and a model; returns the paths that were written.

    `make_model` fills a directory with a model for the demo's task, in Hugging Face format. With
    `model`, a directory or hub name, the settings name that model and none is made.
    """
    names = (*TEMPLATES, "tasks.jsonl", "heldout.jsonl", *(() if model else ("model",)))
    paths = [directory / name for name in names]
    for path in paths:
        if path.exists():
            raise ConfigError(f"{path} already exists; name another folder, or move it away.")
    try:
        directory.mkdir(parents=True, exist_ok=True)
        if model is None:
            # Under another name first, so that an interrupted init leaves no half model.
            shutil.rmtree(partial := directory / "model.partial", ignore_errors=True)
            make_model(partial)
            partial.rename(directory / "model")
        held_out = make_tasks(NUM_HELD_OUT, SEED, held_out=True)
        files = {"tasks.jsonl": make_tasks(NUM_TASKS, SEED), "heldout.jsonl": held_out}
        for name, tasks in files.items():
            text = "".join(json.dumps(task) + "\n" for task in tasks)
            (directory / name).write_text(text, encoding="utf-8")
        for name in TEMPLATES:
            template = resources.files("millrace.cli.starter") / name
            text = template.read_text(encoding="utf-8")
            if model is not None:
                text = _for_model(text, model)
            (directory / name).write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"Cannot write into {directory}: {error.strerror}.") from None
    return paths


def _for_model(text: str, model: str) -> str:
    """The settings for the user's model: its path, room for real answers, default learning rate."""
    path = str(Path(model).absolute()) if Path(model).exists() else model
    text = re.sub(
        r'^path = "model" .*\n( +#.*\n)*', f"path = {json.dumps(path)}\n", text, flags=re.M
    )
    text = re.sub(r"^learning_rate = .*\n( +#.*\n)*", "", text, flags=re.M)
    return re.sub(r"^max_new_tokens = .*\n", "max_new_tokens = 256\n", text, flags=re.M)
