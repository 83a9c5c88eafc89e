"""Builds what plays the episodes of a run: the environment, its recipe, and models besides the
policy.

Settings are checked before any worker starts; every error is one sentence about the settings.
"""

import contextlib
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from millrace.config import RunConfig
from millrace.core.errors import ConfigError
from millrace.core.protocols import Environment
from millrace.environments.branching.recipes import Pivot, build_recipe
from millrace.environments.branching.scheduler import Recipe
from millrace.environments.episode_runner import EnvironmentFunction
from millrace.environments.function_environment import (
    FunctionEnvironment,
    SingleTurn,
    answer,
    check_function,
    lifetime,
    use_tools,
)
from millrace.environments.limits import EpisodeLimits
from millrace.environments.role_models import RoleModel, load_role_model
from millrace.environments.rollouts.renderer import Renderer
from millrace.environments.threads import LoopThread
from millrace.environments.tools.mcp_server import McpServer, WithServers
from millrace.scoring.functions.shipping import resolve_function
from millrace.scoring.registry import ScorerSpec
from millrace.serving.programs.command_environment import PROGRAM_TIMEOUT_S, CommandEnvironment


def build_environment(
    config: RunConfig, given: Callable[..., Any] | None
) -> EnvironmentFunction | None:
    """The function that plays an episode; None if an episode is one prompt and one completion."""
    settings, logs = config.environment, Path(config.run_dir) / "logs"
    if given is None and settings.command:
        return CommandEnvironment(
            settings.command,
            score=None if settings.score is None else resolve_function(settings.score),
            columns=settings.columns,
            timeout_s=settings.episode_timeout_s or PROGRAM_TIMEOUT_S,
            max_running=settings.max_programs,
            log=logs / "programs.log",
        )
    servers = [McpServer(**row.model_dump(), log=logs / "mcp.log") for row in settings.mcp]
    function = given
    if function is None and settings.function is not None:
        function = resolve_function(settings.function)
    if function is not None:
        check_function(function)
        return WithServers(function, servers) if servers else function
    if servers:
        return WithServers(use_tools, servers)
    if settings.recipe is not None:
        return answer
    _check_single_turn(config)
    return None


def _check_single_turn(config: RunConfig) -> None:
    if config.rollout.redundancy:
        raise ConfigError(
            f"rollout.redundancy = {config.rollout.redundancy} starts additional episodes of an"
            " environment, and there is no environment.function or command; use rollout.oversample."
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
    if rollout.redundancy:
        raise ConfigError(
            f"rollout.redundancy = {rollout.redundancy} cancels episodes that others may branch"
            " from; remove it, or environment.recipe."
        )
    recipe = build_recipe(table)
    recipe.check(rollout.group_size + rollout.oversample)
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
    config: RunConfig,
    function: EnvironmentFunction | None,
    *,
    renderer: Renderer,
    recipe: Recipe | None,
    models: Mapping[str, RoleModel],
) -> AsyncIterator[Environment]:
    """The environment of a run; an environment function runs in its own thread."""
    if function is None:
        yield SingleTurn()
        return
    settings = config.environment
    limits = settings.model_dump(include=set(EpisodeLimits.__dataclass_fields__))
    with LoopThread("environments") as thread:
        environment = FunctionEnvironment(
            function,
            renderer=renderer,
            thread=thread,
            limits=EpisodeLimits(**limits),
            redundancy=config.rollout.redundancy,
            ended_reward=settings.ended_reward,
            tool_format=settings.tool_format,
            history=settings.history,
            records=config.monitoring.record_episodes > 0,
            recipe=recipe,
            others=models,
        )
        async with lifetime(function, thread=thread):
            yield environment
