"""The environments of a run: a user's coroutine, or one completion per prompt.

    async def guess(task, agent):
        reply = await agent.chat([{"role": "user", "content": task.prompt}])
        return float(reply.text == task.columns["answer"])

Promise: each group runs the coroutine n times concurrently. An episode that reaches a limit is
marked and ends, whatever its environment does; an episode whose environment raises is left out. A
group needs n good episodes: `redundancy` extra episodes are started, and the slowest are cancelled.
A branch of an episode runs a deterministic environment again on the parent's replies and tool
results, and then on new ones. Its shared tokens are trained with the parent. An environment that
behaves differently the second time raises a ReplayError. open() and close() of an environment are
called at the start and end of a run, in each process that runs it.

FunctionEnvironment is called from the controller's event loop. An EpisodeHost runs the coroutines:
a thread of this process, or worker processes (workers.py).
"""

import asyncio
import contextlib
import inspect
import math
import traceback
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Mapping
from dataclasses import KW_ONLY, dataclass, field, replace
from numbers import Real
from typing import TYPE_CHECKING, Any

from millrace.core.errors import (
    ConfigError,
    MillraceError,
    ReplayError,
    TaskError,
    cancel_all,
    first_cause,
)
from millrace.core.records import Branching, Completion, Episode, Message, Prompt, Task
from millrace.environments.agent import Agent
from millrace.environments.episode_state import EpisodeState, Sample
from millrace.environments.replay.recordings import (
    Branch,
    BranchAnswers,
    RecordedAnswers,
    recording_of,
)
from millrace.environments.replay.schema import (
    EpisodeLimits,
    EpisodeOver,
    EpisodeSettings,
    Recording,
    encode,
)
from millrace.environments.rollouts.partial_rollouts import Expired
from millrace.environments.rollouts.player import GroupPolicy
from millrace.environments.rollouts.renderer import History, Renderer, RoleModel, role_model
from millrace.environments.threads import LoopThread, call_hook, is_cancelled, on_loop
from millrace.environments.tools.calls import ToolFormatName
from millrace.environments.tools.functions import run_tool
from millrace.scoring.functions.user_function import is_async

if TYPE_CHECKING:
    from millrace.environments.branching import Recipe

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


# Plays an episode whose turns `sample` answers. Both are called on the controller's event loop.
EpisodeHost = Callable[[EpisodePlan, Sample], Awaitable[PlayedEpisode]]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class LoadedEnvironment:
    """An environment function and the models of its agents, in the process that runs them."""

    function: EnvironmentFunction
    renderer: Renderer  # of the policy
    others: Mapping[str, RoleModel]  # models besides the policy, by name
    records: bool = False  # record all episodes, so that they can be replayed

    async def play(
        self, plan: EpisodePlan, sample: Sample, answers: RecordedAnswers | None = None
    ) -> PlayedEpisode:
        """Play an episode on this event loop. `answers` replace the engines and tools."""
        settings, branch, branching = plan.settings, plan.branch, plan.branching
        if branch is not None:
            answers = BranchAnswers(branch, sample)
        state = EpisodeState(
            settings,
            models={None: RoleModel(settings.policy, self.renderer), **self.others},
            sample=sample if answers is None else answers.sample,
            root=settings.index if branch is None else branch.root,
            run_tool=run_tool if answers is None else answers.run_tool,
        )
        if answers is not None:
            answers.state = state
        try:
            reward = await _reward_of(self.function, plan.task, state=state)
        finally:
            state.close()  # tasks that the environment left running sample nothing more
        episode = Episode(
            turns=tuple(state.turns),
            rollouts=state.rollouts(with_places=branching is not None),
            reward=reward,
            ending=state.ending,
            counts={name: count for name, count in state.counts.items() if count},
            branching=branching,
        )
        if not episode.rollouts and plan.is_trained:
            raise TaskError(
                f"{settings.name}: episode {settings.index} of environment"
                f" {name_of(self.function)!r} ended ({state.ending}) before the model sampled any"
                " trained token; call agent.chat or agent.complete."
            )
        if branching is None and not self.records:
            return episode, None
        recording = recording_of(episode, plan.task, state=state)
        if self.records:
            episode = replace(episode, recording=encode(recording))
        return episode, recording


async def rerun(
    recording: Recording,
    function: EnvironmentFunction,
    *,
    tokenizer: Any,
    tokenizers: Mapping[str, Any] | None = None,
    task: Task | None = None,
) -> Episode:
    """Run an environment again on a recording, without an engine or tools, and return the episode
    with a recording of its own. It is the same, bit for bit, or a ReplayError names the first
    request that differs. `tokenizers` belong to the recording's other models, by name. `task`
    replaces the recorded task, which may lack columns."""
    if task is None and recording.left_out:
        names = ", ".join(recording.left_out)
        raise ReplayError(f"The columns {names} of the task could not be recorded; pass the task.")
    tokenizers = tokenizers or {}
    if missing := [name for name in recording.models if name not in tokenizers]:
        raise ReplayError(
            f"Roles of the recording use other models ({', '.join(missing)}), and their tokenizers"
            " are missing; pass tokenizers={name: tokenizer}."
        )
    others = {
        name: RoleModel(row, Renderer(tokenizers[name], template_settings=row.template))
        for name, row in recording.models.items()
    }
    renderer = Renderer(tokenizer, template_settings=recording.policy.template)
    loaded = LoadedEnvironment(function=function, renderer=renderer, others=others, records=True)
    answers, task = RecordedAnswers(recording), recording.task if task is None else task
    plan = EpisodePlan(
        settings=recording, task=task, is_trained=False, branching=recording.branching
    )
    episode, _ = await loaded.play(plan, answers.sample, answers)
    answers.check_complete()
    return episode


async def play_in_thread(
    loaded: LoadedEnvironment, thread: LoopThread, plan: EpisodePlan, sample: Sample
) -> PlayedEpisode:
    """Play an episode on a thread of this process. With its first two arguments bound, this is an
    EpisodeHost."""
    home = asyncio.get_running_loop()

    def sample_at_home(wanted: Any, *, episode: int) -> Coroutine[Any, Any, Completion]:
        return on_loop(home, sample(wanted, episode=episode))

    return await thread.run(loaded.play(plan, sample_at_home))


def name_of(function: Any) -> str:
    return getattr(function, "__name__", type(function).__name__)


async def _reward_of(
    function: EnvironmentFunction, task: Task, *, state: EpisodeState
) -> float | dict[str, float] | None:
    settings = state.settings
    try:
        # An environment may run its agents in a TaskGroup, which wraps what chat() raises.
        async with state.time_limit:
            with first_cause():
                returned = await function(task, state.agent())
    except EpisodeOver:
        return settings.ended_reward
    except (MillraceError, Expired):
        raise
    except (Exception, SystemExit, asyncio.CancelledError) as error:
        if isinstance(error, asyncio.CancelledError) and is_cancelled():
            raise
        if state.time_limit.expired():
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
    if returned is None:
        return None
    if isinstance(returned, Real) and math.isfinite(returned):
        return float(returned)
    raise TaskError(
        f"{state.settings.name}: environment {name_of(function)!r} returned {returned!r:.60};"
        " return a finite number as the reward, None to leave the reward to the scorers, or a dict"
        " with a number for each trained role."
    )


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class EpisodeRunner:
    environment: "FunctionEnvironment"
    task: Task
    policy: GroupPolicy

    async def play(
        self, index: int, *, branching: Branching | None = None, branch: Branch | None = None
    ) -> PlayedEpisode:
        """Play episode `index` of the group; the others as in EpisodePlan."""
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
            policies=env.policies,
            lagged=dict(env.lagged),
        )
        plan = EpisodePlan(
            settings=settings,
            task=self.task,
            is_trained=policy.is_trained,
            branching=branching,
            branch=branch,
        )
        with policy.episode(index):
            return await env.host(plan, policy.sample)


class SingleTurn:
    """The default environment: one prompt, one completion, scored by the scorers."""

    async def play(self, task: Task, policy: GroupPolicy, n: int) -> list[Episode]:
        return await policy.complete(task.prompt, n)


async def answer(task: Task, agent: Agent) -> None:
    """SingleTurn as an environment function, for recipes."""
    if isinstance(task.prompt, str):
        await agent.complete(task.prompt)
    else:
        await agent.chat(task.prompt)


async def use_tools(task: Task, agent: Agent) -> None:
    """Chat and call `agent.tools` until a reply calls none. The scorers score the episode."""
    await agent.run(messages_of(task.prompt), agent.tools)


def messages_of(prompt: Prompt) -> list[Message]:
    """Return the prompt as messages; a text becomes a user message."""
    return [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)


@dataclass(frozen=True, slots=True, eq=False)
class FunctionEnvironment:
    """Implements Environment of player.py; play() runs on the controller's event loop."""

    host: EpisodeHost
    _: KW_ONLY
    renderer: Renderer
    limits: EpisodeLimits = field(default_factory=EpisodeLimits)
    redundancy: int = 0  # extra episodes per training group; the slowest are cancelled
    ended_reward: float = 0.0  # reward of an episode that reached a limit
    tool_format: ToolFormatName = "auto"
    history: History = "template"
    policies: tuple[str, ...] = ()  # see EpisodeSettings
    lagged: Mapping[str, tuple[str, int]] = field(default_factory=dict[str, tuple[str, int]])
    recipe: "Recipe | None" = None  # replaces n independent episodes per training group

    async def play(self, task: Task, policy: GroupPolicy, n: int) -> list[Episode]:
        runner = EpisodeRunner(environment=self, task=task, policy=policy)
        if self.recipe is not None and policy.is_trained:
            return await self.recipe.play(runner, n)
        num_begun = n + (self.redundancy if policy.is_trained else 0)
        running = {asyncio.create_task(runner.play(index)): index for index in range(num_begun)}
        finished: dict[int, Episode] = {}
        try:
            while len(finished) < n:
                done, _ = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
                failures: list[TaskError] = []
                for index, ended in sorted((running.pop(ended), ended) for ended in done):
                    try:
                        finished[index], _recording = ended.result()
                    except TaskError as error:
                        failures.append(error)
                    else:
                        policy.finished(index, finished[index])
                if len(finished) + len(running) < n:
                    raise failures[0]
        finally:
            await cancel_all(running)
            for index in set(range(num_begun)) - set(sorted(finished)[:n]):
                policy.gave_up(index)
        return [finished[index] for index in sorted(finished)][:n]


def check_function(function: Any) -> EnvironmentFunction:
    """Raise ConfigError unless the function can be called as an environment."""
    problem = "" if is_async(function) else "is not a coroutine"
    try:
        inspect.signature(function).bind(None, None)
    except (TypeError, ValueError):
        problem = problem or "cannot be called with a task and an agent"
    if problem:
        raise ConfigError(
            f"Environment {name_of(function)!r} {problem}; define it with `async def play(task,"
            " agent)`."
        )
    return function


@contextlib.asynccontextmanager
async def lifetime(function: Any, *, thread: LoopThread) -> AsyncGenerator[None]:
    """Await the environment's open() and, at the end, close(), if it defines them."""
    try:
        await thread.run(call_hook(function, "open"))
        yield
    finally:
        await thread.run(call_hook(function, "close"))
