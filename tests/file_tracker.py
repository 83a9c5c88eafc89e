"""A tracker of a user's. It imports little, because a process of its own loads it."""

import json
import threading
from pathlib import Path


class FileTracker:
    """Writes all calls to RUN_DIR/LABEL.jsonl; `fails` names the method that raises, or hangs if
    it is followed by "!"."""

    def __init__(self, *, label: str, fails: str = "") -> None:
        self.label = label
        self.fails = fails

    def open(self, run_dir, *, settings, resume_from):
        self.path = Path(run_dir) / f"{self.label}.jsonl"
        self._add("open", settings.get("model", {}).get("path"), resume_from)

    def write(self, step, metrics):
        self._add("write", step, dict(metrics))

    def write_episodes(self, step, rows):
        self._add("write_episodes", step, list(rows))

    def alert(self, sentence):
        self._add("alert", sentence)

    def close(self):
        self._add("close")

    def _add(self, method, *arguments):
        if self.fails == f"{method}!":
            threading.Event().wait()
        if self.fails == method:
            raise ConnectionError(f"{method} is down")
        with self.path.open("a") as file:
            print(json.dumps([method, *arguments]), file=file)


def read_lines(path: Path) -> list[list]:
    return [json.loads(line) for line in path.read_text().splitlines()]
