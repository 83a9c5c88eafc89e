"""One episode from its first turn to its reward: a user's coroutine with the agents of a cast.

Promise: an episode that comes to a limit is marked and ends, whatever its environment does. What
the coroutine returns is a reward, or one TaskError sentence. Runs on the loop of the environments.

Where the episodes of one group are played, whole or as branches of one another.

A branch is the environment played again: up to the point where it branches off, replies and tool
results are those of the other episode; there the model goes on from its KV, and everything behind
is new. So any environment that is deterministic itself can be branched, at any token.

Promise: what a branch shares is trained with the episode that it branched off. An environment that
asks something else the second time makes a ReplayError, never a branch that is none.
Called from the controller's event loop; the environments run on the thread of theirs.
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


async def perform(
    function: EnvironmentFunction,
    task: Task,
    *,
    play: EpisodeState,
    cast: AgentSet,
    ended_reward: float,
    branching: Branching | None = None,
) -> Episode:
    """`ended_reward`: of an episode that came to a limit. `branching`: where it is one of a tree's
    leaves."""
    try:
        reward = await _rewarded(function, task, play=play, cast=cast, ended_reward=ended_reward)
    finally:
        play.close()  # what the environment has left running gets nothing more
    counts = {**play.counts, **cast.counts()}
    return Episode(
        turns=tuple(play.turns),
        rollouts=cast.rollouts(None if branching is None else play.tape.places()),
        reward=reward,
        ending=play.ending,
        counts={name: count for name, count in counts.items() if count},
        branching=branching,
    )


def name_of(function: Any) -> str:
    return getattr(function, "__name__", type(function).__name__)


async def _rewarded(
    function: EnvironmentFunction,
    task: Task,
    *,
    play: EpisodeState,
    cast: AgentSet,
    ended_reward: float,
) -> float | dict[str, float] | None:
    """What the user's function returns."""
    limit: asyncio.Timeout | None = None
    try:
        async with play.timed() as limit:
            returned = await function(task, cast.agent())
    except EpisodeOver:
        return ended_reward
    except (MillraceError, Expired):
        raise
    except Exception as error:
        if limit is not None and limit.expired():
            play.end("timeout")
            return ended_reward
        raise _raised(function, error, play) from error
    if isinstance(returned, Mapping) and returned and cast.trained <= set(returned):
        return {
            str(name): _checked(function, value, play) or 0.0 for name, value in returned.items()
        }
    return _checked(function, returned, play)


def _raised(function: EnvironmentFunction, error: Exception, play: EpisodeState) -> TaskError:
    last = traceback.extract_tb(error.__traceback__)[-1]
    return TaskError(
        f"{play.name}: environment {name_of(function)!r} raised {type(error).__name__}:"
        f" {error} (episode {play.index}, {last.filename}:{last.lineno}); mend it."
    )


def _checked(function: EnvironmentFunction, returned: Any, play: EpisodeState) -> float | None:
    if returned is None or (isinstance(returned, Real) and math.isfinite(returned)):
        return None if returned is None else float(returned)
    raise TaskError(
        f"{play.name}: environment {name_of(function)!r} returned {returned!r:.60};"
        " return a finite number as the reward, None to leave it to the scorers, or a dict with"
        " a number for each role that is trained."
    )


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Branch:
    """What an episode begins with that is not its own."""

    recording: Recording  # of the other one
    turn: TurnRow  # in which it branches off
    at: int  # after so many of the tokens sampled in it
    family: int  # number of the first episode of the tree, in whose session the KV lies

    @property
    def shared(self) -> Recording:
        """What was answered before that turn was."""
        entries = self.recording.entries
        end = next(index for index, entry in enumerate(entries) if entry is self.turn)
        answered = [entry for entry in entries[:end] if is_answered(entry)]
        return msgspec.structs.replace(self.recording, entries=answered)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Performance:
    """An episode that was played, and what a branch of it needs."""

    episode: Episode
    recording: Recording | None  # of leaves of trees


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
    ) -> Performance:
        """Episode `index` of the group; of a tree, with its place in it, and if it is no root with
        what it shares."""
        policy, home = self.policy, asyncio.get_running_loop()

        def sample(prompt: np.ndarray, **settings: Any) -> Coroutine[Any, Any, Completion]:
            """From the loop of the environments to the controller's, and back."""
            return on_loop(home, policy.sample(prompt, **settings))

        source = None
        if branch is not None:
            answers = RecordedAnswers(branch.shared, renderer=self._renderer, others=self._others)
            source = _BranchSource(branch, sample=sample, answers=answers)
        play = EpisodeState(
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
        return await self._thread.run(self._performed(play, branching=branching))

    async def _performed(self, play: EpisodeState, *, branching: Branching | None) -> Performance:
        """Runs on the loop of the environments."""
        cast = AgentSet(
            play,
            renderer=self._renderer,
            history=self._rules.history,
            tool_format=self._format,
            sampling=self.policy.sampling,
            others=self._others,
        )
        known: dict[str, Any] = {
            "play": play,
            "cast": cast,
            "ended_reward": self._rules.ended_reward,
        }
        episode = await perform(self._function, self._task, **known, branching=branching)
        if not episode.rollouts and self.policy.is_trained:
            raise TaskError(
                f"{play.name}: episode {play.index} of environment {name_of(self._function)!r}"
                f" ended ({play.ending}) before the model had said anything to be trained on; call"
                " agent.chat or agent.complete."
            )
        if branching is None and not self._rules.records:
            return Performance(episode=episode, recording=None)
        recording = recording_of(episode, self._task, **known)
        if self._rules.records:
            episode = replace(episode, recording=encode(recording))
        return Performance(episode=episode, recording=recording)


class _BranchSource:
    """Answers with what is shared, then goes on with what is new. Belongs to the loop of the
    environments."""

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
