"""Episodes of each step, as files.

rollouts/step_N.jsonl has a few readable samples. episodes/step_N.jsonl has whole recordings for
`millrace replay`. Promise: samples are not selected by score. Called from the controller's event
loop.
"""

from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from millrace.core.records import Group
from millrace.monitoring.run_dir import to_json


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
        lines = [msgspec.json.encode(self._row(group, index)) + b"\n" for group, index in picked]
        if lines:
            self._directory.mkdir(exist_ok=True)
            (self._directory / f"step_{step}.jsonl").write_bytes(b"".join(lines))


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
        **scores_row(group, index),
        "versions": [int(versions.min()), int(versions.max())],
        "tokens": sum(rollout.num_generated for rollout in episode.rollouts),
        "columns": {name: _shown(value) for name, value in group.task.columns.items()},
    }


def recording_row(group: Group, index: int, *, model: str) -> dict[str, Any]:
    """An episode for `millrace replay`; its prompts were rendered for `model`."""
    recording = group.episodes[index].recording
    assert recording is not None, "runs with record_episodes record every episode"
    return {**scores_row(group, index), "model": model, "episode": msgspec.Raw(recording)}


def scores_row(group: Group, index: int) -> dict[str, Any]:
    """What every file says about the score of an episode."""
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
