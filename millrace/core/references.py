"""User code by name: "package.module:Name", or "path/to/file.py:Name"."""

import hashlib
import importlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from millrace.core.errors import ConfigError


def load_reference(reference: str) -> Any:
    """Import what a reference names. A relative file starts from the working directory."""
    module_name, separator, attribute = reference.rpartition(":")
    if not separator or not module_name or not attribute:
        raise ConfigError(
            f"{reference!r} is not a reference; write 'package.module:Name' or 'file.py:Name'."
        )
    module = _load_module(module_name)
    try:
        return getattr(module, attribute)
    except AttributeError:
        raise ConfigError(
            f"{module_name!r} has no {attribute!r}; check the name after the colon."
        ) from None


def _load_module(name: str) -> ModuleType:
    if not name.endswith(".py"):
        try:
            return importlib.import_module(name)
        except ModuleNotFoundError as error:
            if error.name is None or not name.startswith(error.name):
                raise  # the user's module exists, and one of its own imports is missing
            raise ConfigError(
                f"No module named {name!r}; is it installed or on PYTHONPATH?"
            ) from None
    path = Path(name).resolve()
    if not path.is_file():
        raise ConfigError(f"No file {str(path)!r}; in a TOML, files are named from its own folder.")
    # The name must be the same in every process, and free of clashes between folders.
    module_name = f"millrace_user_{path.stem}_{hashlib.sha256(str(path).encode()).hexdigest()[:8]}"
    if module_name in sys.modules:
        return sys.modules[module_name]
    spec = importlib.util.spec_from_file_location(module_name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[module_name]  # half a module must not be found by the next one who asks
        raise
    return module
