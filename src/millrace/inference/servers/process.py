"""A server that an engine process starts for itself.

Promise: the server dies with the engine process, and its worker processes die with it.
"""

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from millrace.cluster.parent_death import with_parent_death_signal
from millrace.cluster.process import describe_exit
from millrace.core.errors import ConfigError

if TYPE_CHECKING:
    from millrace.inference.servers.client import Launch

EXTENSION_FOLDER = Path(__file__).parent / "worker_extension"
_STOP_S = 5.0


class ServerProcess:
    def __init__(self, command: Sequence[str], *, env: Mapping[str, str]) -> None:
        """Start it; the caller waits until it answers."""
        self._process = subprocess.Popen(
            with_parent_death_signal([*command]), env=env, stdin=subprocess.DEVNULL
        )

    @property
    def end(self) -> str | None:
        """How it has ended; None while it runs."""
        code = self._process.poll()
        return None if code is None else describe_exit(code)

    def close(self) -> None:
        self._process.terminate()
        try:
            self._process.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def checked_python(python: str | None, *, module: str, product: str) -> str:
    """The interpreter of engine.options.python, whose environment must have the module."""
    python = python or sys.executable
    find = f"import sys, importlib.util; sys.exit(importlib.util.find_spec({module!r}) is None)"
    try:
        found = subprocess.run(
            [python, "-c", find], capture_output=True, text=True, env=_without_path()
        )
    except OSError as error:
        raise ConfigError(
            f"engine.options.python = {python!r} cannot be run: {error.strerror}; name the"
            f" interpreter of an environment that has {product}."
        ) from None
    if found.returncode:
        raise ConfigError(
            f"The environment of engine.options.python = {python!r} has no {product}; install it"
            " there, or name another interpreter."
        )
    return python


def server_environment(launch: "Launch", **own: str) -> dict[str, str]:
    """Variables of a server that sees only its own GPUs: the named ones, or the first."""
    env = {
        **_without_path(),
        "PYTHONPATH": str(EXTENSION_FOLDER),
        "MILLRACE_SERVER_CHILD": "1",
        **own,
    }
    if launch.device == "cpu":
        return env
    devices = launch.spec.devices or (launch.device,)
    named = [int(device.partition(":")[2]) for device in devices if ":" in device]
    numbers = named or range(launch.spec.config.tp)
    visible = env.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(max(numbers) + 1)))
    entries = visible.split(",")
    return {**env, "CUDA_VISIBLE_DEVICES": ",".join(entries[number] for number in numbers)}


def _without_path() -> dict[str, str]:
    """This environment, without the modules of this interpreter: the server's has others."""
    own = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")
    return {name: value for name, value in os.environ.items() if name not in own}
