"""skipped/step_N.jsonl: the groups of updates whose loss or gradient was not finite.

Promise: every such update is counted, and the whole input of the trainer can be read. One bad batch
costs one update; MAX_IN_A_ROW such steps in a row end the run, since the data is not the cause
then. The controller calls write() in a thread and waits for it.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from millrace.core.errors import RunFailed
from millrace.core.records import Group
from millrace.monitoring.files.episodes import scores_row
from millrace.monitoring.run_dir import to_json

MAX_IN_A_ROW = 3


class SkippedSteps:
    """`num_steps`: steps so far with a skipped update."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._in_a_row: list[int] = []
        self.num_steps = 0

    def went_well(self) -> None:
        """A step without a skipped update ends the row."""
        self._in_a_row.clear()

    def write(self, step: int, groups: Sequence[Group]) -> Path:
        """Count the step and save the scored groups of its skipped updates."""
        self._in_a_row.append(step)
        self.num_steps += 1
        self._directory.mkdir(exist_ok=True)
        path = self._path(step)
        with path.open("w", encoding="utf-8") as file:
            for group in groups:
                file.writelines(json.dumps(row) + "\n" for row in _rows(group))
        return path

    def check(self, metrics: Mapping[str, float]) -> None:
        """Raise RunFailed after too many steps in a row; `metrics` are those of the last one."""
        if len(self._in_a_row) < MAX_IN_A_ROW:
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
    """One row per rollout; arrays have one value per token, and `sampled` marks trained tokens."""
    by_token = iter(group.token_advantages or ())
    for index, episode in enumerate(group.episodes):
        for rollout in episode.rollouts:
            advantages = next(by_token, None)
            yield {
                **scores_row(group, index),
                "episode": index,
                "completion": episode.turns[-1].completion if episode.turns else None,
                "token_advantages": None if advantages is None else to_json(advantages.tolist()),
                "temperature": rollout.sampling.temperature,
                "tokens": rollout.tokens.tolist(),
                "sampled": rollout.mask.tolist(),
                "engine_logprobs": to_json(rollout.engine_logprobs.tolist()),
                "versions": rollout.versions.tolist(),
            }
