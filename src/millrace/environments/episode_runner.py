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
import math
import traceback
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from dataclasses import dataclass, replace
from numbers import Real
from typing import TYPE_CHECKING, Any

import numpy as np

from millrace.core.errors import MillraceError, TaskError
from millrace.core.protocols import Policy
from millrace.core.records import Branching, Completion, Episode, Task
from millrace.environments.agent import Agent
from millrace.environments.episode_state import EpisodeState
from millrace.environments.limits import EpisodeOver
from millrace.environments.replay.answers import Branch, BranchAnswers
from millrace.environments.replay.recorder import recording_of
from millrace.environments.replay.schema import EpisodeSettings, Recording, encode
from millrace.environments.role_models import role_model
from millrace.environments.rollouts.attempt import Expired
from millrace.environments.threads import on_loop
from millrace.environments.tools.functions import run_tool

if TYPE_CHECKING:
    from millrace.environments.function_environment import FunctionEnvironment

EnvironmentFunction = Callable[[Task, Agent], Awaitable[Any]]


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
    ) -> tuple[Episode, Recording | None]:
        """Play episode `index` of the group; recorded if it is in a tree, or if all are.
        `branching` is its position in a tree; `branch` is its branching point unless it is a
        root."""
        policy, env, home = self.policy, self.environment, asyncio.get_running_loop()

        def sample(prompt: np.ndarray, **settings: Any) -> Coroutine[Any, Any, Completion]:
            """Sample on the controller's event loop, called from the environments' loop."""
            return on_loop(home, policy.sample(prompt, **settings))

        answers = None if branch is None else BranchAnswers(branch, sample)
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
        state = EpisodeState(
            settings,
            models={None: model, **env.others},
            sample=sample if answers is None else answers.sample,
            root=index if branch is None else branch.root,
            run_tool=run_tool if answers is None else answers.run_tool,
        )
        if answers is not None:
            answers.state = state
        return await env.thread.run(self._run(state, branching=branching))

    async def _run(
        self, state: EpisodeState, *, branching: Branching | None
    ) -> tuple[Episode, Recording | None]:
        """Runs on the loop of the environments."""
        function, records = self.environment.function, self.environment.records
        episode = await run_episode(function, self.task, state=state, branching=branching)
        if not episode.rollouts and self.policy.is_trained:
            settings = state.settings
            raise TaskError(
                f"{settings.name}: episode {settings.index} of environment {name_of(function)!r}"
                f" ended ({state.ending}) before the model sampled any trained token; call"
                " agent.chat or agent.complete."
            )
        if branching is None and not records:
            return episode, None
        recording = recording_of(episode, self.task, state=state)
        if records:
            episode = replace(episode, recording=encode(recording))
        return episode, recording
