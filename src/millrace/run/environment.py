"""Builds what plays the episodes of a run: the environment, its recipe, and models besides the
policy.

Settings are checked before any worker starts; every error is one sentence about the settings.
"""

import contextlib
from collections.abc import AsyncIterator, Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from millrace.cluster.hub import Hub
from millrace.cluster.launchers.hosts import JoinLauncher
from millrace.cluster.launchers.launcher import Launcher
from millrace.cluster.messages import StartEnvironment
from millrace.cluster.supervision.pool import WorkerPool
from millrace.cluster.worker import Worker
from millrace.config import RunConfig
from millrace.core.errors import ConfigError, TaskError
from millrace.core.records import Task
from millrace.environments import function_environment
from millrace.environments.branching import Pivot, Recipe, build_recipe
from millrace.environments.replay.schema import EpisodeLimits
from millrace.environments.rollouts.player import Environment
from millrace.environments.rollouts.renderer import Renderer, RoleModel, load_role_model
from millrace.environments.threads import LoopThread
from millrace.environments.tools.mcp_server import McpServer, WithServers
from millrace.environments.workers import EnvironmentReplica, EnvironmentWorkers
from millrace.run.cluster import portable
from millrace.run.episodes.external import build_external, check_external
from millrace.scoring.functions.user_function import SUFFIX, resolve_function, ship_functions
from millrace.scoring.pool import ScorerSpec
from millrace.serving.programs.command_environment import PROGRAM_TIMEOUT_S, CommandEnvironment

if TYPE_CHECKING:
    from millrace.run.prepare import PreparedRun

WORKER_MODULE = "millrace.run.episodes.worker"
PROMPTS_CHECKED = 64  # rendered at start; a run whose first prompts are all too long never begins


def build_environment(
    config: RunConfig, given: Callable[..., Any] | None
) -> function_environment.EnvironmentFunction | None:
    """The function that plays an episode, without MCP servers; None if an episode is one prompt and
    one completion."""
    settings, logs = config.environment, Path(config.run_dir) / "logs"
    if settings.external is not None:
        if given is not None:
            raise ConfigError(
                "environment.external lets other programs play the episodes, but an environment was"
                " given as well; remove one of them."
            )
        check_external(config)
    if given is None and settings.command:
        return CommandEnvironment(
            settings.command,
            score=None if settings.score is None else resolve_function(settings.score),
            columns=settings.columns,
            timeout_s=settings.episode_timeout_s or PROGRAM_TIMEOUT_S,
            max_running=settings.max_programs,
            log=logs / "programs.log",
        )
    function = given
    if function is None and settings.function is not None:
        function = resolve_function(settings.function)
    if function is not None:
        function_environment.check_function(function)
        return function
    if settings.mcp:
        return function_environment.use_tools
    if settings.recipe is not None:
        return function_environment.answer
    _check_single_turn(config)
    return None


def with_servers(
    config: RunConfig, function: function_environment.EnvironmentFunction
) -> function_environment.EnvironmentFunction:
    """The environment with the tools of environment.mcp."""
    log = Path(config.run_dir) / "logs" / "mcp.log"
    servers = [McpServer(**row.model_dump(), log=log) for row in config.environment.mcp]
    return WithServers(function, servers) if servers else function


def _check_single_turn(config: RunConfig) -> None:
    if config.environment.num_workers:
        raise ConfigError(
            f"environment.workers = {config.environment.workers} and remote ="
            f" {config.environment.remote} run an environment, and there is no"
            " environment.function or command; remove them."
        )
    if config.rollout.num_cancelled:
        raise ConfigError(
            "rollout.selection = 'fastest' cancels episodes of an environment, and there is no"
            " environment.function or command; choose 'first' or 'roc'."
        )
    if config.monitoring.record_episodes:
        raise ConfigError(
            f"monitoring.record_episodes = {config.monitoring.record_episodes} records episodes of"
            " an environment, and there is no environment.function or command; read rollouts/"
            " instead, or write one."
        )


def resolve_recipe(config: RunConfig, specs: Sequence[ScorerSpec]) -> Recipe | None:
    table, rollout = config.environment.recipe, config.rollout
    if table is None:
        return None
    if rollout.num_cancelled:
        raise ConfigError(
            "rollout.selection = 'fastest' cancels episodes that others may branch from; remove it,"
            " or environment.recipe."
        )
    recipe = build_recipe(table)
    recipe.check(rollout.num_scored)
    by_value = isinstance(recipe, Pivot) and recipe.by == "value"
    if by_value and not any(spec.may_reward_tokens for spec in specs):
        raise ConfigError(
            "environment.recipe.by = 'value' needs a scorer that rewards single tokens, and there"
            " is none; add one to scorers of type 'process_reward_model', or set it to 'entropy'."
        )
    return recipe


def load_models(config: RunConfig, *, has_roles: bool) -> dict[str, RoleModel]:
    """Load the tokenizers of environment.models. `has_roles`: there is an environment function."""
    models = config.environment.models
    if models and (config.environment.command or not has_roles):
        raise ConfigError(
            f"environment.models ({', '.join(models)}) are for roles of an environment.function,"
            " and there is none; remove them."
        )
    return {name: load_role_model(name, settings) for name, settings in models.items()}


@contextlib.asynccontextmanager
async def open_environment(
    prepared: "PreparedRun",
    *,
    worker_pool: WorkerPool,
    hub: Hub,
    launcher: Launcher,
    private: Path,
    newest: Callable[[], int],
) -> AsyncIterator[tuple[Environment, EnvironmentWorkers]]:
    """The environment of a run, and its workers, which the caller starts. Without any, its function
    runs in a thread of its own. `newest` returns the newest version that was published."""
    config, function, renderer = prepared.config, prepared.environment, prepared.renderer
    if function is None:
        is_external = config.environment.external is not None
        single = function_environment.SingleTurn()
        environment = build_external(prepared, newest) if is_external else single
        yield environment, EnvironmentWorkers(worker_pool, [])
        return
    workers = build_workers(
        config,
        prepared.given_environment,
        worker_pool=worker_pool,
        hub=hub,
        launcher=launcher,
        private=private,
    )
    async with contextlib.AsyncExitStack() as stack:
        stack.push_async_callback(workers.close)
        host = workers.play
        if config.environment.num_workers == 0:
            loaded = function_environment.LoadedEnvironment(
                function=function,
                renderer=renderer,
                others=prepared.models,
                records=config.monitoring.record_episodes > 0,
            )
            thread = stack.enter_context(LoopThread("environments"))
            await stack.enter_async_context(function_environment.lifetime(function, thread=thread))
            host = partial(function_environment.play_in_thread, loaded, thread)
        settings = config.environment
        limits = settings.model_dump(include=set(EpisodeLimits.__dataclass_fields__))
        environment = function_environment.FunctionEnvironment(
            host,
            renderer=renderer,
            limits=EpisodeLimits(**limits),
            redundancy=config.rollout.num_cancelled,
            ended_reward=settings.ended_reward,
            tool_format=settings.tool_format,
            history=settings.history,
            recipe=prepared.recipe,
            policies=tuple(config.policies),
            lagged=config.lagged,
        )
        yield environment, workers


def build_workers(
    config: RunConfig,
    given: function_environment.EnvironmentFunction | None,
    *,
    worker_pool: WorkerPool,
    hub: Hub,
    launcher: Launcher,
    private: Path,
) -> EnvironmentWorkers:
    """The workers of the environment, not yet started. `given`: as for build_environment().
    `launcher`: of the remote ones, unless they join. `private`: directory for a pickled
    function."""
    settings = config.environment
    location = None
    if given is not None and settings.num_workers > 0:
        location = ship_functions({"environment": given}, folder=private)["environment"]
        if settings.remote and location.endswith(SUFFIX):
            raise ConfigError(
                f"environment.remote = {settings.remote}, but other hosts cannot"
                " import the environment; define it at the top of a module, and set"
                " environment.function to 'module:name'."
            )
    start = StartEnvironment(config=portable(config).model_dump(mode="json"), function=location)

    async def launch_remote(name: str, module: str) -> Worker:
        if not config.cluster.is_local:  # its tools may call services
            return await hub.launch(name, module, has_secrets=True, launcher=launcher)
        timeout_s = None if name in has_joined else config.cluster.join_timeout_s
        has_joined.add(name)
        waiting = JoinLauncher(hub.registry, role="environment", timeout_s=timeout_s)
        return await hub.launch(name, "", launcher=waiting)

    has_joined: set[str] = set()
    replicas = [
        EnvironmentReplica(
            f"environment-{i}",
            joins=i >= settings.workers and config.cluster.is_local,
            module=WORKER_MODULE,
            message=start,
            launcher=worker_pool.launch if i < settings.workers else launch_remote,
            start_timeout_s=config.cluster.start_timeout_s,
            hang_timeout_s=config.supervision.hang_timeout_s,
        )
        for i in range(settings.num_workers)
    ]
    return EnvironmentWorkers(worker_pool, replicas)


def check_prompts(
    renderer: Renderer, tasks: Sequence[Task], *, max_context: int, is_played: bool
) -> None:
    """One bad prompt costs its own group. If all of the first are bad, the settings are wrong.
    `is_played`: by an environment of the user, which decides what to generate after a prompt."""
    tasks = tasks[:PROMPTS_CHECKED]
    ends = {"" if isinstance(task.prompt, str) else task.prompt[-1]["role"] for task in tasks}
    if ends == {"assistant"} and not is_played:
        raise ConfigError(
            f"Each of the first {len(tasks)} prompts ends with an assistant message; remove these,"
            " or train on the conversations with `millrace sft`."
        )
    lengths: list[int] = []
    refused: TaskError | None = None
    for task in tasks:
        try:
            lengths.append(len(renderer.render(task.prompt)))
        except TaskError as error:
            refused = error
    if refused is not None and not lengths:
        raise ConfigError(f"Each of the first {len(tasks)} prompts is refused: {refused}")
    if lengths and refused is None and min(lengths) >= max_context:
        raise ConfigError(
            f"Each of the first {len(tasks)} prompts has at least {min(lengths)} tokens, but the"
            f" context holds {max_context}; shorten the prompts or raise engine.max_context."
        )
