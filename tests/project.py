"""A folder as a user has it, with settings, a reward function, tasks and a tiny model, and
`millrace` commands that run in such folders."""

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil
import tomli_w
from forked_command import start_command
from tiny_model import make_tiny_model

REPOSITORY = Path(__file__).parents[1]
STARTS_WORKERS = ("eval", "join", "sft", "train")
SETTINGS: dict[str, Any] = {
    "run_dir": "run",
    "model": "model",
    "tasks": {"path": "tasks.jsonl"},
    "scorers": [{"function": "rewards.py:digits"}],
    "sampling": {"max_new_tokens": 16},
    "scoring": {"workers": 1},
    "rollout": {"group_size": 4},
    "trainer": {"groups_per_step": 4},
    "cluster": {"threads": 1},
    "monitoring": {"progress": "lines"},
}
REWARDS = """
def digits(completions, **columns):
    return [sum(c.isdigit() for c in text) / (len(text) + 1) for text in completions]
"""


def make_project(folder: Path, **sections: dict[str, Any]) -> Path:
    """Sections go on top of SETTINGS, key by key."""
    make_tiny_model(folder / "model")
    own = {name: {**SETTINGS.get(name, {}), **section} for name, section in sections.items()}
    (folder / "run.toml").write_text(tomli_w.dumps({**SETTINGS, **own}))
    (folder / "rewards.py").write_text(REWARDS)
    rows = [json.dumps({"prompt": f"{n}+1="}) for n in range(50)]
    (folder / "tasks.jsonl").write_text("\n".join(rows))
    return folder


def steps_in(metrics: Path) -> list[int]:
    return [json.loads(line)["step"] for line in metrics.read_text().splitlines()]


class Command:
    """A `millrace` command in a folder, with an environment and a temp dir of its own."""

    def __init__(
        self,
        *arguments: str | Path,
        folder: Path,
        env: Mapping[str, str] | None = None,
        within: Sequence[str] = (),
    ) -> None:
        """`within`: a command that runs it, such as `ip netns exec NAME`. With `env` or `within`,
        it is started afresh, and forked otherwise if it starts workers."""
        self.temp = folder / "tmp"
        self.temp.mkdir(parents=True, exist_ok=True)
        command = [*map(str, arguments)]
        every = {
            "PATH": os.environ["PATH"],
            "PYTHONPATH": str(REPOSITORY / "src"),
            "HOME": str(folder),
            "TMPDIR": str(self.temp),
            "TORCHINDUCTOR_CACHE_DIR": str(folder / "torch"),  # else a folder in TMPDIR
        }
        if command[0] in STARTS_WORKERS and not (env or within):
            self.process = start_command(*command, folder=folder, env=every)
            return
        self.process = subprocess.Popen(
            [*within, sys.executable, "-m", "millrace.cli.main", *command],
            cwd=folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,  # so that all of it can be killed at once
            env={**every, **(env or {})},
        )

    def wait_for(self, path: Path, *, lines: int = 0) -> None:
        deadline = time.monotonic() + 90
        while not path.is_file() or path.read_text().count("\n") < lines:
            assert self.process.poll() is None, self.process.communicate()
            assert time.monotonic() < deadline, f"no {path.name}"
            time.sleep(0.05)

    def left(self) -> list[int]:
        """Processes of its session that run, also those whose parents have ended."""
        return [pid for pid in psutil.pids() if _session(pid) == self.process.pid]

    def finish(self, *, timeout_s: float = 90) -> tuple[int, str, str]:
        stdout, stderr = self.process.communicate(timeout=timeout_s)
        return self.process.returncode, stdout, stderr


def _session(pid: int) -> int | None:
    with contextlib.suppress(ProcessLookupError):
        return os.getsid(pid)
    return None
