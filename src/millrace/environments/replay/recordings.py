"""Recordings: made of finished episodes and converted back, read from and written to files with one
per line and its scores in the run, edited, and replayed, whole or up to a branch.

Promise: restoring an episode needs neither an engine nor a tokenizer. The replies after an edited
tool result are not the model's replies to it. They stay, to be read and scored, but they are
marked: their tokens are context and never trained.

In a replay, each request is compared with the recorded one. Where they differ, a ReplayError names
the turn and the first difference. Answers arrive in the recorded order. (A token log, of
core/completions.py, lets a resumed environment diverge instead.)
"""

import asyncio
import itertools
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import msgspec
import numpy as np

from millrace.cluster.messages import TurnWanted
from millrace.core.completions import cut
from millrace.core.errors import ConfigError, ReplayError
from millrace.core.records import Completion, Episode, Task, Turn
from millrace.environments.replay import schema
from millrace.environments.replay.schema import (
    CutRow,
    Entry,
    EpisodeSettings,
    Recording,
    ToolRow,
    TurnRow,
    encode,
)
from millrace.environments.token_record import Exchange, TokenRecord, places_of
from millrace.environments.tools.functions import Tool, ToolResult, run_tool

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


ORDER_TIMEOUT_S = 30.0  # how long an answer waits for those recorded before it


class RecordedAnswers:
    """The answers of one recording. Used from one event loop."""

    state: "EpisodeState"  # of the replayed episode; set by the caller
    runs_new_tools: ClassVar[bool] = False  # tool calls after the recording are run

    def __init__(self, recording: Recording) -> None:
        self._recording = recording
        turns = [e for e in recording.entries if not isinstance(e, ToolRow)]
        self._turns = {entry.number: entry for entry in turns}
        self._tools = {entry.number: entry for entry in recording.tool_runs}
        self._tool_numbers = itertools.count()
        # Entries that other answers wait for; the rest were never answered.
        self._awaited = [entry for entry in recording.entries if _is_answered(entry)]
        self._num_answered = 0
        self._advanced = asyncio.Condition()

    async def sample(self, wanted: TurnWanted, *, episode: int) -> Completion:
        """Answer as GroupPolicy.sample does."""
        entry, what = self._turns.get(wanted.call), f"turn {wanted.call}"
        if entry is None:
            raise self._differs(what, "which is not in the recording")
        if isinstance(entry, CutRow):
            return await self._cut(entry)
        if entry.is_recorded:
            self._check_prompt(entry, wanted.prompt, recording=self._recording)
        await self._in_order(entry, what=what)
        return entry.completion

    async def run_tool(self, tool: Tool, arguments: Mapping[str, Any], **limits: Any) -> ToolResult:
        """Return the recorded result. A tool in which an agent took turns runs again."""
        number = next(self._tool_numbers)
        entry, what = self._tools.get(number), f"tool call {number}"
        if self.runs_new_tools if entry is None else entry.has_turns:
            return await run_tool(tool, arguments, **limits)
        if entry is None:
            raise self._differs(what, f"of {tool.name!r}, which is not in the recording")
        requested, recorded = (
            encode({"name": name, "arguments": dict(given)}).decode()
            for name, given in ((tool.name, arguments), (entry.name, entry.arguments))
        )
        if entry.is_recorded and requested != recorded:
            raise self._differs(
                what, f"with {requested:.200}, where the recording has {recorded:.200}"
            )
        if entry.text is None:
            return await asyncio.Event().wait()  # type: ignore[return-value]  # until cancelled
        await self._in_order(entry, what=what)
        return ToolResult(text=entry.text, fault=entry.fault)

    def check_complete(self) -> None:
        """Raise ReplayError if the environment ended before the recording."""
        if self._num_answered < len(self._awaited):
            missing = self._awaited[self._num_answered]
            raise self._differs("the end", f"before {_named(missing)}, which the recording has")

    async def _cut(self, entry: CutRow) -> Completion:
        if entry.ending is not None:
            await self._in_order(entry, what=f"turn {entry.number}")
            raise self.state.end(entry.ending)
        if self._recording.ending == "timeout":
            async with self._advanced:
                await self._advanced.wait_for(lambda: self._num_answered == len(self._awaited))
            self.state.expire()
        return await asyncio.Event().wait()  # type: ignore[return-value]  # until cancelled

    async def _in_order(self, entry: Entry, *, what: str) -> None:
        position = next(i for i, other in enumerate(self._awaited) if other is entry)
        try:
            async with asyncio.timeout(ORDER_TIMEOUT_S), self._advanced:
                await self._advanced.wait_for(lambda: self._num_answered >= position)
                self._num_answered += 1
                self._advanced.notify_all()
        except TimeoutError:
            missing = self._awaited[self._num_answered]
            raise self._differs(what, f"and not for {_named(missing)}, which came before") from None

    def _check_prompt(self, entry: TurnRow, prompt: np.ndarray, *, recording: Recording) -> None:
        known = _prompt(entry, recording)
        if np.array_equal(known, prompt):
            return
        shorter = min(len(known), len(prompt))
        apart = np.flatnonzero(known[:shorter] != prompt[:shorter])
        at = int(apart[0]) if len(apart) else shorter
        model = next(row.model for row in recording.agents if row.name == entry.agent)
        renderer = self.state.models[model].renderer
        new, recorded = (renderer.decode(t[at:])[:80] for t in (prompt, known))
        raise self._differs(
            f"turn {entry.number}",
            f"with another prompt: from token {at} on it is {new!r}, and in the recording"
            f" {recorded!r}",
        )

    def _differs(self, what: str, how: str) -> ReplayError:
        return ReplayError(
            f"{self._recording.name}, episode {self._recording.index}: the environment came to"
            f" {what} {how}. Replay with the recorded environment and tokenizer."
        )


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Branch:
    """The point of a parent episode at which another episode branches off."""

    recording: Recording  # of the parent
    turn: int  # number of the turn of the branching point
    at: int  # sampled tokens of that turn that are shared
    root: int  # number of the root episode, whose engine session holds the KV

    @property
    def row(self) -> TurnRow:
        return next(row for row in self.recording.turns if row.number == self.turn)

    def shared(self) -> Recording:
        """Return the parent's recording up to the branching turn."""
        until = itertools.takewhile(lambda e: e is not self.row, self.recording.entries)
        answered = [entry for entry in until if _is_answered(entry)]
        return msgspec.structs.replace(self.recording, entries=answered)


class BranchAnswers(RecordedAnswers):
    """Returns the shared replies of a branch, then samples."""

    runs_new_tools = True

    def __init__(self, branch: Branch, sample_new: Callable[..., Awaitable[Completion]]) -> None:
        super().__init__(branch.shared())
        self._branch = branch
        self._sample_new = sample_new

    async def sample(self, wanted: TurnWanted, *, episode: int) -> Completion:
        if wanted.call in self._turns:
            known = await super().sample(wanted, episode=episode)
            return replace(known, num_shared=len(known.tokens))
        branch, row = self._branch, self._branch.row
        if wanted.call != row.number:
            return await self._sample_new(wanted, episode=episode)
        self._check_prompt(row, wanted.prompt, recording=branch.recording)
        partial = cut(row.completion, 0, branch.at) if branch.at else None
        wanted = msgspec.structs.replace(wanted, partial=partial, pinned=True)
        completion = await self._sample_new(wanted, episode=episode)
        return replace(completion, num_shared=branch.at)


def _is_answered(entry: Entry) -> bool:
    if isinstance(entry, ToolRow):
        return entry.text is not None and not entry.has_turns
    return isinstance(entry, TurnRow) or entry.ending is not None


def _named(entry: Entry) -> str:
    if isinstance(entry, ToolRow):
        return f"tool call {entry.number} ({entry.name})"
    return f"turn {entry.number}" + (f" ({entry.agent})" if entry.agent else "")


def _prompt(entry: TurnRow, recording: Recording) -> np.ndarray:
    rows = {row.number: row for row in recording.turns}
    parts, end = [entry.given], entry.start
    while entry.parent is not None:
        entry = rows[entry.parent]
        parts.append(np.concatenate([entry.given, entry.completion.tokens])[: end - entry.start])
        end = entry.start
    return np.concatenate(parts[::-1])
