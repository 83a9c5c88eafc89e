"""What every weight transport promises. Subclass it and provide its fixtures.

The sender lives in this process, the receiver here or in a process of its own (`remote`). Faults
of whole processes are in transport_faults.py.
"""

import dataclasses
import gc
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any, ClassVar

import psutil
import pytest
import torch
from remote_receiver import RemoteReceiver

from millrace.core.errors import WeightError
from millrace.core.records import WeightUpdate
from millrace.weights.backends import StagingReceiver
from millrace.weights.gathering import WeightSender

Tensors = dict[str, torch.Tensor]


def some_tensors(*, seed: int = 0) -> Tensors:
    """Odd shapes, a scalar, nothing at all, special floats, and numbers that are no weights."""
    draw = torch.Generator().manual_seed(seed)
    special = torch.tensor([0.0, -0.0, float("inf"), float("-inf"), 1e-40, 3.4e38])
    return {
        "embed.weight": torch.randn(17, 5, generator=draw),
        "odd": torch.randn(3, 1, 7, generator=draw),
        "transposed": torch.randn(4, 6, generator=draw).t(),
        "scalar": torch.randn((), generator=draw),
        "empty": torch.empty(0, 3),
        "special": special,
        "counts": torch.randint(0, 2**40, (5,), generator=draw),
        "flags": torch.rand(3, generator=draw) > 0.5,
        "last": torch.randn(1, generator=draw),
    }


def same_bits(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Equal in dtype, shape and every bit; NaN and signed zero included."""
    if left.dtype != right.dtype or left.shape != right.shape:
        return False
    if left.numel() == 0:
        return True
    left, right = (t.detach().contiguous().reshape(-1).view(torch.uint8) for t in (left, right))
    return torch.equal(left, right)


def assert_arrived(received: Mapping[str, torch.Tensor], sent: Tensors, dtype: torch.dtype) -> None:
    assert list(received) == list(sent)
    for name, tensor in sent.items():
        expected = tensor.to(dtype) if tensor.is_floating_point() else tensor
        assert same_bits(received[name], expected), name


class TransportContract:
    transport: str
    receiver_settings: ClassVar[dict[str, Any]] = {}  # of make_receiver, in other processes

    @pytest.fixture(autouse=True)
    def _one_thread(self) -> Iterator[None]:
        num_threads = torch.get_num_threads()
        torch.set_num_threads(1)
        yield
        torch.set_num_threads(num_threads)

    @pytest.fixture(params=[torch.float32, torch.bfloat16, torch.float16], ids=str)
    def dtype(self, request: pytest.FixtureRequest) -> torch.dtype:
        return request.param

    @pytest.fixture
    def make_sender(self) -> Callable[..., WeightSender]:
        """Called with a dtype, and payload="delta" for that."""
        raise NotImplementedError

    def corrupt(self, sender: WeightSender, update: WeightUpdate) -> None:
        """Change one byte of a published payload."""
        raise NotImplementedError

    @pytest.fixture
    def sender(self, make_sender: Callable[..., WeightSender]) -> Iterator[WeightSender]:
        sender = make_sender(torch.float32)
        yield sender
        sender.close()

    @pytest.fixture
    def make_receiver(self) -> Callable[..., StagingReceiver]:
        raise NotImplementedError

    @pytest.fixture
    def receiver(self, make_receiver: Callable[..., StagingReceiver]) -> Iterator[StagingReceiver]:
        receiver = make_receiver()
        yield receiver
        receiver.close()

    @pytest.fixture
    def remote(self, warm_fork_server: None) -> Iterator[RemoteReceiver]:
        remote = RemoteReceiver(self.transport, **self.receiver_settings)
        yield remote
        remote.close()

    def test_every_bit_arrives(
        self,
        make_sender: Callable[..., WeightSender],
        receiver: StagingReceiver,
        dtype: torch.dtype,
    ):
        sender, sent = make_sender(dtype), some_tensors()
        update = sender.publish(1, sent)
        assert (update.version, update.transport) == (1, self.transport)
        assert_arrived(receiver.stage(update), sent, dtype)
        sender.close()

    def test_nan_keeps_its_payload(self, sender: WeightSender, receiver: StagingReceiver):
        nan = torch.tensor([0x7FC01234, -1], dtype=torch.int32).view(torch.float32)
        received = receiver.stage(sender.publish(1, {"nan": nan}))
        assert same_bits(received["nan"], nan)

    def test_parameters_that_require_grad_are_sent(
        self, sender: WeightSender, receiver: StagingReceiver
    ):
        weight = torch.nn.Parameter(torch.ones(3))
        received = receiver.stage(sender.publish(1, {"weight": weight}))
        assert not received["weight"].requires_grad
        assert same_bits(received["weight"], weight)

    def test_later_versions_do_not_disturb_a_held_one(
        self, sender: WeightSender, receiver: StagingReceiver
    ):
        first, second = some_tensors(seed=1), some_tensors(seed=2)
        held = receiver.stage(sender.publish(1, first))
        newer = receiver.stage(sender.publish(2, second))
        assert_arrived(held, first, torch.float32)
        assert_arrived(newer, second, torch.float32)

    def test_a_version_can_be_staged_again(self, sender: WeightSender, receiver: StagingReceiver):
        sent = some_tensors()
        update = sender.publish(1, sent)
        receiver.stage(update)
        assert_arrived(receiver.stage(update), sent, torch.float32)

    def test_a_wrong_checksum_is_refused(self, sender: WeightSender, receiver: StagingReceiver):
        update = sender.publish(1, some_tensors())
        with pytest.raises(WeightError, match="version 1 do not match their checksum"):
            receiver.stage(dataclasses.replace(update, checksum=update.checksum ^ 1))

    def test_a_refused_update_does_not_spoil_the_next(
        self, sender: WeightSender, receiver: StagingReceiver
    ):
        sent = some_tensors()
        update = sender.publish(1, sent)
        with pytest.raises(WeightError):
            receiver.stage(dataclasses.replace(update, checksum=0))
        assert_arrived(receiver.stage(update), sent, torch.float32)

    @pytest.mark.parametrize("difference", [-64, -1, 1, 4096, 2**40])
    def test_a_payload_of_another_size_is_refused(
        self, sender: WeightSender, receiver: StagingReceiver, difference: int
    ):
        update = sender.publish(1, some_tensors())
        with pytest.raises(WeightError):
            receiver.stage(dataclasses.replace(update, num_bytes=update.num_bytes + difference))

    def test_bytes_overwritten_by_a_later_version_are_refused(
        self, sender: WeightSender, receiver: StagingReceiver
    ):
        old = sender.publish(1, {"weight": torch.zeros(100)})
        sender.release(1)
        for version in range(2, 100):
            sender.publish(version, {"weight": torch.full((100,), float(version))})
            sender.release(version)
        with pytest.raises(WeightError):
            receiver.stage(old)

    def test_update_of_a_dead_sender_is_refused(
        self, make_sender: Callable[..., WeightSender], receiver: StagingReceiver
    ):
        sender = make_sender(torch.float32)
        update = sender.publish(1, some_tensors())
        sender.close()
        with pytest.raises(WeightError):
            receiver.stage(update)

    def test_an_update_of_another_transport_is_refused(
        self, sender: WeightSender, receiver: StagingReceiver
    ):
        update = dataclasses.replace(sender.publish(1, some_tensors()), transport="pigeon")
        with pytest.raises(WeightError, match=r"uses the (unknown )?transport 'pigeon'"):
            receiver.stage(update)

    def test_only_the_expected_tensors_are_taken(
        self, sender: WeightSender, make_receiver: Callable[..., StagingReceiver]
    ):
        receiver = make_receiver(expected={"weight": (2, 3), "bias": (3,)})
        weight, bias = torch.ones(2, 3), torch.ones(3)
        receiver.stage(sender.publish(1, {"bias": bias, "weight": weight}))
        for version, wrong in enumerate(
            (
                {"weight": weight},
                {"weight": weight, "bias": bias, "extra": bias},
                {"weight": weight.t(), "bias": bias},
                {"weight": weight, "bias": bias[:2]},
            ),
            start=2,
        ):
            with pytest.raises(WeightError, match=r"'(bias|extra|weight)'"):
                receiver.stage(sender.publish(version, wrong))
            sender.release(version)
        receiver.close()

    def test_another_dtype_than_the_engines_is_refused(
        self,
        make_sender: Callable[..., WeightSender],
        make_receiver: Callable[..., StagingReceiver],
    ):
        sender, weights = make_sender(torch.bfloat16), {"weight": torch.ones(3)}
        receiver = make_receiver(expected={"weight": (3,)}, dtype=torch.float32)
        with pytest.raises(WeightError, match=r"'weight' as bfloat16, and the engine .* float32"):
            receiver.stage(sender.publish(1, weights))
        receiver.close()
        sender.close()

    def test_changed_byte_is_detected_and_the_next_version_arrives(
        self, sender: WeightSender, receiver: StagingReceiver
    ):
        first, second = some_tensors(seed=1), some_tensors(seed=2)
        held = receiver.stage(sender.publish(1, first))
        update = sender.publish(2, second)
        self.corrupt(sender, update)
        with pytest.raises(WeightError, match=r"version 2 do(es)? not match"):
            receiver.stage(update)
        assert_arrived(held, first, torch.float32)
        sender.release(1)
        sender.release(2)
        third = some_tensors(seed=3)
        assert_arrived(receiver.stage(sender.publish(3, third)), third, torch.float32)

    def test_two_versions_race_to_two_receivers(
        self, sender: WeightSender, make_receiver: Callable[..., StagingReceiver]
    ):
        sent = {version: some_tensors(seed=version) for version in (1, 2)}
        updates = {version: sender.publish(version, sent[version]) for version in sent}
        arrived: dict[int, Mapping[str, torch.Tensor]] = {}

        def receive(version: int) -> None:
            receiver = make_receiver()
            arrived[version] = {n: t.clone() for n, t in receiver.stage(updates[version]).items()}
            receiver.close()

        threads = [threading.Thread(target=receive, args=(version,)) for version in sent]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for version in sent:
            assert_arrived(arrived[version], sent[version], torch.float32)

    def test_room_is_bounded_and_comes_back_with_release(self, sender: WeightSender):
        held = []
        while sender.has_room:
            held.append(len(held))
            sender.publish(held[-1], some_tensors())
        assert 2 <= len(held) <= 8
        with pytest.raises(WeightError, match="release one"):
            sender.publish(99, some_tensors())
        sender.release(held[0])
        assert sender.has_room
        sender.publish(99, some_tensors())

    def test_releasing_or_publishing_a_version_twice_is_refused(self, sender: WeightSender):
        sender.publish(1, some_tensors())
        with pytest.raises(WeightError, match="already published"):
            sender.publish(1, some_tensors())
        sender.release(1)
        with pytest.raises(WeightError, match="not published"):
            sender.release(1)

    def test_shapes_may_change_between_versions(
        self, sender: WeightSender, receiver: StagingReceiver
    ):
        for version, size in enumerate([10, 1000, 10, 0, 5]):
            sent = {"weight": torch.full((size,), float(version))}
            assert_arrived(receiver.stage(sender.publish(version, sent)), sent, torch.float32)
            sender.release(version)

    @pytest.mark.slow
    def test_500_versions_to_another_process_keep_memory_and_descriptors_flat(
        self, sender: WeightSender, remote: RemoteReceiver
    ):
        weights = {f"layer.{i}": torch.zeros(100, 100) for i in range(5)}  # 200 kB
        trainer, engine = psutil.Process(), psutil.Process(remote.process.pid)
        gc.collect()  # what earlier tests left open must not be closed in between
        usage: list[tuple[int, int, int, int]] = []
        for version in range(500):
            for weight in weights.values():
                weight.fill_(version)
            arrived = remote.sums(sender.publish(version, weights))
            assert arrived == dict.fromkeys(weights, version * 10_000.0)
            if version >= 2:
                sender.release(version - 2)
            usage.append(
                (
                    trainer.num_fds(),
                    engine.num_fds(),
                    trainer.memory_info().rss,
                    engine.memory_info().rss,
                )
            )
        warm, last = usage[20], usage[-1]
        assert last[0] - warm[0] < 5, "descriptors of the trainer; other tests share its process"
        assert last[1] <= warm[1], "descriptors of the engine"
        assert last[2] - warm[2] < 1e7  # bytes; leaking every tenth version would make it
        assert last[3] - warm[3] < 1e7


class DeltaContract:
    """The same versions as what changed; mixed into a TransportContract's subclasses."""

    transport: str

    @pytest.fixture
    def delta_sender(self, make_sender: Callable[..., WeightSender]) -> Iterator[WeightSender]:
        sender = make_sender(torch.bfloat16, payload="delta")
        yield sender
        sender.close()

    @pytest.fixture
    def delta_receiver(
        self, make_receiver: Callable[..., StagingReceiver]
    ) -> Iterator[StagingReceiver]:
        receiver = make_receiver(payload="delta")
        yield receiver
        receiver.close()

    def test_a_delta_arrives_bit_for_bit_and_is_small(
        self, delta_sender: WeightSender, delta_receiver: StagingReceiver
    ):
        weights = {"weight": torch.randn(5000), "count": torch.arange(7), "bias": torch.randn(3)}
        first = delta_sender.publish(1, weights)
        assert first.delta is None
        assert_arrived(delta_receiver.stage(first), weights, torch.bfloat16)
        before = first
        for version in range(2, 6):
            weights["weight"][version::700] += 1
            weights["count"][0] = -version
            update = delta_sender.publish(version, weights)
            assert update.delta is not None
            assert update.delta.base == before.checksum
            before = update
            assert update.delta.num_bytes < update.num_bytes / 20
            held = delta_receiver.stage(update)
            assert_arrived(held, weights, torch.bfloat16)
            delta_sender.release(version - 1)

    def test_a_receiver_that_holds_another_base_gets_the_full_payload(
        self, delta_sender: WeightSender, delta_receiver: StagingReceiver
    ):
        weights = {"weight": torch.zeros(1000)}
        delta_receiver.stage(delta_sender.publish(1, weights))
        weights["weight"][1] = 1
        superseded = delta_sender.publish(2, weights)  # never staged
        assert superseded.delta is not None
        weights["weight"][2] = 2
        update = delta_sender.publish(3, weights)
        assert update.delta is not None
        assert update.delta.base == superseded.checksum
        assert_arrived(delta_receiver.stage(update), weights, torch.bfloat16)

    def test_no_delta_is_made_if_it_is_not_smaller(
        self, delta_sender: WeightSender, delta_receiver: StagingReceiver
    ):
        delta_receiver.stage(delta_sender.publish(1, {"weight": torch.zeros(1000)}))
        weights = {"weight": torch.ones(1000)}
        update = delta_sender.publish(2, weights)
        assert update.delta is None
        assert_arrived(delta_receiver.stage(update), weights, torch.bfloat16)

    def test_wrong_delta_is_refused_and_affects_no_other_version(
        self, delta_sender: WeightSender, delta_receiver: StagingReceiver
    ):
        weights = {"weight": torch.zeros(1000)}
        delta_receiver.stage(delta_sender.publish(1, weights))
        weights["weight"][1] = 1
        update = delta_sender.publish(2, weights)
        with pytest.raises(WeightError, match="version 2 do not match"):
            delta_receiver.stage(dataclasses.replace(update, checksum=update.checksum ^ 1))
        assert_arrived(delta_receiver.stage(update), weights, torch.bfloat16)

    def test_a_changed_model_begins_with_a_full_payload(
        self, delta_sender: WeightSender, delta_receiver: StagingReceiver
    ):
        for version, size in enumerate((1000, 2000, 1000)):
            weights = {"weight": torch.zeros(size)}
            update = delta_sender.publish(version, weights)
            assert update.delta is None
            assert_arrived(delta_receiver.stage(update), weights, torch.bfloat16)
