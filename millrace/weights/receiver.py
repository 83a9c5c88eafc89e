"""The engine's end of a transport, by name."""

from collections.abc import Mapping

from millrace.core.errors import ConfigError
from millrace.core.protocols import WeightReceiver
from millrace.weights.shm import ShmReceiver


def make_receiver(
    transport: str, *, expected: Mapping[str, tuple[int, ...]] | None = None
) -> WeightReceiver:
    """`expected`: names and shapes of the model's tensors; anything else is then refused."""
    if transport != "shm":
        raise ConfigError(f"weights.transport = {transport!r} is not known; use 'shm'.")
    return ShmReceiver(expected=expected)
