"""What plays the episodes of a run, made from its settings: an environment, a recipe, other models.

Called by prepare(), before any worker starts; every error is one sentence about the settings.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from millrace.config import EnvironmentConfig, McpConfig, RunConfig
from millrace.core.errors import ConfigError
from millrace.environments.branching.pivot import Pivot
from millrace.environments.branching.recipe import Recipe
from millrace.environments.branching.registry import build_recipe
from millrace.environments.episode_runner import EnvironmentFunction
from millrace.environments.function_environment import check_function
from millrace.environments.other_models import OtherModel, load_other_models
from millrace.environments.rollouts.single_turn import answer
from millrace.environments.tools.environment import WithServers, use_tools
from millrace.environments.tools.mcp_server import McpServer
from millrace.scoring.functions.shipping import resolve_function
from millrace.scoring.registry import ScorerSpec
from millrace.serving.programs.command_environment import PROGRAM_TIMEOUT_S, CommandEnvironment


def build_environment(
    config: RunConfig, given: Callable[..., Any] | None
) -> EnvironmentFunction | None:
    settings = config.environment
    if given is None and settings.command:
        return _program(settings, log=Path(config.run_dir) / "logs" / "programs.log")
    servers = [_server(row, logs=Path(config.run_dir) / "logs") for row in settings.mcp]
    if given is None and settings.function is None:
        if servers:
            return WithServers(use_tools, servers)
        if settings.recipe is not None:
            return answer
        if config.rollout.redundancy:
            raise ConfigError(
                f"rollout.redundancy = {config.rollout.redundancy} is for episodes that are played"
                " one by one, and there is no environment.function or command; use"
                " rollout.oversample."
            )
        if config.monitoring.record_episodes:
            raise ConfigError(
                f"monitoring.record_episodes = {config.monitoring.record_episodes} records what an"
                " environment plays, and there is no environment.function or command; read"
                " rollouts/ instead, or write one."
            )
        return None
    function = given if given is not None else resolve_function(str(settings.function))
    check_function(function)
    return WithServers(function, servers) if servers else function


def _server(settings: McpConfig, *, logs: Path) -> McpServer:
    return McpServer(**settings.model_dump(), log=logs / "mcp.log")


def recipe_of(config: RunConfig, specs: Sequence[ScorerSpec]) -> Recipe | None:
    table, rollout = config.environment.recipe, config.rollout
    if table is None:
        return None
    if rollout.redundancy:
        raise ConfigError(
            f"rollout.redundancy = {rollout.redundancy} gives up episodes that others may branch"
            " off; leave it or environment.recipe out."
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


def others_of(config: RunConfig, *, has_roles: bool) -> dict[str, OtherModel]:
    models = config.environment.models
    if models and (config.environment.command or not has_roles):
        raise ConfigError(
            f"environment.models ({', '.join(models)}) are for roles that an environment.function"
            " takes, and there is none; leave them out."
        )
    return load_other_models(models)


def _program(settings: EnvironmentConfig, *, log: Path) -> CommandEnvironment:
    return CommandEnvironment(
        settings.command,
        score=None if settings.score is None else resolve_function(settings.score),
        columns=settings.columns,
        timeout_s=settings.episode_timeout_s or PROGRAM_TIMEOUT_S,
        max_running=settings.max_programs,
        log=log,
    )
