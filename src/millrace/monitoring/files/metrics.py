"""metrics.jsonl: one flat JSON object per step, with keys such as `reward/mean`.

Promise: a row reaches the operating system before write() returns, and no row holds NaN. A reader
may open the file at any time and ignores a last line that is incomplete. Called from the
controller's event loop. docs/reference/metrics.md lists every key; tests check it.

Throughput has one definition, which all reports share. A sample is an episode that was trained on;
a replayed group does not count again. A token is one that a rollout engine generated. Time starts
when training begins, so start-up and the evaluation before the first step do not count. A resumed
run continues the totals of its metrics.jsonl.
"""

import contextlib
import json
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from millrace.core.errors import ConfigError
from millrace.core.records import Group
from millrace.core.staleness import PolicyVersions, TokenVersions
from millrace.monitoring.run_dir import to_json, write_atomically

WINDOW_S = 10.0  # the current rates cover whole steps and at least this much time, if there is any
MAX_MARKS = 200


class MetricsLog:
    """Appends rows. `resume_from` is the step of the checkpoint that a resumed run starts from."""

    def __init__(self, path: Path, *, resume_from: int | None = None) -> None:
        kept: list[dict[str, Any]] = []
        if resume_from is not None and path.exists():
            # Steps after the checkpoint are trained again and get new rows.
            kept = [row for row in read_metrics(path) if row["step"] <= resume_from]
        write_atomically(path, "".join(_line(row) for row in kept))
        self._file = path.open("a", buffering=1)  # line-buffered: one write per row

    def write(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """Tables in the row become keys with slashes, and spaces in keys underscores; returns the
        row as it was written."""
        flat = {key.replace(" ", "_"): leaf for key, leaf in flatten(to_json(row)).items()}
        self._file.write(_line(flat))
        return flat

    def close(self) -> None:
        with contextlib.suppress(OSError):  # write() has already raised for this row
            self._file.close()


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """All complete rows; none if the file does not exist yet."""
    if not path.is_file():
        return []
    lines = path.read_text().split("\n")
    rows: list[dict[str, Any]] = []
    # The text after the last newline is empty, or a row that is still being written.
    for number, line in enumerate(lines[:-1], start=1):
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError as error:
            raise ConfigError(f"{path} line {number} is not JSON: {error.msg}.") from None
    if rows and "reward_mean" in rows[-1]:
        raise ConfigError(
            f"{path} was written by an older Millrace, whose metrics had other names (reward_mean"
            " is now reward/mean); use the version that wrote it, or start a new run."
        )
    return rows


def flatten(table: Mapping[str, Any], *, separator: str = "/") -> dict[str, Any]:
    """{"dropped": {"stale": 1}} as {"dropped/stale": 1}."""
    flat: dict[str, Any] = {}
    for name, value in table.items():
        if isinstance(value, Mapping):
            below = flatten(value, separator=separator)
            flat |= {f"{name}{separator}{key}": leaf for key, leaf in below.items()}
        else:
            flat[name] = value
    return flat


def table(row: Mapping[str, Any], prefix: str, *, suffix: str = "") -> dict[str, Any]:
    """The values under `prefix`/, by the rest of their keys; the reverse of flatten(). With a
    `suffix`, only keys that end with it count: table(row, "rewards", suffix="/mean")."""
    start = f"{prefix}/"
    return {
        key.removeprefix(start).removesuffix(suffix): value
        for key, value in row.items()
        if key.startswith(start) and key.endswith(suffix)
    }


def _line(row: Mapping[str, Any]) -> str:
    return json.dumps(row, allow_nan=False) + "\n"


def group_metrics(
    groups: Sequence[Group],
    *,
    fresh: Sequence[Group],
    version: int,
    versions: PolicyVersions | None = None,
) -> dict[str, Any]:
    """Tables by metric. `fresh` are the groups that were not trained on before; only these count
    as results. `version` is the trainer's before the step; `versions` are those of several
    policies."""
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    lengths = [rollout.num_generated for rollout in rollouts]
    teachers = [t.version for r in rollouts if (t := r.teacher) and t.version is not None]
    return {
        **_reward_metrics(fresh),
        **_episode_metrics(fresh),
        **_staleness_metrics(groups, version=version, versions=versions or PolicyVersions()),
        "completion_length": {"mean": float(np.mean(lengths)), "max": max(lengths)},
        # Policy versions of a teacher that is an earlier policy.
        **({"teacher": {"version": float(np.mean(teachers))}} if teachers else {}),
    }


def _reward_metrics(groups: Sequence[Group]) -> dict[str, Any]:
    scores = [score for group in groups for score in group.scores]
    totals = np.array([score.total for score in scores])
    parts: defaultdict[str, list[float]] = defaultdict(list)
    for score in scores:
        for name, part in score.parts.items():  # a gate or the scorer may leave episodes out
            parts[name] += [] if part is None else [part]
    by_source: defaultdict[str, list[float]] = defaultdict(list)
    for group in groups:
        by_source[group.task.source] += [score.total for score in group.scores]
    by_source.pop("", None)
    return {
        "reward": {
            "mean": float(totals.mean()),
            "std": float(totals.std()),
            "source": {name: float(np.mean(own)) for name, own in by_source.items()},
        },
        "rewards": {
            name: {
                **({"mean": float(np.mean(values))} if values else {}),
                **({"share": len(values) / len(scores)} if len(values) < len(scores) else {}),
            }
            for name, values in parts.items()
        },
    }


def _episode_metrics(groups: Sequence[Group]) -> dict[str, Any]:
    episodes = [episode for group in groups for episode in group.episodes]
    counts: Counter[str] = Counter()
    for episode in episodes:
        counts.update(episode.counts)
    endings = Counter(episode.ending for episode in episodes)
    return {
        "turns": {"mean": float(np.mean([len(episode.turns) for episode in episodes]))},
        "episode": {**counts, "cut": {e: n for e, n in endings.items() if e != "done"}},
    }


def _staleness_metrics(
    groups: Sequence[Group], *, version: int, versions: PolicyVersions
) -> dict[str, Any]:
    """Staleness of the trained tokens. A spread is the newest version minus the oldest."""
    by_group = [
        [versions.aligned(TokenVersions.of_rollout(rollout), version) for rollout in group.rollouts]
        for group in groups
    ]
    wholes = [TokenVersions.joined(token_versions) for token_versions in by_group]
    tokens = TokenVersions.joined(wholes)
    assert tokens.oldest is not None, "a step trains at least one token"
    in_rollouts = [token_versions.spread for of_group in by_group for token_versions in of_group]
    in_groups = [token_versions.spread for token_versions in wholes]
    return {
        "staleness": {
            "mean": tokens.total_staleness(version) / tokens.num_tokens,
            "max": version - tokens.oldest,
            "share": {
                version - sampled_by: count / tokens.num_tokens
                for sampled_by, count in reversed(tokens.counts.items())
            },
        },
        "version_spread": {
            "rollout_mean": float(np.mean(in_rollouts)),
            "rollout_max": max(in_rollouts),
            "group_mean": float(np.mean(in_groups)),
            "group_max": max(in_groups),
        },
    }


class _Mark(NamedTuple):
    """Totals when a step ended; a rate is the difference of two marks."""

    time_s: float
    samples: int
    tokens: int


class Throughput:
    """`earlier` is the last metrics row of the run that this one resumes."""

    def __init__(
        self, *, earlier: Mapping[str, Any] | None = None, now: Callable[[], float] = time.monotonic
    ) -> None:
        earlier = earlier or {}
        self._now = now
        self._earlier_s: float = earlier.get("throughput/time_s", 0.0)
        self._earlier_tokens: int = earlier.get("throughput/tokens", 0)
        self._reported: dict[str, int] = {}  # tokens by engine, as its process counts them
        self.samples: int = earlier.get("throughput/samples", 0)
        self.begin()

    def begin(self) -> None:
        """Training begins now; tokens generated before do not count."""
        self.tokens = self._earlier_tokens
        self._began_s = self._now()
        self._marks = [self._mark()]

    def report(self, engine: str, tokens: int) -> None:
        """`tokens`: what this engine's process has generated since it started."""
        before = self._reported.get(engine, 0)
        self.tokens += tokens - before if tokens >= before else tokens  # less: a new process
        self._reported[engine] = tokens

    def step(self, samples: int) -> None:
        self.samples += samples
        self._marks = [*self._marks[-MAX_MARKS:], self._mark()]

    def current(self) -> dict[str, float]:
        """Rates of the most recent steps; before the first step, of the time since the start."""
        end = self._marks[-1] if len(self._marks) > 1 else self._mark()
        old = [mark for mark in self._marks if mark.time_s <= end.time_s - WINDOW_S]
        start = old[-1] if old else self._marks[0]
        seconds = max(end.time_s - start.time_s, 1e-9)
        return {
            "samples_per_s": (end.samples - start.samples) / seconds,
            "tokens_per_s": (end.tokens - start.tokens) / seconds,
        }

    def row(self) -> dict[str, float]:
        """The rates of one row of metrics.jsonl; called after step()."""
        last = self._marks[-1]
        return {
            **self.current(),
            "samples": last.samples,
            "tokens": last.tokens,
            "time_s": round(self._earlier_s + last.time_s - self._began_s, 3),
        }

    def eta_s(self, steps_left: int) -> float | None:
        """Estimated seconds to the last step; None before the first one."""
        if len(self._marks) < 2:
            return None
        per_step_s = (self._marks[-1].time_s - self._marks[0].time_s) / (len(self._marks) - 1)
        return per_step_s * steps_left

    def _mark(self) -> _Mark:
        return _Mark(time_s=self._now(), samples=self.samples, tokens=self.tokens)


def run_rates(row: Mapping[str, Any]) -> dict[str, float]:
    """The mean rates of a whole run, from its last metrics row; {} if the row has no totals."""
    seconds = row.get("throughput/time_s")
    if not seconds:
        return {}
    return {
        "samples_per_s": row["throughput/samples"] / seconds,
        "tokens_per_s": row["throughput/tokens"] / seconds,
    }
