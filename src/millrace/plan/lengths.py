"""How long completions and prompts are: from a file, from a run directory, or from parameters.

    {"completion_tokens": [812, 95, 4096], "prompt_tokens": 230}        lengths, drawn at random
    {"completion_tokens": [[812, 95], [4096, 700]]}                      lengths by group
    {"median": 800, "p90": 4000, "max": 8192, "prompt_tokens": 230, "turns": 2, "tool_s": 0.5}

Where groups are known, one is drawn as a whole, because the episodes of a task are alike; those of
a run directory have their own numbers of turns. With parameters, lengths are log-normal, and the
task accounts for `task_share` of their variance.
"""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np

from millrace.core.errors import ConfigError, suggestion

_P90 = 1.2816  # standard deviations between the median and the 90th percentile
_MOST = 10**9  # tokens of a completion, turns of an episode, or seconds between them


@dataclass(frozen=True, kw_only=True)
class Lengths:
    median: float = 256.0
    p90: float = 512.0
    max: float = math.inf
    task_share: float = 0.6
    prompt_tokens: float = 128.0
    turns: int = 1  # completions that make an episode, one after another
    tool_s: float = 0.0  # between two turns
    score_s: float | None = None  # of a group; None = as the costs say
    filtered_share: float = 0.0  # of the groups: dropped by filters
    # Of each group its completions, or its episodes: tokens by turn.
    groups: tuple[Sequence[np.ndarray], ...] = field(default=(), repr=False)
    source: str = ""

    def draw(self, rng: np.random.Generator, size: int) -> list[np.ndarray]:
        """Tokens of the turns of each episode of one group."""
        if self.groups:
            group = self.groups[int(rng.integers(len(self.groups)))]
            rows = np.resize(rng.permutation(len(group)), (size, self.turns))
            return [np.concatenate([group[index] for index in row]) for row in rows]
        sigma = math.log(self.p90 / self.median) / _P90
        task = rng.normal(0.0, sigma * math.sqrt(self.task_share))
        own = rng.normal(0.0, sigma * math.sqrt(1 - self.task_share), (size, self.turns))
        drawn = np.rint(self.median * np.exp(task + own))
        return list(np.clip(drawn, 1, self.max).astype(np.int64))

    @cached_property
    def _examples(self) -> list[np.ndarray]:
        rng = np.random.default_rng(0)
        return [turns for _ in range(256) for turns in self.draw(rng, 8)]

    @property
    def mean(self) -> float:
        """Tokens of one episode."""
        return fmean(turns.sum() for turns in self._examples)

    @property
    def mean_turns(self) -> float:
        """Turns of one episode."""
        return fmean(map(len, self._examples))

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence, with its prompt."""
        # Examples may lack the longest of many groups, which needs memory, too.
        groups = [np.sort([turns.sum() for turns in group])[::-1] for group in self.groups]
        sums = [np.resize(group, self.turns).sum() for group in groups]
        return int(self.prompt_tokens + max(sums or [turns.sum() for turns in self._examples]))


_NUMBERS = tuple(one.name for one in fields(Lengths) if one.name not in ("groups", "source"))


def read_lengths(source: str | None, *, max_new_tokens: int) -> Lengths:
    """`source`: a JSON file, a run directory, or "median=800,p90=4000"; None = an assumption."""
    limits = {"median": max(1.0, max_new_tokens / 4), "p90": max_new_tokens, "max": max_new_tokens}
    if source is None:
        text = f"an assumption: a tenth reaches sampling.max_new_tokens = {max_new_tokens}"
        return Lengths(**limits, source=text)
    path, what = Path(source), f"Lengths {source!r}"
    if path.is_dir():
        return _of_run(path)
    try:
        if "=" in source and not path.exists():
            pairs = (part.partition("=") for part in source.split(","))
            table: Any = {key.strip(): float(value) for key, _, value in pairs}
        else:
            table = json.loads(path.read_text())
    except OSError as error:
        raise ConfigError(f"{what} cannot be read: {error.strerror}.") from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{what} are neither a JSON file nor median=N,p90=N: {error}.") from None
    table = {"completion_tokens": table} if isinstance(table, list) else table
    if not isinstance(table, dict) or not table:
        raise ConfigError(f"{what} are empty; give completion_tokens, or median and p90.")
    is_known = "completion_tokens" in table
    groups = _groups(table.pop("completion_tokens"), what=what) if is_known else ()
    for key, value in table.items():
        if key not in _NUMBERS:
            hint = suggestion(key, ("completion_tokens", *_NUMBERS))
            raise ConfigError(f"{what} have no key {key!r}; {hint}")
        if type(value) not in (int, float) or not 0 <= value <= _MOST:  # true is no number
            raise ConfigError(f"{what}: {key} = {value!r} is not a number from 0 to {_MOST:,}.")
    if (turns := table.get("turns", 1)) != int(turns):
        raise ConfigError(f"{what}: turns = {turns} is not a whole number.")
    if not is_known and not {"median", "p90"} <= table.keys():
        text = "neither completion_tokens, nor both median and p90"
        raise ConfigError(f"{what} have {text}; add them.")
    found = Lengths(**{**limits, **table, "turns": int(turns)}, groups=groups)
    if not 1 <= found.median <= found.p90 or min(found.max, found.turns) < 1:
        raise ConfigError(f"{what}: 1 <= median <= p90, and max and turns are at least 1.")
    if max(found.task_share, found.filtered_share) >= 1:
        raise ConfigError(f"{what}: task_share and filtered_share are below 1.")
    return found


def _groups(rows: Any, *, what: str) -> tuple[Sequence[np.ndarray], ...]:
    try:
        groups = tuple(np.array(row) for row in (rows if isinstance(rows[0], list) else [rows]))
        assert all(g.dtype.kind == "i" and g.ndim == 1 for g in groups)
        assert all(g.min() >= 1 and g.max() <= _MOST for g in groups)
    except (TypeError, ValueError, LookupError, AssertionError):
        text = f"completion_tokens is a list of whole numbers from 1 to {_MOST:,}"
        raise ConfigError(f"{what}: {text}, or a list of such lists.") from None
    return tuple(list(group[:, None]) for group in groups)


def _of_run(path: Path) -> Lengths:
    """The lengths of the groups that a run has trained."""
    from millrace.monitoring.files.episodes import read_lifecycle
    from millrace.monitoring.files.samples import read_samples
    from millrace.monitoring.run_dir import RunDir, steps_in

    run_dir = RunDir(path)
    read = [read_lifecycle(run_dir, step) for step in steps_in(run_dir.lifecycle)]
    lives = [life for life in read if life is not None]
    # Groups that an external program posted have no turns.
    trained = [group for life in lives for group in life.groups if group.turns]
    if not trained:
        text = "its lifecycle/ has no turns of trained groups; pass the folder that run_dir named"
        raise ConfigError(f"{path} has no lengths: {text}.")
    episodes = [list(group.turns.values()) for group in trained]
    pauses = [b.start_s - a.end_s for group in episodes for e in group for a, b in pairwise(e)]
    times = [(group.generated_s, group.ended_s) for group in trained]
    scored_s = [end_s - begin_s for begin_s, end_s in times if begin_s and end_s]
    samples = (read_samples(run_dir, step) for step in steps_in(run_dir.rollouts))
    first = next(filter(None, samples), [])
    prompts = [len(r.trained) - sum(r.trained) for sample in first for r in sample.rollouts]
    assumed = Lengths.prompt_tokens
    note = f"those of {path}, and an assumption: prompts of {assumed:g} tokens"
    dropped = sum(one.outcome == "dropped" for life in lives for one in life.lost)
    return Lengths(
        groups=tuple(
            [np.array([max(1, turn.num_tokens) for turn in turns]) for turns in group]
            for group in episodes
        ),
        prompt_tokens=fmean(prompts) if prompts else assumed,
        tool_s=max(0.0, fmean(pauses)) if pauses else 0.0,
        # Groups that took longer may have waited for a scorer.
        score_s=float(np.quantile(scored_s, 0.25)) if scored_s else None,
        filtered_share=dropped / (dropped + len(trained)),
        source="" if prompts else note,
    )
