"""Shared memory keeps the transport contract, in both of its backings."""

import sys
from collections.abc import Callable

import pytest
import torch
from transport_contract import TransportContract

from millrace.weights.publisher import make_sender as sender_by_name
from millrace.weights.receiver import make_receiver as receiver_by_name
from millrace.weights.shm import ShmReceiver, ShmSender


class ShmContract(TransportContract):
    transport = "shm"

    @pytest.fixture
    def make_receiver(self) -> Callable[..., ShmReceiver]:
        return ShmReceiver


@pytest.mark.skipif(sys.platform != "linux", reason="memfd is Linux's")
class TestShmInAnonymousFiles(ShmContract):
    @pytest.fixture
    def make_sender(self) -> Callable[[torch.dtype], ShmSender]:
        return lambda dtype: ShmSender(dtype=dtype, backing="memfd")


class TestShmInPrivateFiles(ShmContract):
    @pytest.fixture
    def make_sender(self) -> Callable[[torch.dtype], ShmSender]:
        return lambda dtype: ShmSender(dtype=dtype, backing="file")


def test_shm_is_what_its_name_gives():
    sender = sender_by_name("shm", dtype=torch.bfloat16)
    assert isinstance(sender, ShmSender)
    assert sender.dtype is torch.bfloat16
    assert isinstance(receiver_by_name("shm"), ShmReceiver)
