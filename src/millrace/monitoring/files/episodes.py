"""What each step leaves in the run directory besides its row of metrics: files per step.

rollouts/ has some episodes with their tokens (samples.py), lifecycle/ the times of all groups, and
episodes/ whole recordings for `millrace replay`. Promise: a file appears as a whole, and repeating
a step replaces it. A thread writes the files of a step while the next one runs and before the next
row of metrics. Called from the controller's event loop.

skipped/step_N.jsonl has the groups of updates whose loss or gradient was not finite. Promise: every
such update is counted, and the whole input of the trainer can be read. One bad batch costs one
update; MAX_SKIPPED such steps in a row end the run, since the data is not the cause then. The
controller calls SkippedSteps.write() in a thread and waits for it.
"""

import asyncio
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import nan
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from millrace.config import RunConfig
from millrace.core.errors import RunFailed
from millrace.core.records import Group
from millrace.core.spans import GroupLife
from millrace.monitoring.files.samples import EpisodeSampler, pick, reported_rollouts, scores_of
from millrace.monitoring.run_dir import RunDir, read_step, step_file, steps_in, write_atomically

MAX_SKIPPED = 3
MAX_BYTES = 256 * 2**20  # of a folder


@dataclass(frozen=True, kw_only=True, slots=True)
class StepLife:
    """Neither the trace, whose spans name no group, nor the journal, which has no times, could tell
    this. Times are seconds on the clock of trace.json. The times of a group are journaled with it,
    so a resumed run knows them, too."""

    step: int
    begin_s: float
    end_s: float
    unix_s: float  # seconds since the epoch at the end
    groups: list[GroupLife]  # that it trained
    replayed: list[int]  # numbers of those that an earlier step has trained, too
    lost: list[GroupLife]  # attempts that ended since the step before, without a group to train


def read_lifecycle(run_dir: RunDir, step: int) -> StepLife | None:
    """Returns None if the step has no file, or none any more."""
    return next(iter(read_step(run_dir.lifecycle, step, StepLife)), None)


class StepFiles:
    """The files of one folder. Together they stay below `max_bytes`: beyond that, every second file
    of the older half is removed, so early steps become ever sparser. Used by one thread."""

    def __init__(self, folder: Path, *, max_bytes: int = MAX_BYTES) -> None:
        self._folder = folder
        self._max_bytes = max_bytes
        self._sizes = {step: step_file(folder, step).stat().st_size for step in steps_in(folder)}

    def write(self, step: int, rows: Sequence[Any]) -> None:
        """One line per row; a step without rows has no file."""
        if not rows:
            return
        self._folder.mkdir(exist_ok=True)
        data = msgspec.json.Encoder().encode_lines(rows)
        write_atomically(step_file(self._folder, step), data)
        self._sizes[step] = len(data)
        while sum(self._sizes.values()) > self._max_bytes and len(self._sizes) > 1:
            steps = sorted(self._sizes)
            for old in steps[1 : len(steps) // 2 : 2] or steps[:1]:
                step_file(self._folder, old).unlink(missing_ok=True)
                del self._sizes[old]


class StepRecorder:
    def __init__(
        self, config: RunConfig, run_dir: RunDir, *, decode: Callable[[np.ndarray], str]
    ) -> None:
        """`decode`: see EpisodeSampler."""
        self._settings, self._model = config.monitoring, config.model.path
        self._sampler = EpisodeSampler(decode)
        self._samples, self._lives = StepFiles(run_dir.rollouts), StepFiles(run_dir.lifecycle)
        self._recordings = StepFiles(run_dir.episodes, max_bytes=sys.maxsize)
        self._writing: asyncio.Task[None] | None = None

    def write(
        self, life: StepLife, groups: Sequence[Group], reported: Mapping[int, np.ndarray]
    ) -> None:
        """Begin to write the files of a step, after written(). `groups`: trained for the first
        time; `reported` by the trainer on reported_rollouts()."""
        step, num_samples = life.step, self._settings.samples_per_step
        numbers = reported_rollouts(groups, num_samples)
        own = {rollout: reported[n] for rollout, n in numbers.items() if n in reported}
        sample = partial(self._sampler.sample, step=step, reported=own)
        recorded = pick(groups, self._settings.record_episodes)

        def write() -> None:
            self._samples.write(step, [sample(*one) for one in pick(groups, num_samples)])
            self._lives.write(step, [life] if num_samples else [])
            self._recordings.write(step, [self._recording(*one) for one in recorded])

        self._writing = asyncio.create_task(asyncio.to_thread(write))

    def _recording(self, group: Group, index: int) -> dict[str, Any]:
        """An episode for `millrace replay`; its prompts were rendered for the model."""
        recording = group.episodes[index].recording
        assert recording is not None, "runs with record_episodes record every episode"
        return {**scores_of(group, index), "model": self._model, "episode": msgspec.Raw(recording)}

    async def written(self) -> None:
        if self._writing is not None:
            await self._writing


class SkippedSteps:
    """`num_steps`: steps so far with a skipped update."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._in_a_row: list[int] = []
        self.num_steps = 0

    def reset_streak(self) -> None:
        """A step without a skipped update ends the row."""
        self._in_a_row.clear()

    def write(self, step: int, groups: Sequence[Group]) -> Path:
        """Count the step and save the scored groups of its skipped updates."""
        self._in_a_row.append(step)
        self.num_steps += 1
        StepFiles(self._directory).write(step, [row for group in groups for row in _rows(group)])
        return step_file(self._directory, step)

    def check(self, metrics: Mapping[str, float]) -> None:
        """Raise RunFailed after too many steps in a row; `metrics` are those of the last one."""
        if len(self._in_a_row) < MAX_SKIPPED:
            return
        steps = ", ".join(map(str, self._in_a_row))
        files = ", ".join(str(step_file(self._directory, step)) for step in self._in_a_row)
        raise RunFailed(
            f"Steps {steps} were skipped in a row, the last with loss"
            f" {metrics.get('loss', nan):g} and gradient norm {metrics.get('grad_norm', nan):g};"
            f" their groups are in {files}. Lower optimizer.learning_rate or set trainer.dtype to"
            " float32, and look there for values that the loss cannot handle."
        )


def _rows(group: Group) -> Iterator[dict[str, Any]]:
    """One per rollout; arrays are by token, `sampled` marks trained tokens. NaN becomes null."""
    by_token = iter(group.token_advantages or ())
    for index, episode in enumerate(group.episodes):
        for rollout in episode.rollouts:
            advantages = next(by_token, None)
            yield {
                **scores_of(group, index),
                "episode": index,
                "completion": episode.turns[-1].completion if episode.turns else None,
                "token_advantages": None if advantages is None else advantages.tolist(),
                "temperature": rollout.sampling.temperature,
                "tokens": rollout.tokens.tolist(),
                "sampled": rollout.mask.tolist(),
                "engine_logprobs": rollout.engine_logprobs.tolist(),
                "versions": rollout.versions.tolist(),
            }
