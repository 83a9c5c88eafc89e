"""Shared memory keeps the transport contract, in both of its backings."""

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from transport_contract import DeltaContract, TransportContract
from transport_faults import Damage, FaultContract, location_of, with_location

from millrace.core.records import WeightUpdate
from millrace.weights.backends import PackingSender, StagingReceiver
from millrace.weights.gathering import WeightSender
from millrace.weights.transport import make_receiver as receiver_by_name
from millrace.weights.transports.memory import Segment, ShmSendBackend


class ShmContract(TransportContract):
    transport = "shm"

    @pytest.fixture
    def make_receiver(self) -> Callable[..., StagingReceiver]:
        return lambda **arguments: receiver_by_name("shm", **arguments)

    def corrupt(self, sender: WeightSender, update: WeightUpdate) -> None:
        flip_first_byte(Path(update.location))

    def damaged(
        self, sender: WeightSender, update: WeightUpdate, *, is_delta: bool, how: Damage
    ) -> WeightUpdate:
        location = location_of(update, is_delta=is_delta)
        if how == "corrupted":
            flip_first_byte(Path(location))
            return update
        # The segment itself is sealed against shrinking; a shorter one takes its place.
        self.shorter = Segment(Path(location).stat().st_size - 64, backing="file")
        return with_location(update, self.shorter.location, is_delta=is_delta)


def flip_first_byte(path: Path) -> None:
    with path.open("r+b") as file:
        byte = file.read(1)[0]
        file.seek(0)
        file.write(bytes([byte ^ 1]))


@pytest.mark.skipif(sys.platform != "linux", reason="memfd is Linux's")
class TestShmInAnonymousFiles(DeltaContract, FaultContract, ShmContract):
    @pytest.fixture
    def make_sender(self) -> Callable[..., PackingSender]:
        return lambda dtype, **arguments: PackingSender(
            ShmSendBackend(backing="memfd"), dtype=dtype, **arguments
        )


class TestShmInPrivateFiles(ShmContract):
    @pytest.fixture
    def make_sender(self) -> Callable[..., PackingSender]:
        return lambda dtype: PackingSender(ShmSendBackend(backing="file"), dtype=dtype)
