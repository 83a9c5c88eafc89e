"""What a reward function is: the TRL signature, sync or async, and what it may return.

    def exact(prompts, completions, completion_ids, answer, **kwargs) -> list[float | None]

Promise: a function gets keyword arguments only, and only those that it takes. It returns one finite
number or None per completion; anything else is a ScoreError that says what came instead. Nothing
here starts a process: the controller inspects functions with it, scorer processes run them.
"""

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any

from millrace.core.errors import ConfigError, ScoreError
from millrace.core.protocols import NeedsColumns
from millrace.core.records import Prompt, Task

RESERVED = ("prompts", "completions", "completion_ids")  # what every reward function is offered
ENVIRONMENTS = "environments"  # passed where these are: see adapters/environment_factory.py
NOT_PASSED = ("trainer_state", "log_extra", "log_metric")  # what TRL offers besides
REMEDY = "return a list with one number per completion, or None where the reward does not apply"


@dataclass(frozen=True, kw_only=True, slots=True)
class RewardFunction:
    """A user's callable, and what its signature says about it. Inspected once, called often."""

    name: str
    call: Callable[..., Any]
    takes: frozenset[str] | None  # argument names; None = everything, it has **kwargs
    needs: frozenset[str]  # argument names without a default
    is_async: bool
    wants_environments: bool = False  # by name, not as part of **kwargs

    def __call__(
        self,
        *,
        prompts: Sequence[Prompt],
        completions: Sequence[Prompt],
        completion_ids: Sequence[Sequence[int]],
        columns: Mapping[str, Sequence[Any]],
    ) -> Any:
        """Whatever the user's code returns (an awaitable, if it is async), unchecked."""
        offered = {
            **columns,
            "prompts": prompts,
            "completions": completions,
            "completion_ids": completion_ids,
        }
        if self.takes is not None:
            offered = {name: value for name, value in offered.items() if name in self.takes}
        return self.call(**offered)

    def check_columns(self, tasks: Sequence[Task], *, has_environments: bool = False) -> None:
        """Raise ConfigError if some task lacks a column that the function cannot do without."""
        for name in sorted(self.needs.intersection(NOT_PASSED)):
            raise ConfigError(
                f"Reward {self.name!r} needs {name!r}, which TRL passes and Millrace does not (see"
                f" docs/how-to/scorers.md); give the parameter a default."
            )
        if ENVIRONMENTS in self.needs and not has_environments:
            raise ConfigError(
                f"Reward {self.name!r} needs 'environments', which there are only with"
                " environment=mr.EnvironmentFactory(...) (see docs/how-to/other-environments.md);"
                " give the parameter"
                " a default."
            )
        needed = sorted(self.needs.difference(RESERVED, [ENVIRONMENTS]))
        for index, task in enumerate(tasks if needed else ()):
            for column in needed:
                if column not in task.columns:
                    raise ConfigError(
                        f"Reward {self.name!r} needs the column {column!r}, which task {index} does"
                        f" not have; add it to the task, or give the parameter a default."
                    )


def inspect_reward(function: Callable[..., Any], *, name: str) -> RewardFunction:
    """Read a callable's signature; raises ConfigError if it cannot be called with keywords."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except ValueError:  # some callables written in C do not tell
        parameters = [inspect.Parameter("columns", inspect.Parameter.VAR_KEYWORD)]
    for parameter in parameters:
        if parameter.kind is parameter.POSITIONAL_ONLY and parameter.default is parameter.empty:
            raise ConfigError(
                f"Reward {name!r} takes {parameter.name!r} by position only; reward functions are"
                " called with keyword arguments, so remove the '/' from its signature."
            )
    named = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters)
    given: object = function
    columns = given.needed_columns if isinstance(given, NeedsColumns) else ()
    return RewardFunction(
        name=name,
        call=function,
        takes=None if takes_all else frozenset(p.name for p in named),
        wants_environments=any(p.name == ENVIRONMENTS for p in named),
        needs=frozenset([*columns, *(p.name for p in named if p.default is p.empty)]),
        # A callable object is async if its __call__ is.
        is_async=inspect.iscoroutinefunction(function)
        or inspect.iscoroutinefunction(getattr(function, "__call__", None)),  # noqa: B004
    )


def check_rewards(value: Any, *, name: str, num_completions: int) -> list[float | None]:
    """What a reward function returned, as plain floats; raises ScoreError if it is not a reward."""
    rewards = _without_arrays(value)
    if not isinstance(rewards, list | tuple):
        raise ScoreError(f"Reward {name!r} returned {_shown(value)}; {REMEDY}.")
    if len(rewards) != num_completions:
        raise ScoreError(
            f"Reward {name!r} returned {len(rewards)} values for {num_completions} completions;"
            f" {REMEDY}."
        )
    return [_reward(item, name=name, index=index) for index, item in enumerate(rewards)]


def _reward(value: Any, *, name: str, index: int) -> float | None:
    number = _without_arrays(value)
    if number is None:
        return None
    if isinstance(number, Real):  # also bool, Fraction and numpy's scalars
        try:
            reward = float(number)
        except OverflowError:  # an int beyond all floats
            reward = math.inf
        if math.isfinite(reward):
            return reward
    raise ScoreError(f"Reward {name!r} returned {_shown(value)} for completion {index}; {REMEDY}.")


def _without_arrays(value: Any) -> Any:
    """numpy, torch and other arrays and scalars as plain Python, without importing any of them."""
    return value.tolist() if hasattr(value, "tolist") else value


def _shown(value: Any) -> str:
    text = repr(value)
    text = text if len(text) <= 60 else f"{text[:57]}..."
    return f"{text} ({type(value).__name__})"
