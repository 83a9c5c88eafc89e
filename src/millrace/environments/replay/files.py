"""Files of recordings, one per line with its scores in the run, and edits of recordings.

Promise: the replies after an edited tool result are not the model's replies to it. They stay, to be
read and scored, but they are marked: their tokens are context and never trained.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np

from millrace.core.errors import ConfigError
from millrace.environments.replay.schema import (
    Entry,
    Recording,
    Row,
    ToolRow,
    TurnRow,
    decode,
    encode,
)


class Line(Row, frozen=True, kw_only=True):
    group: int | None = None  # number of the group in its run
    score: float | None = None  # in the run, as the next two
    parts: dict[str, float | None] = msgspec.field(default_factory=dict)
    advantage: float | None = None
    model: str | None = None  # its tokenizer and chat template made the prompts
    episode: Recording


def read_recordings(path: str | Path) -> Iterator[Line]:
    """Read the lines of a file; raises ConfigError with file, line and key."""
    try:
        lines = Path(path).read_bytes().splitlines()
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}.") from None
    for number, line in enumerate(lines, start=1):
        try:
            yield decode(line, Line)
        except msgspec.DecodeError as error:
            raise ConfigError(
                f"{path}:{number} is not a recorded episode: {error}; use a file that this version"
                " of millrace wrote with monitoring.record_episodes."
            ) from None


def write_recordings(path: str | Path, lines: Iterable[Line]) -> None:
    with Path(path).open("wb") as file:
        file.writelines(encode(line) + b"\n" for line in lines)


def with_reward(recording: Recording, reward: float | dict[str, float] | None) -> Recording:
    return msgspec.structs.replace(recording, reward=reward)


def with_tool_results(recording: Recording, texts: Mapping[int, str | None]) -> Recording:
    """Replace the results of tool calls by their number; None makes a result empty. Rewards stay as
    they were; rerun() the result to update them."""
    known = {row.number for row in recording.tool_runs if not row.has_turns}
    for number in texts:
        if number not in known:
            raise ConfigError(
                f"The recording of {recording.name}, episode {recording.index}, has no tool call"
                f" {number} whose result can be replaced; choose one of"
                f" {', '.join(map(str, sorted(known))) or 'none'}."
            )
    entries: list[Entry] = []
    is_recorded = True
    for entry in recording.entries:
        if isinstance(entry, ToolRow):
            entry = msgspec.structs.replace(entry, is_recorded=entry.is_recorded and is_recorded)
            if entry.number in texts:
                text = texts[entry.number] or ""
                entry = msgspec.structs.replace(entry, text=text, fault=None)
                is_recorded = False
        elif isinstance(entry, TurnRow) and not is_recorded:
            # Its tokens are context and have no version; its routes belong to other tokens.
            versions = np.full_like(entry.completion.versions, -1)
            completion = replace(entry.completion, versions=versions, routes=None)
            entry = msgspec.structs.replace(entry, completion=completion)
        entries.append(entry)
    return msgspec.structs.replace(recording, entries=entries)
