"""Episodes of each step, as files.

rollouts/step_N.jsonl has a few readable samples, and episodes/step_N.jsonl has whole recordings for
`millrace replay`. Promise: samples are not selected by score. Called from the controller's event
loop.

skipped/step_N.jsonl has the groups of updates whose loss or gradient was not finite. Promise: every
such update is counted, and the whole input of the trainer can be read. One bad batch costs one
update; MAX_SKIPPED such steps in a row end the run, since the data is not the cause then. The
controller calls SkippedSteps.write() in a thread and waits for it.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from millrace.core.errors import RunFailed
from millrace.core.records import Group
from millrace.monitoring.run_dir import to_json

MAX_SKIPPED = 3


class StepLog:
    """Writes `per_step` scored episodes of a step; repeating a step replaces its file."""

    def __init__(
        self, directory: Path, *, per_step: int, row: Callable[[Group, int], dict[str, Any]]
    ) -> None:
        """`row`: the JSON object of the episode with this index in its group."""
        self._directory = directory
        self._per_step = per_step
        self._row = row

    def write(self, step: int, groups: Sequence[Group]) -> None:
        picked = islice(_picks(groups), self._per_step)
        if rows := [self._row(group, index) for group, index in picked]:
            _write(self._directory / f"step_{step}.jsonl", rows)


def _write(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(msgspec.json.Encoder().encode_lines(rows))


def _picks(groups: Sequence[Group]) -> Iterator[tuple[Group, int]]:
    """The first episode of each group, then the second of each, and so on."""
    largest = max((len(group.episodes) for group in groups), default=0)
    for index in range(largest):
        yield from ((group, index) for group in groups if index < len(group.episodes))


def sample_row(group: Group, index: int) -> dict[str, Any]:
    """An episode for reading."""
    episode = group.episodes[index]
    # The prompt of a turn holds the conversation before it, so the last turn has all of it.
    turn = episode.turns[-1]
    versions = np.concatenate([r.versions[r.versions >= 0] for r in episode.rollouts])
    return {
        "prompt": turn.prompt,
        "completion": turn.completion,
        "finish": turn.finish,
        **_scores(group, index),
        "versions": [int(versions.min()), int(versions.max())],
        "tokens": sum(rollout.num_generated for rollout in episode.rollouts),
        "columns": {name: _shown(value) for name, value in group.task.columns.items()},
    }


def recording_row(group: Group, index: int, *, model: str) -> dict[str, Any]:
    """An episode for `millrace replay`; its prompts were rendered for `model`."""
    recording = group.episodes[index].recording
    assert recording is not None, "runs with record_episodes record every episode"
    return {**_scores(group, index), "model": model, "episode": msgspec.Raw(recording)}


def _scores(group: Group, index: int) -> dict[str, Any]:
    assert group.advantages is not None
    score = group.scores[index]
    return {
        "group": group.number,
        "score": to_json(score.total),
        "parts": to_json(score.parts),
        "advantage": to_json(group.advantages[index]),
    }


def _shown(value: Any) -> Any:
    """A task's column may be any Python object; one without a JSON form is shown as its repr."""
    try:
        return to_json(value)
    except TypeError:
        return repr(value)


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
        _write(self._path(step), [row for group in groups for row in _rows(group)])
        return self._path(step)

    def check(self, metrics: Mapping[str, float]) -> None:
        """Raise RunFailed after too many steps in a row; `metrics` are those of the last one."""
        if len(self._in_a_row) < MAX_SKIPPED:
            return
        steps = ", ".join(map(str, self._in_a_row))
        files = ", ".join(str(self._path(step)) for step in self._in_a_row)
        raise RunFailed(
            f"Steps {steps} were skipped in a row, the last with loss"
            f" {metrics['loss']:g} and gradient norm {metrics['grad_norm']:g}; their groups are in"
            f" {files}. Lower optimizer.learning_rate or set trainer.dtype to float32, and look"
            " there for values that the loss cannot handle."
        )

    def _path(self, step: int) -> Path:
        return self._directory / f"step_{step}.jsonl"


def _rows(group: Group) -> Iterator[dict[str, Any]]:
    """One per rollout; arrays are by token, `sampled` marks trained tokens. NaN becomes null."""
    by_token = iter(group.token_advantages or ())
    for index, episode in enumerate(group.episodes):
        for rollout in episode.rollouts:
            advantages = next(by_token, None)
            yield {
                **_scores(group, index),
                "episode": index,
                "completion": episode.turns[-1].completion if episode.turns else None,
                "token_advantages": None if advantages is None else advantages.tolist(),
                "temperature": rollout.sampling.temperature,
                "tokens": rollout.tokens.tolist(),
                "sampled": rollout.mask.tolist(),
                "engine_logprobs": rollout.engine_logprobs.tolist(),
                "versions": rollout.versions.tolist(),
            }
