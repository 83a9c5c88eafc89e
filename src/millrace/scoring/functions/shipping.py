"""Ships the user's functions to worker processes: rewards, and the environment.

A function that a fresh process can import travels as a reference, "module:name" or "file.py:name".
Any other function (from a script or notebook, a closure, a lambda, a method) is pickled to a file.

Promise: a worker unpickles only private files of the same user, never bytes from a socket.
A function that cannot be resolved or pickled is a ConfigError before any worker starts.
"""

import inspect
import os
import pickle
import stat
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import cloudpickle

from millrace.core.errors import ConfigError
from millrace.core.plugins import load_reference

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
