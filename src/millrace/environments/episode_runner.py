"""Runs the episodes of one group, from the first turn to the reward, whole or as branches.

A branch runs the environment again. Up to the branching point it gets the replies and tool results
of the parent episode; there the model continues from the parent's KV, and everything after that is
new. Any deterministic environment can be branched this way, at any token.

Promise: an episode that reaches a limit is marked and ends, whatever its environment does. The
coroutine's return value is a reward, or the group fails with one TaskError sentence. Shared tokens
of a branch are trained with the parent episode. An environment that behaves differently the second
time raises a ReplayError instead of making a wrong branch.

EpisodeRunner is called from the controller's event loop; environments run on their own thread.
"""

import asyncio
import itertools
import math
import traceback
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from dataclasses import dataclass, replace
from numbers import Real
from typing import Any

import msgspec
import numpy as np

from millrace.core.completions import cut
from millrace.core.errors import MillraceError, TaskError
from millrace.core.protocols import Policy
from millrace.core.records import Branching, Completion, Episode, Task
from millrace.environments.agent import Agent
from millrace.environments.agent_set import AgentSet
from millrace.environments.episode_state import EpisodeState, Sample
from millrace.environments.limits import EpisodeOver, EpisodeRules
from millrace.environments.loop_thread import LoopThread, on_loop
from millrace.environments.other_models import OtherModel
from millrace.environments.replay.answers import RecordedAnswers, is_answered
from millrace.environments.replay.episodes import completion_of
from millrace.environments.replay.recorder import recording_of
from millrace.environments.replay.schema import Recording, TurnRow, encode
from millrace.environments.rollouts.attempt import Expired
from millrace.environments.rollouts.renderer import Renderer
from millrace.environments.tools.calls import ToolFormat
from millrace.environments.tools.functions import Tool, ToolResult, run_tool

EnvironmentFunction = Callable[[Task, Agent], Awaitable[Any]]


async def run_episode(
    function: EnvironmentFunction,
    task: Task,
    *,
    state: EpisodeState,
    agents: AgentSet,
    ended_reward: float,
    branching: Branching | None = None,
) -> Episode:
    """Run one episode to its end.

    `ended_reward` is the reward of an episode that reached a limit. `branching` is the position of
    a leaf in its tree.
    """
    try:
        reward = await _reward_of(
            function, task, state=state, agents=agents, ended_reward=ended_reward
        )
    finally:
        state.close()  # tasks that the environment left running sample nothing more
    counts = {**state.counts, **agents.counts()}
    return Episode(
        turns=tuple(state.turns),
        rollouts=agents.rollouts(None if branching is None else state.tape.places()),
        reward=reward,
        ending=state.ending,
        counts={name: count for name, count in counts.items() if count},
        branching=branching,
    )


def name_of(function: Any) -> str:
    return getattr(function, "__name__", type(function).__name__)


async def _reward_of(
    function: EnvironmentFunction,
    task: Task,
    *,
    state: EpisodeState,
    agents: AgentSet,
    ended_reward: float,
) -> float | dict[str, float] | None:
    """Run the user's coroutine and check what it returns."""
    limit: asyncio.Timeout | None = None
    try:
        async with state.timed() as limit:
            returned = await function(task, agents.agent())
    except EpisodeOver:
        return ended_reward
    except (MillraceError, Expired):
        raise
    except Exception as error:
        if limit is not None and limit.expired():
            state.end("timeout")
            return ended_reward
        raise _raised(function, error, state) from error
    if isinstance(returned, Mapping) and returned and agents.trained <= set(returned):
        return {
            str(name): _checked(function, value, state) or 0.0 for name, value in returned.items()
        }
    return _checked(function, returned, state)


def _raised(function: EnvironmentFunction, error: Exception, state: EpisodeState) -> TaskError:
    last = traceback.extract_tb(error.__traceback__)[-1]
    return TaskError(
        f"{state.name}: environment {name_of(function)!r} raised {type(error).__name__}:"
        f" {error} (episode {state.index}, {last.filename}:{last.lineno}); fix the environment."
    )


def _checked(function: EnvironmentFunction, returned: Any, state: EpisodeState) -> float | None:
    if returned is None or (isinstance(returned, Real) and math.isfinite(returned)):
        return None if returned is None else float(returned)
    raise TaskError(
        f"{state.name}: environment {name_of(function)!r} returned {returned!r:.60};"
        " return a finite number as the reward, None to leave the reward to the scorers, or a dict"
        " with a number for each trained role."
    )


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Branch:
    """The point of a parent episode at which another episode branches off."""

    recording: Recording  # of the parent
    turn: TurnRow  # turn of the branching point
    at: int  # sampled tokens of that turn that are shared
    family: int  # number of the root episode, whose engine session holds the KV

    @property
    def shared(self) -> Recording:
        """The parent's recording up to the branching turn."""
        entries = self.recording.entries
        end = next(index for index, entry in enumerate(entries) if entry is self.turn)
        answered = [entry for entry in entries[:end] if is_answered(entry)]
        return msgspec.structs.replace(self.recording, entries=answered)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class PlayedEpisode:
    """A finished episode, with the recording that branches of it need."""

    episode: Episode
    recording: Recording | None  # None unless branches or recordings are enabled


class EpisodeRunner:
    def __init__(
        self,
        function: EnvironmentFunction,
        *,
        task: Task,
        policy: Policy,
        renderer: Renderer,
        rules: EpisodeRules,
        tool_format: ToolFormat,
        thread: LoopThread,
        others: Mapping[str, OtherModel],
    ) -> None:
        self.policy = policy
        self._function = function
        self._task = task
        self._renderer = renderer
        self._rules = rules
        self._format = tool_format
        self._thread = thread
        self._others = others

    async def play(
        self, index: int, *, branching: Branching | None = None, branch: Branch | None = None
    ) -> PlayedEpisode:
        """Play episode `index` of the group.

        `branching` is its position in a tree; `branch` is its branching point unless it is a root.
        """
        policy, home = self.policy, asyncio.get_running_loop()

        def sample(prompt: np.ndarray, **settings: Any) -> Coroutine[Any, Any, Completion]:
            """Sample on the controller's event loop, called from the environments' loop."""
            return on_loop(home, policy.sample(prompt, **settings))

        source = None
        if branch is not None:
            answers = RecordedAnswers(branch.shared, renderer=self._renderer, others=self._others)
            source = _BranchSource(branch, sample=sample, answers=answers)
        state = EpisodeState(
            name=policy.name,
            index=index,
            sample=sample if source is None else source.sample,
            max_context=policy.max_context,
            limits=self._rules.limits,
            seed=policy.seed,
            random_index=None if branch is None else branch.recording.random_index,
            family=None if branch is None else branch.family,
            run_tool=run_tool if source is None else source.run_tool,
        )
        return await self._thread.run(self._run(state, branching=branching))

    async def _run(self, state: EpisodeState, *, branching: Branching | None) -> PlayedEpisode:
        """Runs on the loop of the environments."""
        agents = AgentSet(
            state,
            renderer=self._renderer,
            history=self._rules.history,
            tool_format=self._format,
            sampling=self.policy.sampling,
            others=self._others,
        )
        known: dict[str, Any] = {
            "state": state,
            "agents": agents,
            "ended_reward": self._rules.ended_reward,
        }
        episode = await run_episode(self._function, self._task, **known, branching=branching)
        if not episode.rollouts and self.policy.is_trained:
            raise TaskError(
                f"{state.name}: episode {state.index} of environment {name_of(self._function)!r}"
                f" ended ({state.ending}) before the model sampled any trained token; call"
                " agent.chat or agent.complete."
            )
        if branching is None and not self._rules.records:
            return PlayedEpisode(episode=episode, recording=None)
        recording = recording_of(episode, self._task, **known)
        if self._rules.records:
            episode = replace(episode, recording=encode(recording))
        return PlayedEpisode(episode=episode, recording=recording)


class _BranchSource:
    """Returns the shared replies and tool results, then samples. Runs on the environments' loop."""

    def __init__(self, branch: Branch, *, sample: Sample, answers: RecordedAnswers) -> None:
        self._branch = branch
        self._sample = sample
        self._answers = answers
        self._tool_runs = itertools.count()

    async def sample(self, prompt: np.ndarray, *, call: int, **settings: Any) -> Completion:
        if self._answers.has_turn(call):
            known = await self._answers.turn(call, prompt)
            return replace(known, num_shared=len(known.tokens))
        branch = self._branch
        if call != branch.turn.number:
            return await self._sample(prompt, call=call, **settings)
        self._answers.check_prompt(branch.turn, prompt, recording=branch.recording)
        partial = cut(completion_of(branch.turn), 0, branch.at) if branch.at else None
        settings |= {"partial": partial, "pinned": True}
        completion = await self._sample(prompt, call=call, **settings)
        return replace(completion, num_shared=branch.at)

    async def run_tool(self, tool: Tool, arguments: Mapping[str, Any], **limits: Any) -> ToolResult:
        number = next(self._tool_runs)
        if self._answers.has_tool_run(number):
            return await self._answers.tool_run(number, tool, arguments)
        return await run_tool(tool, arguments, **limits)
