"""episodes/step_N.jsonl: some episodes of each step, whole, to be read or replayed by
`millrace replay`.

Called from the controller's event loop.
"""

from collections.abc import Sequence
from itertools import islice
from pathlib import Path

import msgspec

from millrace.core.records import Group
from millrace.watch.plain import plain
from millrace.watch.samples import picks


class EpisodeLog:
    """Writes `per_step` episodes of a step; the same step trained again replaces its file."""

    def __init__(self, directory: Path, *, per_step: int, model: str) -> None:
        self._directory = directory
        self._per_step = per_step
        self._model = model  # that their prompts were rendered for

    def write(self, step: int, groups: Sequence[Group]) -> None:
        """Groups must be scored."""
        lines = [self._line(*pick) for pick in islice(picks(groups), self._per_step)]
        if lines:
            self._directory.mkdir(exist_ok=True)
            path = self._directory / f"step_{step}.jsonl"
            path.write_bytes(b"".join(line + b"\n" for line in lines))

    def _line(self, group: Group, index: int) -> bytes:
        recording, score = group.episodes[index].recording, group.scores[index]
        assert recording is not None, "episodes of such runs are recorded"
        assert group.advantages is not None
        row = {
            "group": group.number,
            "score": plain(score.total),
            "parts": plain(score.parts),
            "advantage": plain(group.advantages[index]),
            "model": self._model,
            "episode": msgspec.Raw(recording),
        }
        return msgspec.json.encode(row)
