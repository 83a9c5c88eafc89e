"""Shared memory keeps the transport contract, in both of its backings."""

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from transport_contract import DeltaContract, TransportContract
from transport_faults import FaultContract

from millrace.core.weight_update import WeightUpdate
from millrace.weights.carriers.shm import ShmOutlet
from millrace.weights.inlet import StagingReceiver
from millrace.weights.outlet import PackingSender
from millrace.weights.publisher import Sender
from millrace.weights.receiver import make_receiver as receiver_by_name


class ShmContract(TransportContract):
    transport = "shm"

    @pytest.fixture
    def make_receiver(self) -> Callable[..., StagingReceiver]:
        return lambda **arguments: receiver_by_name("shm", **arguments)

    def corrupt(self, sender: Sender, update: WeightUpdate) -> None:
        with Path(update.location).open("r+b") as segment:
            byte = segment.read(1)[0]
            segment.seek(0)
            segment.write(bytes([byte ^ 1]))


@pytest.mark.skipif(sys.platform != "linux", reason="memfd is Linux's")
class TestShmInAnonymousFiles(DeltaContract, FaultContract, ShmContract):
    @pytest.fixture
    def make_sender(self) -> Callable[..., PackingSender]:
        return lambda dtype, **arguments: PackingSender(
            ShmOutlet(backing="memfd"), dtype=dtype, **arguments
        )


class TestShmInPrivateFiles(ShmContract):
    @pytest.fixture
    def make_sender(self) -> Callable[..., PackingSender]:
        return lambda dtype: PackingSender(ShmOutlet(backing="file"), dtype=dtype)
