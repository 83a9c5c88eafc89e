"""The run directory, which holds all files of a run.

Promise: no run overwrites another one. A live run holds a lock on its directory, so a second
process cannot write to it, and a reader can tell a running run from one that has stopped.
"""

import fcntl
import json
import math
import os
import platform
import shutil
from collections import Counter
from collections.abc import Mapping
from numbers import Integral, Real
from pathlib import Path
from typing import IO, Any, TypeVar

import msgspec
import tomli_w

from millrace.cluster.join.ticket import own_versions
from millrace.config import RunConfig, anchored
from millrace.core.errors import ConfigError

T = TypeVar("T")


class RunDir:
    """The layout of one run. A writer calls open() first and close() last; readers neither."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.config = self.path / "config.toml"  # resolved: trains the same run from anywhere
        self.metrics = self.path / "metrics.jsonl"  # one object per step
        self.trace = self.path / "trace.json"  # Chrome/Perfetto events
        self.earlier_trace = self.path / "earlier_trace.json"  # the part before trace.json
        self.summary = self.path / "summary.json"  # only once the run has finished
        self.checkpoints = self.path / "checkpoints"  # step_N/
        self.rollouts = self.path / "rollouts"  # step_N.jsonl, some episodes with their tokens
        self.lifecycle = self.path / "lifecycle"  # step_N.jsonl, the times of all groups
        self.episodes = self.path / "episodes"  # step_N.jsonl, with monitoring.record_episodes
        self.skipped = self.path / "skipped"  # step_N.jsonl, of steps that were not finite
        self.scorers = self.path / "scorers"  # state of scorers, for a resumed run
        self.journal = self.path / "journal"  # what a crash must not lose
        self.logs = self.path / "logs"  # one file per worker
        self.warnings = self.logs / "warnings.log"
        self.plots = self.path / "plots"  # made by `millrace inspect`
        self.tensorboard = self.path / "tensorboard"  # with the tracker "tensorboard"
        self.control = self.path / "control"  # address for scaling a running run
        self._lock_path = self.path / "run.lock"
        self._lock: IO[str] | None = None

    def open(self, config: RunConfig, *, resume: bool = False) -> None:
        """Make the layout and take the lock; refuses a directory that holds another run."""
        if resume and not (self.exists or self.checkpoint_paths):  # these may be copies
            raise ConfigError(f"{self.path} holds no run to resume; omit --resume to start one.")
        # A run that failed before its first step has nothing to keep and may start again.
        has_metrics = self.metrics.is_file() and self.metrics.stat().st_size > 0
        if not resume and (has_metrics or self.is_finished or self.checkpoint_paths):
            raise ConfigError(
                f"{self.path} already holds a run; choose another run_dir,"
                " or resume it with --resume."
            )
        if self.config.exists() and not self.exists:
            raise ConfigError(f"{self.config} was not written by a run; choose another run_dir.")
        try:
            for folder in (self.checkpoints, self.rollouts, self.logs):
                folder.mkdir(parents=True, exist_ok=True)
            self._take_lock()
            text = tomli_w.dumps(anchored(config.model_dump(), folder=Path.cwd()))
            write_atomically(self.config, f"# {_made_with()}\n{text}")
            self.summary.unlink(missing_ok=True)  # of the part that is resumed now
        except OSError as error:
            self.close()
            sentence = f"run_dir = '{self.path}' cannot be used: {error.strerror}."
            raise ConfigError(sentence) from None

    def close(self) -> None:
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def write_summary(self, values: Mapping[str, Any]) -> None:
        """Write the last file of a run; its presence means that the run has finished."""
        write_atomically(self.summary, json.dumps(to_json(values), indent=2) + "\n")

    def read_summary(self) -> dict[str, Any]:
        """{} before the run has finished."""
        return json.loads(self.summary.read_text()) if self.is_finished else {}

    def remove_run(self) -> None:
        """Delete what an earlier run left here, and nothing else."""
        if not self.exists:
            return
        if self.is_running:
            raise ConfigError(f"{self.path} belongs to a run that is still running; stop it first.")
        own = [path for path in vars(self).values() if isinstance(path, Path) and path != self.path]
        # What shows that this is a run comes last, so that an interrupted call can be repeated.
        for path in sorted(own, key=lambda path: path in (self.config, self._lock_path)):
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)

    @property
    def exists(self) -> bool:
        """True if a run was opened here; its config.toml has a lock file beside it."""
        return self.config.is_file() and self._lock_path.is_file()

    @property
    def is_running(self) -> bool:
        try:
            with self._lock_path.open() as file:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except (BlockingIOError, FileNotFoundError) as error:
            return isinstance(error, BlockingIOError)
        return False

    @property
    def is_finished(self) -> bool:
        return self.summary.is_file()

    @property
    def checkpoint_paths(self) -> list[Path]:
        """Complete checkpoints, oldest first."""
        steps = steps_in(self.checkpoints, suffix="")
        return [self.checkpoints / f"step_{step}" for step in steps]

    def _take_lock(self) -> None:
        lock = self._lock_path.open("a+")
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.seek(0)
            pid = lock.read().strip()
            lock.close()
            raise ConfigError(
                f"{self.path} belongs to a run that is still running (process {pid});"
                " stop it first, or choose another run_dir."
            ) from None
        lock.truncate(0)
        lock.write(f"{os.getpid()}\n")
        lock.flush()
        self._lock = lock


def _made_with() -> str:
    """Versions and machine of this process."""
    versions = [f"{package} {version}" for package, version in own_versions().items()]
    # torch is not imported here, and would not see GPUs that only workers use.
    files = Path("/proc/driver/nvidia/gpus").glob("*/information")
    gpus = Counter(" ".join(file.read_text().splitlines()[0].split()[1:]) for file in files)
    machine = [platform.platform(), f"{os.cpu_count()} CPUs"]
    return ", ".join([*versions, *machine, *(f"{count} {name}" for name, count in gpus.items())])


def step_file(folder: Path, step: int) -> Path:
    return folder / f"step_{step}.jsonl"


def read_step(folder: Path, step: int, kind: type[T]) -> list[T]:
    """The lines of a file of a step; [] if there is none, or none any more."""
    try:
        return msgspec.json.Decoder(kind).decode_lines(step_file(folder, step).read_bytes())
    except FileNotFoundError:
        return []


def steps_in(folder: Path, *, suffix: str = ".jsonl") -> list[int]:
    """The steps that a folder has a file of, ascending."""
    found = (path.name.removeprefix("step_") for path in folder.glob(f"step_*{suffix}"))
    names = (name.removesuffix(suffix) for name in found)
    return sorted(int(name) for name in names if name.isdigit())


def write_atomically(path: Path, text: str | bytes) -> None:
    """Replace the file, so that a reader sees the old or the new content, never a part."""
    partial = path.with_name(path.name + ".partial")
    partial.write_bytes(text.encode() if isinstance(text, str) else text)
    partial.replace(path)


def to_json(value: Any) -> Any:
    """Convert to JSON types; NaN and infinity become null. Raises TypeError for other values."""
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):  # half a surrogate pair has no UTF-8 form
        return value.encode(errors="backslashreplace").decode()
    if isinstance(value, Integral):
        return int(value)
    if isinstance(value, Real):
        return float(value) if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): to_json(below) for key, below in value.items()}
    if isinstance(value, list | tuple):
        return [to_json(below) for below in value]
    raise TypeError(f"{type(value).__name__} has no JSON form: {value!r}")
