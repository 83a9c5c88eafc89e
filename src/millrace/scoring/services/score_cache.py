"""Scores by the content they are about: in memory, bounded, and on demand in a file of the run.

Keys are digests, so the file holds no text. Called from the controller's event loop.
"""

import hashlib
import json
from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any


class ScoreCache:
    def __init__(self, capacity: int, *, path: Path | None = None) -> None:
        """Of more than `capacity` scores, those longest out of use are forgotten, in memory."""
        self._capacity = capacity
        self._path = path
        self._scores: OrderedDict[str, float] = OrderedDict()
        self._file: IO[str] | None = None

    def open(self) -> None:
        """Read what an earlier part of the run found out."""
        if self._path is None:
            return
        self._path.parent.mkdir(parents=True, exist_ok=True)
        text = self._path.read_text() if self._path.exists() else ""
        whole = text[: text.rfind("\n") + 1]
        if whole != text:  # a kill cut the last line short
            self._path.write_text(whole)
        for line in whole.splitlines():
            found = json.loads(line)
            self._remember(found["key"], found["score"])
        self._file = self._path.open("a", buffering=1)  # a line per write

    def close(self) -> None:
        if self._file is not None:
            self._file.close()

    def get(self, key: str) -> float | None:
        if key in self._scores:
            self._scores.move_to_end(key)
        return self._scores.get(key)

    def put(self, key: str, score: float) -> None:
        if self._capacity == 0:
            return
        self._remember(key, score)
        if self._file is not None:
            self._file.write(json.dumps({"key": key, "score": score}) + "\n")

    def _remember(self, key: str, score: float) -> None:
        self._scores[key] = score
        self._scores.move_to_end(key)
        while len(self._scores) > self._capacity:
            self._scores.popitem(last=False)


def key_of(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
