"""Makes the engine's end of a transport by its name; "auto" follows the trainer."""

from collections.abc import Callable, Mapping

import torch

from millrace.core.errors import ConfigError, WeightError
from millrace.core.protocols import WeightReceiver
from millrace.core.records import WeightUpdate
from millrace.weights.recv_backend import RecvBackend, StagingReceiver
from millrace.weights.send_backend import Payload
from millrace.weights.transports.collective import CollectiveRecvBackend
from millrace.weights.transports.disk import DiskRecvBackend
from millrace.weights.transports.ipc import IpcRecvBackend
from millrace.weights.transports.shm import ShmRecvBackend


def make_receiver(
    transport: str,
    *,
    expected: Mapping[str, tuple[int, ...]] | None = None,
    dtype: torch.dtype | None = None,
    device: torch.device | None = None,
    payload: Payload = "full",
    timeout_s: float = 60.0,
) -> WeightReceiver:
    """`expected` and `dtype`: shapes of the model's tensors by name, and the type of its
    floating-point tensors; other updates are refused. `device`: where the engine computes."""
    device = device or torch.device("cpu")
    backends: dict[str, Callable[[], RecvBackend]] = {
        "shm": ShmRecvBackend,
        "disk": DiskRecvBackend,
        "collective": lambda: CollectiveRecvBackend(device=device, timeout_s=timeout_s),
        "ipc": lambda: IpcRecvBackend(device=device),
    }

    def make(name: str) -> StagingReceiver:
        keep_base = payload == "delta"
        return StagingReceiver(
            backends[name](), expected=expected, dtype=dtype, device=device, keep_base=keep_base
        )

    if transport == "auto":
        return FollowingReceiver(make, known=frozenset(backends))
    if transport not in backends:
        raise ConfigError(
            f"weights.transport = {transport!r} is not known; use 'auto', 'shm', 'disk',"
            " 'collective' or 'ipc'."
        )
    return make(transport)


class FollowingReceiver:
    """Receives each update by the transport that it names. Used by one thread."""

    def __init__(self, make: Callable[[str], StagingReceiver], *, known: frozenset[str]) -> None:
        self._make = make
        self._known = known
        self._transport: str | None = None
        self._receiver: StagingReceiver | None = None

    def stage(self, update: WeightUpdate) -> Mapping[str, torch.Tensor]:
        if update.transport not in self._known:
            raise WeightError(
                f"Version {update.version} uses the unknown transport {update.transport!r}."
            )
        if self._receiver is None or update.transport != self._transport:
            self.close()
            self._transport, self._receiver = update.transport, self._make(update.transport)
        return self._receiver.stage(update)

    def close(self) -> None:
        if self._receiver is not None:
            self._receiver.close()
            self._receiver = None
