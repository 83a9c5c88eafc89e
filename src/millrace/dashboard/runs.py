"""One run directory, read as it grows: metrics, settings, state, logs, episodes and the ledger.

Promise: reads only. A file that is missing, or was copied in part, costs only what it would have
shown. Lists of episodes hold the beginning of a text only, so a page with episodes of any length
stays small; the whole text comes with one episode. A RunReader is used by one thread at a time.
"""

import json
import re
import time
import tomllib
from pathlib import Path
from typing import Any

import msgspec

from millrace.core.errors import ConfigError
from millrace.core.files import FileTail
from millrace.dashboard.diagnosis import MetricColumns, diagnose, find_alerts
from millrace.dashboard.spans import SpanIndex
from millrace.journal.reading import reading
from millrace.monitoring.files.episodes import StepLife, read_lifecycle
from millrace.monitoring.files.metrics import flatten, run_rates
from millrace.monitoring.files.samples import SampledEpisode, read_samples
from millrace.monitoring.run_dir import RunDir, step_file, steps_in

COPY_IS_LIVE_S = 60.0  # files that changed this recently belong to a run elsewhere
ALERT_PERIOD_S = 15.0
LIVE = ("running", "copied")
LOG_BYTES = 256 * 1024  # of a log that are shown, its last ones
TASKS_PER_PAGE = 200
EXCERPT = 300  # characters
MAX_FOUND, MAX_SEARCHED_BYTES = 200, 128 * 2**20
_CONTROL = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]|[\x00-\x08\x0b-\x1f\x7f-\x9f]")


class RunReader:
    def __init__(self, path: Path, *, id: str) -> None:
        self.id = id
        self.run_dir = RunDir(path)
        self.metrics = MetricColumns()
        self.spans = SpanIndex(self.run_dir)
        self.settings: dict[str, Any] = {}  # by dotted key
        self.changes = 0  # that refresh() has found so far
        self._tail = FileTail(self.run_dir.metrics)
        self._seen: list[Any] = []
        self._bad_lines = 0

    def refresh(self) -> bool:
        """Read what is new; True if something is."""
        names = ("config", "metrics", "trace", "summary", "checkpoints", "rollouts", "lifecycle")
        seen: list[Any] = [_stamp(getattr(self.run_dir, name)) for name in names]
        # Alerts of a live run also depend on the time that passes without news.
        clock = time.time() // ALERT_PERIOD_S if self.state in LIVE else 0
        seen += [self.state, clock]
        if not self.spans.is_complete:
            self.spans.refresh()
        elif seen == self._seen:
            return False
        self._seen = seen
        self.settings = flatten(_read(self.run_dir.config, tomllib.loads), separator=".")
        if self._tail.has_restarted():
            self.metrics, self._bad_lines = MetricColumns(), 0
        for chunk in self._tail.chunks():
            for line in chunk.splitlines():
                try:
                    self.metrics.append(msgspec.json.decode(line, type=dict[str, Any]))
                except msgspec.DecodeError:
                    self._bad_lines += 1
        self.changes += 1
        return True

    @property
    def state(self) -> str:
        """waiting: for a run to start here; copied: a run elsewhere writes the files."""
        if self.run_dir.is_running:
            return "running"
        if self.run_dir.is_finished:
            return "finished"
        if not self.run_dir.config.is_file() and not self.run_dir.metrics.is_file():
            return "waiting"
        changed_s, _ = max(_stamp(self.run_dir.metrics), _stamp(self.run_dir.trace))
        return "copied" if time.time() - changed_s < COPY_IS_LIVE_S else "stopped"

    def head(self) -> dict[str, Any]:
        """What the list of runs shows."""
        return {
            "id": self.id,
            "name": self.run_dir.path.name,
            "path": str(self.run_dir.path),
            "state": self.state,
            "step": self.metrics.last.get("step", 0),
            "steps": self.settings.get("trainer.steps"),
            "changes": self.changes,
        }

    def overview(self) -> dict[str, Any]:
        """Everything about the run that fits on one page."""
        is_live, recent = self.state in LIVE, self.metrics.recent("busy/", "waiting/", "scorer/")
        idle_s = time.time() - _stamp(self.run_dir.metrics)[0] if is_live else None
        alerts = find_alerts(self.metrics, idle_s=idle_s)
        if self._bad_lines:
            sentence = f"{self._bad_lines} lines of metrics.jsonl cannot be read."
            alerts.append({"kind": "file", "sentence": sentence})
        return {
            **self.head(),
            "row": self.metrics.last,
            "recent": recent,
            "rates": run_rates(self.metrics.last),
            "summary": {} if is_live else _read(self.run_dir.summary, json.loads),
            "diagnosis": diagnose(recent, self.settings),
            "alerts": alerts,
            "settings": self.settings,
            "checkpoints": [int(path.name[5:]) for path in self.run_dir.checkpoint_paths],
            "keys": self.metrics.keys,
        }

    def curves(
        self, *, keys: str = "", points: int = 1000, start: int = 0, end: int | None = None
    ) -> dict[str, list[float | None]]:
        """`keys`: metrics with commas between them; the axes come with them."""
        names = ["step", "time_s", "throughput/samples", *filter(None, keys.split(","))]
        return self.metrics.curves(names, points=min(points, 4000), start=start, end=end)

    def timeline(self) -> dict[str, Any]:
        self.spans.refresh()
        return self.spans.describe()

    def tile(self, *, level: int = 0, index: int = 0) -> bytes:
        return self.spans.tile(level, index)

    def span(self, *, worker: str = "", us: int = 0) -> dict[str, Any] | None:
        return self.spans.span_at(worker, us / 1e6)

    def logs(self) -> list[dict[str, Any]]:
        files = sorted(path for path in self.run_dir.logs.glob("*") if path.is_file())
        return [{"name": path.name, "bytes": path.stat().st_size} for path in files]

    def log(self, *, name: str = "") -> str:
        """The end of a log, without control characters."""
        if name not in [row["name"] for row in self.logs()]:
            raise ConfigError(f"{self.run_dir.logs} has no log {name!r}.")
        with (self.run_dir.logs / name).open("rb") as file:
            file.seek(max(file.seek(0, 2) - LOG_BYTES, 0))
            return _CONTROL.sub("", file.read().decode(errors="replace"))

    def ledger(
        self, *, status: str = "", number: int | None = None, before: int | None = None
    ) -> dict[str, Any]:
        """Counts by status and reason, and the newest tasks that meet the conditions."""
        tests = {"status = ?": status or None, "number = ?": number, "number < ?": before}
        given = {test: value for test, value in tests.items() if value is not None}
        columns = ("number", "status", "reason", "version", "draw", "tries")
        where = f"WHERE {' AND '.join(given)}" if given else ""
        select = f"SELECT {', '.join(columns)} FROM tasks {where} ORDER BY number DESC"
        with reading(self.run_dir.journal) as db:
            if db is None:
                return {"counts": [], "tasks": []}
            found = db.execute(f"{select} LIMIT {TASKS_PER_PAGE}", [*given.values()])
            tasks = [dict(zip(columns, row, strict=True)) for row in found]
            counts = "SELECT status, reason, count(*) FROM tasks GROUP BY 1, 2 ORDER BY 1, 2"
            return {"counts": db.execute(counts).fetchall(), "tasks": tasks}

    def steps(self) -> dict[str, list[int]]:
        """The steps that have samples, and those whose groups are described."""
        return {
            "samples": steps_in(self.run_dir.rollouts),
            "lives": steps_in(self.run_dir.lifecycle),
        }

    def batch(self, *, step: int = 0) -> StepLife | None:
        return read_lifecycle(self.run_dir, step)

    def episode(self, *, step: int = 0, place: int = 0) -> SampledEpisode:
        episodes = read_samples(self.run_dir, step)
        if place >= len(episodes):
            raise ConfigError(f"Step {step} has {len(episodes)} sampled episodes, none at {place}.")
        return episodes[place]

    def episodes(self, *, step: int | None = None, text: str = "") -> dict[str, Any]:
        """Sampled episodes that contain `text`: of one step, or of all, newest first."""
        folder, found, num_bytes, last = self.run_dir.rollouts, [], 0, step
        names = ("group", "episode", "score", "parts", "advantage", "tokens", "versions", "ending")
        for last in steps_in(folder)[::-1] if step is None else [step]:
            for place, one in enumerate(read_samples(self.run_dir, last)):
                searched = (one.prompt, one.completion, one.columns, one.turns)
                if not text or any(text.lower() in str(part).lower() for part in searched):
                    brief = {name: getattr(one, name) for name in names}
                    brief |= {"step": last, "place": place, "completion": one.completion[:EXCERPT]}
                    found.append(brief)
            num_bytes += step_file(folder, last).stat().st_size if step is None else 0
            if len(found) >= MAX_FOUND or num_bytes > MAX_SEARCHED_BYTES:
                break
        return {"episodes": found, "down_to": last}


def _read(path: Path, parse: Any) -> dict[str, Any]:
    """{} while the file is missing or incomplete, as in a copy."""
    try:
        return parse(path.read_text())
    except (OSError, ValueError):
        return {}


def _stamp(path: Path) -> tuple[float, int]:
    """Time of the last change, and size; zeros if there is no such file."""
    try:
        status = path.stat()
    except OSError:
        return 0.0, 0
    return status.st_mtime, status.st_size
