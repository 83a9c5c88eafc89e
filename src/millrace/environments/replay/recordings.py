"""Recordings: made of finished episodes and converted back, read from and written to files with one
per line and its scores in the run, and edited.

Promise: restoring an episode needs neither an engine nor a tokenizer. The replies after an edited
tool result are not the model's replies to it. They stay, to be read and scored, but they are
marked: their tokens are context and never trained.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from millrace.core.errors import ConfigError
from millrace.core.records import Episode, Task, Turn
from millrace.environments.replay import schema
from millrace.environments.replay.schema import Entry, EpisodeSettings, Recording, ToolRow, TurnRow
from millrace.environments.token_record import Exchange, TokenRecord, places_of

if TYPE_CHECKING:
    from millrace.environments.episode_state import EpisodeState


def recording_of(episode: Episode, task: Task, *, state: "EpisodeState") -> Recording:
    settings = {name: getattr(state.settings, name) for name in EpisodeSettings.__struct_fields__}
    columns = {name: value for name, value in task.columns.items() if _is_json(value)}
    agents = [agent.row for agent in state.agents.values()]
    return Recording(
        **settings,
        task=replace(task, columns=columns),
        left_out=[name for name in task.columns if name not in columns],
        agents=agents,
        models={name: state.models[name].row for row in agents if (name := row.model) is not None},
        entries=state.entries,
        reward=episode.reward,
        ending=episode.ending,
        counts=episode.counts,
        branching=episode.branching,
    )


def _is_json(value: Any) -> bool:
    """True if the value survives encoding as JSON unchanged."""
    try:
        return msgspec.json.decode(msgspec.json.encode(value)) == value
    except (TypeError, ValueError):  # comparing arrays gives no single answer
        return False


def episode_of(recording: Recording) -> Episode:
    records = {agent.name: TokenRecord() for agent in recording.agents}
    exchanges: dict[int, Exchange] = {}  # by number of the turn
    turns: list[Turn] = []
    for row in recording.turns:
        text, finish = row.completion.text, row.completion.finish
        turns.append(Turn(prompt=row.prompt, completion=text, finish=finish, agent=row.agent))
        exchanges[row.number] = records[row.agent].add(
            row.given,
            row.completion,
            sampling=row.sampling,
            parent=None if row.parent is None else exchanges[row.parent],
            at=row.start,
        )
    places = places_of(exchanges.values()) if recording.branching else None
    return Episode(
        turns=tuple(turns),
        rollouts=tuple(
            replace(rollout, agent=agent.name, policy=recording.policy_of(agent))
            for agent in recording.agents
            if agent.is_trained
            for rollout in records[agent.name].rollouts(places)
        ),
        reward=recording.reward,
        ending=recording.ending,
        counts=recording.counts,
        branching=recording.branching,
    )


class Line(schema.Row, frozen=True, kw_only=True):
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
            yield schema.decode(line, Line)
        except msgspec.DecodeError as error:
            raise ConfigError(
                f"{path}:{number} is not a recorded episode: {error}; use a file that this version"
                " of millrace wrote with monitoring.record_episodes."
            ) from None


def write_recordings(path: str | Path, lines: Iterable[Line]) -> None:
    with Path(path).open("wb") as file:
        file.writelines(schema.encode(line) + b"\n" for line in lines)


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
