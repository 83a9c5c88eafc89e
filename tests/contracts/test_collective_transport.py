"""The collective transport keeps the transport contract over gloo."""

import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from fault_weights import hash_of, published_hash, weights_of
from remote_receiver import RemoteReceiver
from transport_contract import DeltaContract, TransportContract, assert_arrived, some_tensors
from transport_faults import Damage, FaultContract

from millrace.core.errors import WeightError
from millrace.core.records import WeightUpdate
from millrace.weights.backends import PackingSender, StagingReceiver
from millrace.weights.gathering import WeightSender
from millrace.weights.transport import make_receiver as receiver_by_name
from millrace.weights.transport import make_sender as sender_by_name
from millrace.weights.transports.collective import CollectiveSendBackend


def new_sender(dtype: torch.dtype, **arguments: Any) -> PackingSender:
    arguments = {"timeout_s": 10.0, "bucket_bytes": 2**16, **arguments}
    return sender_by_name("collective", dtype=dtype, **arguments)


def new_receiver(**arguments: Any) -> StagingReceiver:
    return receiver_by_name("collective", timeout_s=10.0, **arguments)


class TestCollective(DeltaContract, FaultContract, TransportContract):
    transport = "collective"

    @pytest.fixture
    def make_sender(self) -> Callable[..., WeightSender]:
        return new_sender

    @pytest.fixture
    def make_sender_for_two(self) -> Callable[..., WeightSender]:
        return lambda dtype, **arguments: new_sender(dtype, num_engines=2, **arguments)

    @pytest.fixture
    def make_receiver(self) -> Callable[..., StagingReceiver]:
        return new_receiver

    def corrupt(self, sender: WeightSender, update: WeightUpdate) -> None:
        assert isinstance(sender, PackingSender)
        sender._held[update.version].payload.flat[0] ^= 1  # damaged in transit

    def damaged(
        self, sender: WeightSender, update: WeightUpdate, *, is_delta: bool, how: Damage
    ) -> WeightUpdate:
        assert isinstance(sender, PackingSender)
        assert isinstance(sender.backend, CollectiveSendBackend)
        blobs = sender.backend._offers[update.version]
        base = update.delta.base if is_delta and update.delta is not None else None
        if how == "corrupted":
            blobs[base][0] ^= 1
        else:
            blobs[base] = blobs[base][: -(2**16)]
        return update


@pytest.fixture
def pair() -> Iterator[WeightSender]:
    sender = new_sender(torch.float32, num_engines=2, bucket_bytes=100)
    yield sender
    sender.close()


def together(update: WeightUpdate, *receivers: StagingReceiver) -> list[Any]:
    """What each receiver staged, or its error; all at the same time."""
    outcomes: list[Any] = [None] * len(receivers)

    def receive(index: int) -> None:
        try:
            outcomes[index] = receivers[index].stage(update)
        except WeightError as error:
            outcomes[index] = error

    threads = [threading.Thread(target=receive, args=(i,)) for i in range(len(receivers))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return outcomes


def test_two_engines_receive_in_one_broadcast_and_the_group_is_kept(pair: WeightSender):
    receivers = [new_receiver(), new_receiver()]
    groups = set()
    for version in range(3):
        sent = some_tensors(seed=version)
        for received in together(pair.publish(version, sent), *receivers):
            assert_arrived(received, sent, torch.float32)
        groups.add(pair.backend._group_number)  # type: ignore[attr-defined]
        pair.release(version)
    assert groups == {1}
    for receiver in receivers:
        receiver.close()


def test_late_engine_joins_a_group_with_the_others(pair: WeightSender):
    first, second = new_receiver(), new_receiver()
    sent = some_tensors()
    assert_arrived(first.stage(pair.publish(1, sent)), sent, torch.float32)
    for received in together(pair.publish(2, sent), first, second):
        assert_arrived(received, sent, torch.float32)
    first.close()
    assert_arrived(second.stage(pair.publish(3, sent)), sent, torch.float32)
    second.close()


def test_evaluators_and_self_teachers_take_other_versions_in_groups_of_their_own(
    pair: WeightSender,
):
    engines = [new_receiver(), new_receiver()]
    evaluator, teacher = new_receiver(role="evaluator"), new_receiver(role="my_teacher")
    for version in range(4):
        sent, other = some_tensors(seed=version), teacher if version % 2 else evaluator
        for received in together(pair.publish(version, sent), *engines, other):
            assert_arrived(received, sent, torch.float32)
        pair.release(version)
    assert pair.backend._group_number == 3  # type: ignore[attr-defined]
    for receiver in (*engines, evaluator, teacher):
        receiver.close()


def test_delta_is_sent_only_if_every_engine_holds_its_base():
    sender = new_sender(torch.float32, num_engines=2, payload="delta")
    old, new = new_receiver(payload="delta"), new_receiver(payload="delta")
    weights = {"weight": torch.zeros(1000)}
    old.stage(sender.publish(1, weights))
    for version in (2, 3):  # full for both, because one holds nothing; then a delta for both
        weights["weight"][version] = version
        for received in together(sender.publish(version, weights), old, new):
            assert_arrived(received, weights, torch.float32)
    for member in (old, new, sender):
        member.close()


@pytest.mark.slow
def test_hanging_engine_times_out_and_the_others_get_the_version():
    sender = new_sender(torch.float32, num_engines=2, timeout_s=1.0)
    survivor = receiver_by_name("collective", timeout_s=1.0)
    hanging = RemoteReceiver("collective", timeout_s=1.0)
    try:
        for version in (1, 2):
            update = sender.publish(version, weights_of(version))
            hanging.begin_stage(update, want="hash")
            if version == 2:
                hanging.process.send_signal(signal.SIGSTOP)
            [received] = together(update, survivor)
            assert hash_of(received) == published_hash(version, "full")
            if version == 1:
                assert hanging.answer() == published_hash(1, "full")
    finally:
        hanging.close()
        survivor.close()
        sender.close()


def test_engine_without_the_token_is_refused(pair: WeightSender):
    update = pair.publish(1, some_tensors())
    forged = update.location.replace('"token":"', '"token":"0')
    receiver = new_receiver()
    with pytest.raises(WeightError, match="did not arrive"):
        receiver.stage(type(update)(**{**_fields(update), "location": forged}))
    receiver.close()


def _fields(update: WeightUpdate) -> dict[str, Any]:
    return {name: getattr(update, name) for name in update.__dataclass_fields__}


def test_address_of_another_host_is_refused():
    with pytest.raises(WeightError, match=r"Cannot listen for engines at '192\.0\.2\.1'"):
        new_sender(torch.float32, address="192.0.2.1")
