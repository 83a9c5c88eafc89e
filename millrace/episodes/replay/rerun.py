"""An environment played again on what is recorded: no engine, no tools, the same course.

The coroutine runs as it did, its agents render and record as they did; only what came from outside
is taken from the recording: replies, results of tools, draws of agent.rng.

Promise: what the environment asks is compared with what it asked then. Where it differs, a
ReplayError names the turn and what differs first. Answers come in the order in which they came
then. What the environment does besides takes the time it takes, and is the same only if it is
deterministic itself.
"""

import asyncio
import itertools
from collections.abc import Mapping
from typing import Any

import numpy as np

from millrace.core.errors import MillraceError
from millrace.core.records import Completion, Episode, Sampling, Task
from millrace.episodes.cast import Cast
from millrace.episodes.performing import EnvironmentFunction, perform
from millrace.episodes.play import Play
from millrace.episodes.replay.episodes import completion_of, task_of
from millrace.episodes.replay.schema import CutRow, Entry, Recording, ToolRow, TurnRow, encode
from millrace.episodes.tool_calls import FORMATS
from millrace.episodes.tools import Tool, ToolResult
from millrace.rollout.renderer import Renderer

PATIENCE_S = 30.0  # for what the recording says came first


class ReplayError(MillraceError):
    """The environment does not ask what is recorded."""


async def rerun(
    recording: Recording,
    function: EnvironmentFunction,
    *,
    tokenizer: Any,
    task: Task | None = None,
    patience_s: float = PATIENCE_S,
) -> Episode:
    """The episode that comes of it, with a recording of its own. `task`: where the recorded one
    lacks columns. `patience_s`: how long an answer is held back for one that came before it."""
    if task is None and recording.task.left_out:
        names = ", ".join(recording.task.left_out)
        raise ReplayError(f"The columns {names} of the task could not be recorded; pass the task.")
    renderer = Renderer(tokenizer, template_settings=recording.template)
    source = _Recorded(recording, renderer=renderer, patience_s=patience_s)
    play = Play(
        name=recording.name,
        index=recording.index,
        sample=source.sample,
        max_context=recording.max_context,
        limits=recording.limits,
        seed=recording.seed,
        run_tool=source.run_tool,
    )
    source.play = play
    cast = Cast(
        play,
        renderer=renderer,
        history=recording.history,
        tool_format=FORMATS[recording.tool_format],
        sampling=recording.sampling,
    )
    task = task_of(recording) if task is None else task
    ended_reward = recording.ended_reward
    episode = await perform(
        function, task, play=play, cast=cast, ended_reward=ended_reward, records=True
    )
    source.check_complete()
    return episode


class _Recorded:
    """Answers from a recording. Belongs to one event loop."""

    play: Play

    def __init__(self, recording: Recording, *, renderer: Renderer, patience_s: float) -> None:
        self._recording = recording
        self._renderer = renderer
        self._patience_s = patience_s
        turns = [e for e in recording.entries if not isinstance(e, ToolRow)]
        self._turns = {entry.number: entry for entry in turns}
        self._tools = {entry.number: entry for entry in recording.tool_runs}
        self._tokens = _tokens(recording)
        # What an answer is held back for; others never come.
        self._awaited = [entry for entry in recording.entries if _is_answered(entry)]
        self._num_given = 0
        self._moved = asyncio.Condition()
        self._tool_calls = itertools.count()

    async def sample(
        self,
        prompt: np.ndarray,
        *,
        episode: int,
        call: int,
        sampling: Sampling,
        session: str,
        adapter: str | None,
        is_trained: bool,
        pinned: bool,
    ) -> Completion:
        entry = self._turns.get(call)
        if entry is None:
            raise self._differs(f"turn {call}", "which is not in the recording")
        if isinstance(entry, CutRow):
            return await self._cut(entry)
        if entry.is_recorded:
            self._check_prompt(entry, prompt)
        await self._in_order(entry, what=f"turn {call}")
        return completion_of(entry)

    async def run_tool(
        self, tool: Tool, arguments: Mapping[str, Any], *, timeout_s: float, max_chars: int
    ) -> ToolResult:
        number = next(self._tool_calls)
        entry, what = self._tools.get(number), f"tool call {number}"
        if entry is None:
            raise self._differs(what, f"of {tool.name!r}, which is not in the recording")
        asked, known = (
            encode({"name": name, "arguments": dict(given)}).decode()
            for name, given in ((tool.name, arguments), (entry.name, entry.arguments))
        )
        if entry.is_recorded and asked != known:
            raise self._differs(what, f"with {asked:.200}, where the recording has {known:.200}")
        if entry.text is None:
            return await asyncio.Event().wait()  # type: ignore[return-value]  # till it is cut
        await self._in_order(entry, what=what)
        return ToolResult(text=entry.text, fault=entry.fault)

    def check_complete(self) -> None:
        """Raise ReplayError if the environment asked for less than is recorded."""
        if self._num_given < len(self._awaited):
            missing = self._awaited[self._num_given]
            raise self._differs("the end", f"before {_named(missing)}, which the recording has")

    async def _cut(self, entry: CutRow) -> Completion:
        if entry.ending is not None:
            await self._in_order(entry, what=f"turn {entry.number}")
            raise self.play.end(entry.ending)
        if self._recording.ending == "timeout":
            async with self._moved:
                await self._moved.wait_for(lambda: self._num_given == len(self._awaited))
            self.play.expire()
        return await asyncio.Event().wait()  # type: ignore[return-value]  # till it is cut

    async def _in_order(self, entry: Entry, *, what: str) -> None:
        """Wait until everything was given that was given before this."""
        position = next(i for i, other in enumerate(self._awaited) if other is entry)
        try:
            async with asyncio.timeout(self._patience_s), self._moved:
                await self._moved.wait_for(lambda: self._num_given >= position)
        except TimeoutError:
            missing = self._awaited[self._num_given]
            raise self._differs(what, f"and not for {_named(missing)}, which came before") from None
        async with self._moved:
            self._num_given += 1
            self._moved.notify_all()

    def _check_prompt(self, entry: TurnRow, prompt: np.ndarray) -> None:
        known = self._tokens[entry.number]
        if np.array_equal(known, prompt):
            return
        shorter = min(len(known), len(prompt))
        apart = np.flatnonzero(known[:shorter] != prompt[:shorter])
        at = int(apart[0]) if len(apart) else shorter
        asked, recorded = (self._renderer.decode(t[at:])[:80] for t in (prompt, known))
        raise self._differs(
            f"turn {entry.number}",
            f"with another prompt: from token {at} on it is {asked!r}, and in the recording"
            f" {recorded!r}",
        )

    def _differs(self, what: str, how: str) -> ReplayError:
        return ReplayError(
            f"{self._recording.name}, episode {self._recording.index}: the environment comes to"
            f" {what} {how}; replay with the environment and the tokenizer that were recorded."
        )


def _is_answered(entry: Entry) -> bool:
    if isinstance(entry, ToolRow):
        return entry.text is not None
    return isinstance(entry, TurnRow) or entry.ending is not None


def _named(entry: Entry) -> str:
    if isinstance(entry, ToolRow):
        return f"tool call {entry.number} ({entry.name})"
    return f"turn {entry.number}" + (f" ({entry.agent})" if entry.agent else "")


def _tokens(recording: Recording) -> dict[int, np.ndarray]:
    """By turn: what the model was given, all of it."""
    whole: dict[int, np.ndarray] = {}  # with the reply
    prompts: dict[int, np.ndarray] = {}
    for row in recording.turns:
        before = [] if row.parent is None else [whole[row.parent][: row.start]]
        given = np.concatenate([*before, np.array(row.given, np.int32)])
        prompts[row.number] = given
        whole[row.number] = np.concatenate([given, np.array(row.tokens, np.int32)])
    return prompts
