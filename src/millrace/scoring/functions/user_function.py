"""Users' functions: rewards with the TRL signature, sync or async, and how functions reach workers.

    def exact(prompts, completions, completion_ids, answer, **kwargs) -> list[float | None]

Promise: a reward function gets keyword arguments only, and only those in its signature. It returns
one finite number or None per completion; anything else is a ScoreError that shows the value.

A function that a fresh process can import travels as a reference, "module:name" or "file.py:name".
Any other function (from a script or notebook, a closure, a lambda, a method) is pickled to a file.
A worker unpickles only private files of the same user, never bytes from a socket. A function that
cannot be resolved or pickled is a ConfigError before any worker starts.
"""

import inspect
import math
import os
import pickle
import stat
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from pathlib import Path
from typing import Any

import cloudpickle

from millrace.core.errors import ConfigError, ScoreError, shortened
from millrace.core.plugins import load_reference
from millrace.core.records import Task

RESERVED = ("prompts", "completions", "completion_ids")  # passed to every reward function
ENVIRONMENTS = "environments"  # passed only by environments/adapters.py
NOT_PASSED = ("trainer_state", "log_extra", "log_metric")  # passed by TRL, not by Millrace
REMEDY = "return a list with one number per completion, or None where the reward does not apply"


@dataclass(frozen=True, kw_only=True, slots=True)
class RewardFunction:
    name: str
    call: Callable[..., Any]
    takes: frozenset[str] | None  # argument names; None = everything, through **kwargs
    needs: frozenset[str]  # argument names without a default
    is_async: bool
    wants_environments: bool = False  # named in the signature, not through **kwargs

    def __call__(self, *, columns: Mapping[str, Sequence[Any]], **reserved: Sequence[Any]) -> Any:
        """Return the unchecked result of the user's code; an awaitable if it is async. `reserved`
        has a value per completion for each name in RESERVED."""
        arguments = {**columns, **reserved}
        if self.takes is not None:
            arguments = {name: value for name, value in arguments.items() if name in self.takes}
        return self.call(**arguments)

    def check_columns(self, tasks: Sequence[Task], *, has_environments: bool = False) -> None:
        """Raise ConfigError if a task lacks a column that the function requires."""
        for name in sorted(self.needs.intersection(NOT_PASSED)):
            raise ConfigError(
                f"Reward {self.name!r} needs {name!r}, which TRL passes and Millrace does not (see"
                f" docs/how-to/scorers.md); give the parameter a default."
            )
        if ENVIRONMENTS in self.needs and not has_environments:
            raise ConfigError(
                f"Reward {self.name!r} needs 'environments', which only"
                " environment=mr.EnvironmentFactory(...) provides (see"
                " docs/how-to/other-environments.md); give the parameter a default."
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
    except ValueError:  # some callables written in C have no signature
        parameters = [inspect.Parameter("columns", inspect.Parameter.VAR_KEYWORD)]
    for parameter in parameters:
        if parameter.kind is parameter.POSITIONAL_ONLY and parameter.default is parameter.empty:
            raise ConfigError(
                f"Reward {name!r} takes {parameter.name!r} by position only; reward functions are"
                " called with keyword arguments, so remove the '/' from its signature."
            )
    named = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters)
    # Columns that the signature does not show.
    columns: tuple[str, ...] = getattr(function, "needed_columns", ())
    return RewardFunction(
        name=name,
        call=function,
        takes=None if takes_all else frozenset(p.name for p in named),
        wants_environments=any(p.name == ENVIRONMENTS for p in named),
        needs=frozenset([*columns, *(p.name for p in named if p.default is p.empty)]),
        is_async=is_async(function),
    )


def is_async(function: Any) -> bool:
    """True for a coroutine function, and for an object with a coroutine as its __call__."""
    call = getattr(function, "__call__", None)  # noqa: B004 - inspected, not called
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(call)


def check_rewards(value: Any, *, name: str, num_completions: int) -> list[float | None]:
    """Convert the result of a reward function to floats; raises ScoreError if it is invalid."""
    rewards = _to_plain(value)
    if not isinstance(rewards, list | tuple):
        raise ScoreError(f"Reward {name!r} returned {_shown(value)}; {REMEDY}.")
    if len(rewards) != num_completions:
        raise ScoreError(
            f"Reward {name!r} returned {len(rewards)} values for {num_completions} completions;"
            f" {REMEDY}."
        )
    return [_reward(item, name=name, index=index) for index, item in enumerate(rewards)]


def _reward(value: Any, *, name: str, index: int) -> float | None:
    number = _to_plain(value)
    if number is None:
        return None
    if isinstance(number, Real):  # also bool, Fraction and numpy's scalars
        try:
            reward = float(number)
        except OverflowError:  # an int too large for a float
            reward = math.inf
        if math.isfinite(reward):
            return reward
    raise ScoreError(f"Reward {name!r} returned {_shown(value)} for completion {index}; {REMEDY}.")


def _to_plain(value: Any) -> Any:
    """Convert numpy, torch and similar arrays and scalars, without importing those packages."""
    return value.tolist() if hasattr(value, "tolist") else value


def _shown(value: Any) -> str:
    return f"{shortened(repr(value), 60)} ({type(value).__name__})"


SUFFIX = ".pickle"  # distinguishes a pickled function from a reference


def resolve_function(function: str | Callable[..., Any]) -> Callable[..., Any]:
    """Return the callable; raises ConfigError if a reference does not lead to one."""
    if not isinstance(function, str):
        if not callable(function):
            raise ConfigError(
                f"{function!r} is not a function; give one, or a reference like 'module:name'."
            )
        return function
    try:
        resolved = load_reference(function)
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(
            f"{function!r} cannot be imported: {type(error).__name__}: {error}; fix the module."
        ) from error
    if not callable(resolved):
        raise ConfigError(f"{function!r} is {resolved!r}, not a function; check the name.")
    return resolved


def ship_functions(
    functions: Mapping[str, str | Callable[..., Any]], *, folder: Path
) -> dict[str, str]:
    """Return where a worker can load each function, by name. Pickles go to `folder`."""
    locations: dict[str, str] = {}
    for index, (name, function) in enumerate(functions.items()):
        location = function if isinstance(function, str) else _reference_to(function)
        if location is None:
            path = folder / f"function_{index}{SUFFIX}"
            _pickle(function, name=name, path=path)
            location = str(path)
        locations[name] = location
    return locations


def load_function(location: str) -> Callable[..., Any]:
    """Load a function from its location. Called in the worker."""
    if not location.endswith(SUFFIX):
        return resolve_function(location)
    with Path(location).open("rb") as file:
        status = os.fstat(file.fileno())
        if status.st_uid != os.geteuid() or stat.S_IMODE(status.st_mode) & 0o077:
            raise ConfigError(f"{location!r} is not a private file of this user; it is not loaded.")
        try:
            return pickle.load(file)
        except Exception as error:
            # Unpickling imports the user's modules, which may raise anything.
            raise ConfigError(
                f"A function cannot be loaded in a worker process ({type(error).__name__}:"
                f" {error}); everything that it uses must be importable there as well."
            ) from error


def _reference_to(function: Callable[..., Any]) -> str | None:
    """Return the reference by which a fresh process imports this function; None if it cannot."""
    name = getattr(function, "__name__", "")
    module = sys.modules.get(getattr(function, "__module__", None) or "")
    if (
        module is None
        or module.__name__ == "__main__"
        or getattr(module, name, None) is not function
    ):
        return None
    # sys.modules alone does not prove that a fresh process would find the module.
    parent = module.__name__.rpartition(".")[0]
    path = sys.modules[parent].__path__ if parent else None
    if any(finder.find_spec(module.__name__, path) is not None for finder in sys.meta_path):
        return f"{module.__name__}:{name}"
    # The module was loaded from a file that is not on the path, by a "file.py:name" reference.
    file = inspect.getsourcefile(module)
    return f"{Path(file).resolve()}:{name}" if file and file.endswith(".py") else None


def _pickle(function: Any, *, name: str, path: Path) -> None:
    try:
        data = cloudpickle.dumps(function)
    except Exception as error:
        # Pickling runs __reduce__ of every object the function holds, which may raise anything.
        raise ConfigError(
            f"Function {name!r} cannot be sent to a worker process ({type(error).__name__}:"
            f" {error}); define it at the top of a module, without open files, locks or connections"
            " around it."
        ) from error
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    path.parent.chmod(0o700)
    # Always a new file: an existing one may be readable or writable by others.
    path.unlink(missing_ok=True)
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(data)
