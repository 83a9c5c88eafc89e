"""Files of recordings: a line for each, which also says what became of the episode in its run.

A recording with something changed in it: what a tool said, or the reward.

Promise: what the model said after a tool said something else is not known. Those turns stay, to be
read and scored, and are marked; their tokens are context from then on, and never trained.
"""

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

from millrace.core.errors import ConfigError
from millrace.environments.replay.schema import CutRow, Entry, Recording, Row, ToolRow, encode


class Line(Row, frozen=True, kw_only=True):
    group: int | None = None  # number, in its run
    score: float | None = None  # that it got there
    parts: dict[str, float | None] = msgspec.field(default_factory=dict)
    advantage: float | None = None
    model: str | None = None  # whose tokenizer and chat template made the prompts
    episode: Recording


def read_recordings(path: str | Path) -> Iterator[Line]:
    """Raises ConfigError with file, line and key for what is no recording."""
    try:
        lines = Path(path).read_bytes().splitlines()
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}.") from None
    for number, line in enumerate(lines, start=1):
        try:
            yield msgspec.json.decode(line, type=Line)
        except msgspec.DecodeError as error:
            raise ConfigError(
                f"{path}:{number} is no recorded episode: {error}; such files are written with"
                " monitoring.record_episodes, and by this version of millrace."
            ) from None


def write_recordings(path: str | Path, lines: Iterable[Line]) -> None:
    with Path(path).open("wb") as file:
        file.writelines(encode(line) + b"\n" for line in lines)


def with_reward(recording: Recording, reward: float | dict[str, float] | None) -> Recording:
    return msgspec.structs.replace(recording, reward=reward)


def with_tool_results(recording: Recording, texts: Mapping[int, str | None]) -> Recording:
    """Other results of tool calls, by their number; None = it is dropped, and the model is told
    nothing. The edited recording is to be run again: its rewards are those of before."""
    known = {row.number for row in recording.tool_runs if not row.has_turns}
    for number in texts:
        if number not in known:
            raise ConfigError(
                f"There is no tool call {number} in the recording of {recording.name}, episode"
                f" {recording.index}, or an agent spoke in it; choose one of"
                f" {', '.join(map(str, sorted(known))) or 'none'}."
            )
    entries: list[Entry] = []
    is_recorded = True
    for entry in recording.entries:
        if isinstance(entry, CutRow):
            entries.append(entry)
            continue
        changes: dict[str, Any] = {"is_recorded": entry.is_recorded and is_recorded}
        if isinstance(entry, ToolRow) and entry.number in texts:
            changes |= {"text": texts[entry.number] or "", "fault": None}
            is_recorded = False
        entries.append(msgspec.structs.replace(entry, **changes))
    return msgspec.structs.replace(recording, entries=entries)
