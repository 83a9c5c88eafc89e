"""CUDA IPC keeps the transport contract. The receivers are in another process: a handle cannot be
opened where it was made."""

from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import pytest
import torch
from remote_receiver import RemoteReceiver
from transport_contract import DeltaContract, TransportContract
from transport_faults import Damage, FaultContract, with_location

from millrace.core.errors import WeightError
from millrace.core.records import WeightUpdate
from millrace.weights.backends import PackingSender
from millrace.weights.gathering import WeightSender
from millrace.weights.transport import make_sender as sender_by_name
from millrace.weights.transports.memory import SharedMemory


class CudaSender:
    """Publishes what it is given from a GPU."""

    def __init__(self, dtype: torch.dtype, **arguments: Any) -> None:
        self.dtype = dtype
        self.inner: PackingSender = sender_by_name("ipc", dtype=dtype, **arguments)

    @property
    def has_room(self) -> bool:
        return self.inner.has_room

    def publish(self, version: int, tensors: Mapping[str, torch.Tensor]) -> WeightUpdate:
        on_gpu = {name: tensor.detach().cuda() for name, tensor in tensors.items()}
        return self.inner.publish(version, on_gpu)

    def release(self, version: int) -> None:
        self.inner.release(version)

    def close(self) -> None:
        self.inner.close()


class RemoteProxy:
    """A receiver in a process that outlives it, for one test after the other."""

    def __init__(self, remote: RemoteReceiver, **arguments: Any) -> None:
        if "dtype" in arguments:
            arguments["dtype"] = str(arguments["dtype"]).removeprefix("torch.")
        self._remote = remote
        remote.open(device="cuda", **arguments)
        remote.wait_open()

    def stage(self, update: WeightUpdate) -> Mapping[str, torch.Tensor]:
        return self._remote.stage(update)

    def close(self) -> None:
        pass


@pytest.mark.gpu
class TestIpc(DeltaContract, FaultContract, TransportContract):
    transport = "ipc"
    receiver_settings: ClassVar[dict[str, Any]] = {"device": "cuda"}
    outlives_trainer = False  # what a dead process had on a GPU is gone with it

    @pytest.fixture
    def make_sender(self) -> Callable[..., CudaSender]:
        return CudaSender

    @pytest.fixture
    def make_receiver(self, processes: list[RemoteReceiver]) -> Callable[..., RemoteProxy]:
        spare = [*processes]  # no test needs more than two at a time
        return lambda **arguments: RemoteProxy(spare.pop(), **arguments)

    def corrupt(self, sender: WeightSender, update: WeightUpdate) -> None:
        assert isinstance(sender, CudaSender)
        sender.inner._held[update.version].payload.flat[0] ^= 1
        torch.cuda.synchronize()

    def damaged(
        self, sender: WeightSender, update: WeightUpdate, *, is_delta: bool, how: Damage
    ) -> WeightUpdate:
        assert isinstance(sender, CudaSender)
        slot = sender.inner._held[update.version]
        memory = slot.delta if is_delta else slot.payload
        assert memory is not None
        if how == "corrupted":
            memory.flat[0] ^= 1
            torch.cuda.synchronize()
            return update
        self.shorter = SharedMemory(len(memory.flat) - 64, device=memory.flat.device)
        return with_location(update, self.shorter.location, is_delta=is_delta)


@pytest.mark.gpu
def test_weights_on_the_host_are_refused():
    sender = sender_by_name("ipc", dtype=torch.float32)
    with pytest.raises(WeightError, match="the trainer computes on 'cpu'"):
        sender.publish(1, {"weight": torch.ones(3)})
    sender.close()
