"""What every transport promises, with every kind of payload, when something goes wrong.

Real processes are killed. An engine is a process of transport_receiver.py: it stages an update and
copies it into its own weights. After every fault their hash is that of exactly one published
version.
"""

import dataclasses
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal

import msgspec
import pytest
import torch
from fault_weights import Kind, published_hash, shapes_of, weights_of
from forked_program import start_program
from remote_receiver import RemoteReceiver

from millrace.core.records import WeightUpdate
from millrace.weights.gathering import WeightSender

Damage = Literal["corrupted", "truncated"]
# Each kill costs a new process.
KINDS_KILLED = pytest.mark.parametrize(
    "kind",
    ["full", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("delta", "adapter"))],
    indirect=True,
)


def payload_of(kind: Kind) -> dict[str, str]:
    """The `payload` argument of senders and receivers."""
    return {"payload": "delta"} if kind == "delta" else {}


class FaultContract:
    """Mixed into a TransportContract's subclasses."""

    transport: str
    receiver_settings: ClassVar[dict[str, Any]]
    # (sender, update, is_delta=, how=): damage the published bytes; the update that engines get.
    damaged: Callable[..., WeightUpdate]
    outlives_trainer: ClassVar[bool] = True  # engines may fetch what a dead trainer published

    @pytest.fixture(params=["full", "delta", "adapter"])
    def kind(self, request: pytest.FixtureRequest) -> Kind:
        return request.param

    @pytest.fixture
    def make_sender_for_two(
        self, make_sender: Callable[..., WeightSender]
    ) -> Callable[..., WeightSender]:
        """As make_sender, but two engines receive."""
        return make_sender

    @pytest.fixture(scope="class")
    @classmethod
    def processes(cls, warm_fork_server: None) -> Iterator[list[RemoteReceiver]]:
        """Two engines, shared by the tests of a class."""
        processes = [RemoteReceiver(cls.transport, **cls.receiver_settings) for _ in range(2)]
        for process in processes:
            process.wait_open()
        yield processes
        for process in processes:
            process.close()

    @pytest.fixture
    def engines(self, processes: list[RemoteReceiver], kind: Kind) -> list[RemoteReceiver]:
        for engine in processes:
            self._open(engine, kind)
        return processes

    @pytest.mark.parametrize("how", ["corrupted", "truncated"])
    def test_damaged_bytes_are_noticed_and_the_next_version_arrives(
        self,
        make_sender: Callable[..., WeightSender],
        engines: list[RemoteReceiver],
        kind: Kind,
        how: Damage,
    ):
        sender, engine = make_sender(torch.float32, **payload_of(kind)), engines[0]
        assert engine.hash(sender.publish(1, weights_of(1, kind))) == published_hash(1, kind)
        update = sender.publish(2, weights_of(2, kind))
        assert (update.delta is not None) == (kind == "delta")
        update = self.damaged(sender, update, is_delta=kind == "delta", how=how)
        refusal = engine.hash(update)
        assert " " in refusal, "the engine took damaged bytes"
        assert engine.live_hash() == published_hash(1, kind)
        sender.release(1)
        sender.release(2)
        assert engine.hash(sender.publish(3, weights_of(3, kind))) == published_hash(3, kind)
        sender.close()

    def test_a_manifest_of_another_model_is_refused_by_name(
        self, make_sender: Callable[..., WeightSender], engines: list[RemoteReceiver], kind: Kind
    ):
        sender, engine = make_sender(torch.float32, **payload_of(kind)), engines[0]
        assert engine.hash(sender.publish(1, weights_of(1, kind))) == published_hash(1, kind)
        right = weights_of(2, kind)
        name = next(iter(right))
        for wrong, message in (
            ({**right, "another": torch.ones(2)}, "has 'another', which the model lacks"),
            ({n: t for n, t in right.items() if n != name}, f"lacks '{name}'"),
            ({**right, name: torch.ones(2, 3)}, f"'{name}' as (2, 3); the model's is"),
        ):
            assert message in engine.hash(sender.publish(2, wrong))
            assert engine.live_hash() == published_hash(1, kind)
            sender.release(2)
        other = make_sender_of(make_sender, torch.bfloat16, sender)
        assert "as bfloat16, and the engine computes in float32" in engine.hash(
            other.publish(2, right)
        )
        assert engine.live_hash() == published_hash(1, kind)
        other.close()

    def test_versions_that_race_arrive_whole(
        self,
        make_sender_for_two: Callable[..., WeightSender],
        engines: list[RemoteReceiver],
        kind: Kind,
    ):
        sender = make_sender_for_two(torch.float32, **payload_of(kind))
        updates = [sender.publish(version, weights_of(version, kind)) for version in (1, 2, 3)]
        orders: list[Sequence[int]] = [(0, 1, 2), (2, 1, 2)]
        for engine, order in zip(engines, orders, strict=True):
            for index in order:  # all at once: they are answered one after the other
                engine.begin_stage(updates[index], want="hash")
        for engine, order in zip(engines, orders, strict=True):
            for index in order:
                assert engine.answer() == published_hash(index + 1, kind)
        sender.close()

    @KINDS_KILLED
    def test_engine_killed_during_receive_delays_no_other(
        self,
        make_sender_for_two: Callable[..., WeightSender],
        engines: list[RemoteReceiver],
        kind: Kind,
    ):
        survivor = engines[0]
        victim = RemoteReceiver(self.transport, **self.receiver_settings)
        victim.wait_open()
        self._open(victim, kind)
        sender = make_sender_for_two(torch.float32, **payload_of(kind))
        try:
            for version in (1, 2):
                update = sender.publish(version, weights_of(version, kind))
                for engine in (survivor, victim):
                    engine.begin_stage(update, want="hash")
                if version == 1:
                    assert victim.answer() == published_hash(1, kind)
                else:
                    time.sleep(0.005)  # into its work, or past it: what follows holds either way
                    victim.process.kill()
                assert survivor.answer() == published_hash(version, kind)
                sender.release(version)
            update = sender.publish(3, weights_of(3, kind))
            assert survivor.hash(update) == published_hash(3, kind)
        finally:
            victim.close()
            sender.close()

    @KINDS_KILLED
    def test_a_trainer_killed_during_send_leaves_whole_versions_only(
        self, engines: list[RemoteReceiver], kind: Kind, tmp_path: Path
    ):
        engine, script = engines[0], Path(__file__).with_name("transport_sender.py")
        trainer = start_program(script, self.transport, kind, str(tmp_path / "weights"))
        held = ""
        with trainer:
            assert trainer.stdout is not None
            assert trainer.stdin is not None
            for _ in range(3):
                update = msgspec.json.decode(trainer.stdout.readline(), type=WeightUpdate)
                held = engine.hash(update)
                assert held == published_hash(update.version, kind)
                trainer.stdin.write(f"{update.version}\n".encode())
                trainer.stdin.flush()
            trainer.kill()
            announced = [
                msgspec.json.decode(line, type=WeightUpdate)
                for line in trainer.stdout.read().splitlines()
                if line.endswith(b"}")
            ]
        for update in announced if self.outlives_trainer else ():
            answer = engine.hash(update)
            if " " not in answer:  # a sentence: it died with its trainer
                held = answer
                assert held == published_hash(update.version, kind)
        assert engine.live_hash() == held

    def _open(self, engine: RemoteReceiver, kind: Kind) -> None:
        engine.open(
            **self.receiver_settings,
            **payload_of(kind),
            expected=shapes_of(kind),
            dtype="float32",
        )
        engine.wait_open()


def make_sender_of(
    make: Callable[..., WeightSender], dtype: torch.dtype, beside: WeightSender
) -> WeightSender:
    """Another sender; the first is closed, for where two would be in each other's way."""
    beside.close()
    return make(dtype)


def with_location(update: WeightUpdate, location: str, *, is_delta: bool) -> WeightUpdate:
    """The update with its payload, or its delta, in another place."""
    if not is_delta:
        return dataclasses.replace(update, location=location)
    assert update.delta is not None
    return dataclasses.replace(update, delta=dataclasses.replace(update.delta, location=location))


def location_of(update: WeightUpdate, *, is_delta: bool) -> str:
    if not is_delta:
        return update.location
    assert update.delta is not None
    return update.delta.location
