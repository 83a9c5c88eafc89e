"""Episodes of each step, as files.

rollouts/step_N.jsonl has a few readable samples. episodes/step_N.jsonl has whole recordings for
`millrace replay`. Promise: samples are not selected by score. Called from the controller's event
loop.
"""

import json
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from millrace.core.records import Episode, Group
from millrace.monitoring.run_dir import to_json


class SampleLog:
    """Writes `per_step` readable episodes of a step; repeating a step replaces its file."""

    def __init__(self, directory: Path, *, per_step: int) -> None:
        self._directory = directory
        self._per_step = per_step

    def write(self, step: int, groups: Sequence[Group]) -> None:
        """Groups must be scored."""
        lines = [
            json.dumps(_readable(group, index), ensure_ascii=False)
            for group, index in islice(picks(groups), self._per_step)
        ]
        if lines:
            path = self._directory / f"step_{step}.jsonl"
            path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def picks(groups: Sequence[Group]) -> Iterator[tuple[Group, int]]:
    """The first episode of each group, then the second of each, and so on."""
    largest = max((len(group.episodes) for group in groups), default=0)
    for index in range(largest):
        yield from ((group, index) for group in groups if index < len(group.episodes))


def _readable(group: Group, index: int) -> dict[str, Any]:
    episode, score = group.episodes[index], group.scores[index]
    assert group.advantages is not None
    # The prompt of a turn holds the conversation before it, so the last turn has all of it.
    turn = episode.turns[-1]
    return {
        "group": group.number,
        "prompt": turn.prompt,
        "completion": turn.completion,
        "finish": turn.finish,
        "score": to_json(score.total),
        "parts": to_json(score.parts),
        "advantage": to_json(group.advantages[index]),
        "versions": _versions(episode),
        "tokens": sum(rollout.num_generated for rollout in episode.rollouts),
        "columns": {name: _shown(value) for name, value in group.task.columns.items()},
    }


def _versions(episode: Episode) -> list[int]:
    """The oldest and the newest version that generated a token of the episode."""
    stamps = np.concatenate([r.versions[r.versions >= 0] for r in episode.rollouts])
    return [int(stamps.min()), int(stamps.max())]


def _shown(value: Any) -> Any:
    """A task's column may be any Python object; one without a JSON form is shown as its repr."""
    try:
        return to_json(value)
    except TypeError:
        return repr(value)


class EpisodeLog:
    """Writes `per_step` recorded episodes of a step; repeating a step replaces its file."""

    def __init__(self, directory: Path, *, per_step: int, model: str) -> None:
        self._directory = directory
        self._per_step = per_step
        self._model = model  # prompts were rendered for this model

    def write(self, step: int, groups: Sequence[Group]) -> None:
        """Groups must be scored."""
        lines = [self._line(*pick) for pick in islice(picks(groups), self._per_step)]
        if lines:
            self._directory.mkdir(exist_ok=True)
            path = self._directory / f"step_{step}.jsonl"
            path.write_bytes(b"".join(line + b"\n" for line in lines))

    def _line(self, group: Group, index: int) -> bytes:
        recording, score = group.episodes[index].recording, group.scores[index]
        assert recording is not None, "runs with record_episodes record every episode"
        assert group.advantages is not None
        row = {
            "group": group.number,
            "score": to_json(score.total),
            "parts": to_json(score.parts),
            "advantage": to_json(group.advantages[index]),
            "model": self._model,
            "episode": msgspec.Raw(recording),
        }
        return msgspec.json.encode(row)
