"""How a user's functions reach the scorer processes.

What a fresh process can import travels as a reference, "module:name" or "file.py:name". The rest
(functions of a script or notebook, closures, lambdas, methods) is pickled into a file.

Promise: nothing is unpickled but a private file of the same user, and never from a socket. What
cannot be resolved or pickled is a ConfigError before any worker starts.
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

SUFFIX = ".pickle"  # tells a file of ours from a reference


def resolve_function(function: str | Callable[..., Any]) -> Callable[..., Any]:
    """The callable itself; raises ConfigError if a reference does not lead to one."""
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
            f"{function!r} cannot be imported: {type(error).__name__}: {error}; mend the module."
        ) from error
    if not callable(resolved):
        raise ConfigError(f"{function!r} is {resolved!r}, not a function; check the name.")
    return resolved


def hand_over(functions: Mapping[str, str | Callable[..., Any]], *, folder: Path) -> dict[str, str]:
    """Where a scorer process finds each function, by name. `folder` is made if a file is needed."""
    locations: dict[str, str] = {}
    for index, (name, function) in enumerate(functions.items()):
        reference = function if isinstance(function, str) else _reference_to(function)
        if reference is None:
            reference = str(_pickle(function, name=name, path=folder / f"reward_{index}{SUFFIX}"))
        locations[name] = reference
    return locations


def load_function(location: str) -> Callable[..., Any]:
    """The function at a location that hand_over gave; called in the scorer process."""
    if not location.endswith(SUFFIX):
        return resolve_function(location)
    with Path(location).open("rb") as file:
        status = os.fstat(file.fileno())
        if status.st_uid != os.geteuid() or stat.S_IMODE(status.st_mode) & 0o077:
            raise ConfigError(f"{location!r} is not a private file of this user; it is not loaded.")
        try:
            return pickle.load(file)
        except Exception as error:
            # Unpickling imports the user's modules, and runs what they run when imported.
            raise ConfigError(
                f"A reward cannot be loaded in a scorer process ({type(error).__name__}: {error});"
                " whatever it uses must be importable there, too."
            ) from error


def _reference_to(function: Callable[..., Any]) -> str | None:
    """How a fresh process can import this very function; None if it cannot."""
    name = getattr(function, "__name__", "")
    module = sys.modules.get(getattr(function, "__module__", None) or "")
    if (
        module is None
        or module.__name__ == "__main__"
        or getattr(module, name, None) is not function
    ):
        return None
    if _is_findable(module.__name__):
        return f"{module.__name__}:{name}"
    # Loaded from a file that is not on the path, as "file.py:name" references are.
    file = inspect.getsourcefile(module)
    return f"{Path(file).resolve()}:{name}" if file and file.endswith(".py") else None


def _is_findable(module: str) -> bool:
    """Whether a fresh process would find the module; that it is loaded here proves nothing."""
    parent = module.rpartition(".")[0]
    path = sys.modules[parent].__path__ if parent else None
    return any(finder.find_spec(module, path) is not None for finder in sys.meta_path)


def _pickle(function: Any, *, name: str, path: Path) -> Path:
    try:
        data = cloudpickle.dumps(function)
    except Exception as error:
        # Pickling runs the __reduce__ of whatever the function holds: any exception can come out.
        raise ConfigError(
            f"Reward {name!r} cannot be sent to a scorer process ({type(error).__name__}: {error});"
            " define it at the top of a module, without open files, locks or connections around it."
        ) from error
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    path.parent.chmod(0o700)
    # A fresh file: one that is there already may be readable, or writable, by others.
    path.unlink(missing_ok=True)
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(data)
    return path
