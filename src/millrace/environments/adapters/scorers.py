"""Moves reward functions that take `environments` into the environment, which calls them."""

from collections.abc import Sequence

from millrace.core.errors import ConfigError
from millrace.core.records import Task
from millrace.environments.adapters.environment_factory import EnvironmentFactory, Reward
from millrace.environments.function_environment import EnvironmentFunction
from millrace.scoring.functions.function_scorer import Function
from millrace.scoring.functions.shipping import resolve_function
from millrace.scoring.functions.signature import ENVIRONMENTS, RewardFunction, inspect_reward
from millrace.scoring.registry import ScorerSpec


def split_rewards(
    specs: Sequence[ScorerSpec],
    environment: EnvironmentFunction | None,
    *,
    tasks: Sequence[Task],
) -> tuple[tuple[ScorerSpec, ...], EnvironmentFunction | None]:
    """Return the scorers for the scorer processes, and the environment with the other rewards."""
    if not isinstance(environment, EnvironmentFactory):
        return tuple(specs), environment
    rewards: list[Reward] = []
    others: list[ScorerSpec] = []
    for spec in specs:
        function = _function_of(spec)
        if function is None or not function.wants_environments:
            others.append(spec)
            continue
        if spec.gate is not None:
            raise ConfigError(
                f"Scorer {spec.name!r} takes {ENVIRONMENTS!r}, so it runs at the end of each"
                " episode, before all other scorers; remove its `when`."
            )
        function.check_columns(tasks, has_environments=True)
        rewards.append(Reward(function=function, weight=spec.weight))
    return tuple(others), environment.with_rewards(rewards)


def _function_of(spec: ScorerSpec) -> RewardFunction | None:
    if not isinstance(spec.type, Function):
        return None
    return inspect_reward(resolve_function(spec.type.function), name=spec.name)
