"""Runs the episodes of one group, from the first turn to the reward, whole or as branches.

A branch runs the environment again. Up to the branching point it gets the replies and tool results
of the parent episode; there the model continues from the parent's KV, and everything after that is
new. Any deterministic environment can be branched this way, at any token.

Promise: an episode that reaches a limit is marked and ends, whatever its environment does. The
coroutine's return value is a reward, or the group fails with one TaskError sentence. Shared tokens
of a branch are trained with the parent episode. An environment that behaves differently the second
time raises a ReplayError instead of making a wrong branch.

EpisodeRunner is called from the controller's event loop. An EpisodeHost runs the environment: a
thread of this process, or worker processes (workers.py).
"""

import asyncio
import math
import traceback
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from dataclasses import dataclass, replace
from numbers import Real
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from millrace.core.errors import MillraceError, TaskError
from millrace.core.protocols import Policy
from millrace.core.records import Branching, Completion, Episode, Task
from millrace.environments.agent import Agent
from millrace.environments.episode_state import EpisodeState, Sample
from millrace.environments.limits import EpisodeOver
from millrace.environments.replay.answers import Branch, BranchAnswers
from millrace.environments.replay.recorder import recording_of
from millrace.environments.replay.schema import EpisodeSettings, Recording, encode
from millrace.environments.role_models import RoleModel, role_model
from millrace.environments.rollouts.attempt import Expired
from millrace.environments.rollouts.renderer import Renderer
from millrace.environments.threads import LoopThread, on_loop
from millrace.environments.tools.functions import run_tool

if TYPE_CHECKING:
    from millrace.environments.function_environment import FunctionEnvironment

EnvironmentFunction = Callable[[Task, Agent], Awaitable[Any]]
PlayedEpisode = tuple[Episode, Recording | None]  # recorded if it is in a tree, or if all are


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class EpisodePlan:
    """What one episode depends on, besides the environment and the replies."""

    settings: EpisodeSettings
    task: Task
    is_trained: bool
    branching: Branching | None = None  # its position in a tree
    branch: Branch | None = None  # its branching point, unless it is a root


class EpisodeHost(Protocol):
    """Runs the environment. Called from the controller's event loop."""

    async def play(self, plan: EpisodePlan, sample: Sample) -> PlayedEpisode:
        """Play an episode whose turns `sample` answers on this event loop."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class LoadedEnvironment:
    """An environment function and the models of its agents, in the process that runs them."""

    function: EnvironmentFunction
    renderer: Renderer  # of the policy
    others: Mapping[str, RoleModel]  # models besides the policy, by name
    records: bool = False  # record all episodes, so that they can be replayed

    async def play(self, plan: EpisodePlan, sample: Sample) -> PlayedEpisode:
        """Play an episode on this event loop, which is that of the environments."""
        settings, branch = plan.settings, plan.branch
        answers = None if branch is None else BranchAnswers(branch, sample)
        state = EpisodeState(
            settings,
            models={None: RoleModel(settings.policy, self.renderer), **self.others},
            sample=sample if answers is None else answers.sample,
            root=settings.index if branch is None else branch.root,
            run_tool=run_tool if answers is None else answers.run_tool,
        )
        if answers is not None:
            answers.state = state
        function, branching = self.function, plan.branching
        episode = await run_episode(function, plan.task, state=state, branching=branching)
        if not episode.rollouts and plan.is_trained:
            raise TaskError(
                f"{settings.name}: episode {settings.index} of environment {name_of(function)!r}"
                f" ended ({state.ending}) before the model sampled any trained token; call"
                " agent.chat or agent.complete."
            )
        if branching is None and not self.records:
            return episode, None
        recording = recording_of(episode, plan.task, state=state)
        if self.records:
            episode = replace(episode, recording=encode(recording))
        return episode, recording


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ThreadHost:
    """Runs the environment on a thread of the controller's process."""

    loaded: LoadedEnvironment
    thread: LoopThread

    async def play(self, plan: EpisodePlan, sample: Sample) -> PlayedEpisode:
        home = asyncio.get_running_loop()

        def sample_at_home(prompt: np.ndarray, **settings: Any) -> Coroutine[Any, Any, Completion]:
            return on_loop(home, sample(prompt, **settings))

        return await self.thread.run(self.loaded.play(plan, sample_at_home))


async def run_episode(
    function: EnvironmentFunction,
    task: Task,
    *,
    state: EpisodeState,
    branching: Branching | None = None,
) -> Episode:
    """Run one episode to its end. `branching` is the position of a leaf in its tree."""
    try:
        reward = await _reward_of(function, task, state=state)
    finally:
        state.close()  # tasks that the environment left running sample nothing more
    return Episode(
        turns=tuple(state.turns),
        rollouts=state.rollouts(with_places=branching is not None),
        reward=reward,
        ending=state.ending,
        counts={name: count for name, count in state.counts.items() if count},
        branching=branching,
    )


def name_of(function: Any) -> str:
    return getattr(function, "__name__", type(function).__name__)


async def _reward_of(
    function: EnvironmentFunction, task: Task, *, state: EpisodeState
) -> float | dict[str, float] | None:
    settings = state.settings
    limit: asyncio.Timeout | None = None
    try:
        async with state.timed() as limit:
            returned = await function(task, state.agent())
    except EpisodeOver:
        return settings.ended_reward
    except (MillraceError, Expired):
        raise
    except Exception as error:
        if limit is not None and limit.expired():
            state.end("timeout")
            return settings.ended_reward
        last = traceback.extract_tb(error.__traceback__)[-1]
        raise TaskError(
            f"{settings.name}: environment {name_of(function)!r} raised {type(error).__name__}:"
            f" {error} (episode {settings.index}, {last.filename}:{last.lineno}); fix the"
            " environment."
        ) from error
    trained = {rollout.agent for rollout in state.rollouts()}
    if isinstance(returned, Mapping) and returned and trained <= set(returned):
        return {
            str(name): _checked(function, value, state) or 0.0 for name, value in returned.items()
        }
    return _checked(function, returned, state)


def _checked(function: EnvironmentFunction, returned: Any, state: EpisodeState) -> float | None:
    if returned is None or (isinstance(returned, Real) and math.isfinite(returned)):
        return None if returned is None else float(returned)
    raise TaskError(
        f"{state.settings.name}: environment {name_of(function)!r} returned {returned!r:.60};"
        " return a finite number as the reward, None to leave the reward to the scorers, or a dict"
        " with a number for each trained role."
    )


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class EpisodeRunner:
    environment: "FunctionEnvironment"
    task: Task
    policy: Policy

    async def play(
        self, index: int, *, branching: Branching | None = None, branch: Branch | None = None
    ) -> PlayedEpisode:
        """Play episode `index` of the group. `branching` is its position in a tree; `branch` is its
        branching point unless it is a root."""
        policy, env = self.policy, self.environment
        model = role_model(
            env.renderer, max_context=policy.max_context, tool_format=env.tool_format
        )
        settings = EpisodeSettings(
            name=policy.name,
            index=index,
            seed=policy.seed,
            random_index=index if branch is None else branch.recording.random_index,
            limits=env.limits,
            ended_reward=env.ended_reward,
            history=env.history,
            policy=model.row,
            sampling=policy.sampling,
        )
        plan = EpisodePlan(
            settings=settings,
            task=self.task,
            is_trained=policy.is_trained,
            branching=branching,
            branch=branch,
        )
        return await env.host.play(plan, policy.sample)
