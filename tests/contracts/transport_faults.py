"""What every transport promises when a process is killed. Real processes, real kills."""

import contextlib
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import msgspec
import pytest
import torch
from remote_receiver import RemoteReceiver

from millrace.core.errors import WeightError
from millrace.core.protocols import WeightReceiver
from millrace.core.weight_update import WeightUpdate
from millrace.weights.publisher import Sender

NUM_LAYERS, LAYER_VALUES = 8, 2**20  # 32 MiB of float32


def weights_of(version: int) -> dict[str, torch.Tensor]:
    return {f"layer.{i}": torch.full((LAYER_VALUES,), float(version)) for i in range(NUM_LAYERS)}


def sums_of(version: int) -> dict[str, float]:
    return dict.fromkeys(weights_of(version), float(version * LAYER_VALUES))


class FaultContract:
    """Mixed into a TransportContract's subclasses."""

    transport: str
    receiver_settings: ClassVar[dict[str, Any]]

    @pytest.fixture
    def sender_for_two(self, make_sender: Callable[..., Sender]) -> Any:
        sender = make_sender(torch.float32)
        yield sender
        sender.close()

    def test_a_receiver_killed_during_receive_holds_up_nobody(self, sender_for_two: Sender):
        receivers = [RemoteReceiver(self.transport, **self.receiver_settings) for _ in range(2)]
        survivor, victim = receivers
        try:
            update = sender_for_two.publish(1, weights_of(1))
            for receiver in receivers:
                receiver.begin_stage(update)
            assert [receiver.answer() for receiver in receivers] == [sums_of(1)] * 2
            sender_for_two.release(1)
            update = sender_for_two.publish(2, weights_of(2))
            for receiver in receivers:
                receiver.begin_stage(update)
            time.sleep(0.01)  # into its work, or past it: what follows holds in either case
            victim.process.kill()
            assert survivor.answer() == sums_of(2)
            sender_for_two.release(2)
            assert survivor.sums(sender_for_two.publish(3, weights_of(3))) == sums_of(3)
        finally:
            for receiver in receivers:
                receiver.close()

    @pytest.mark.parametrize("num_staged", [1, 4])
    def test_a_sender_killed_during_send_leaves_whole_versions_only(
        self,
        make_receiver: Callable[..., WeightReceiver],
        tmp_path: Path,
        num_staged: int,
    ):
        script = Path(__file__).with_name("transport_sender.py")
        trainer = subprocess.Popen(
            [sys.executable, str(script), self.transport, str(tmp_path / "weights")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={"PYTHONPATH": ":".join(sys.path)},
        )
        receiver, held = make_receiver(), -1
        with trainer:
            assert trainer.stdout is not None
            assert trainer.stdin is not None
            for _ in range(num_staged):
                update = msgspec.json.decode(trainer.stdout.readline(), type=WeightUpdate)
                held = self._stage(receiver, update)
                trainer.stdin.write(f"{update.version}\n".encode())
                trainer.stdin.flush()
            trainer.kill()
            announced = [
                msgspec.json.decode(line, type=WeightUpdate)
                for line in trainer.stdout.read().splitlines()
                if line.endswith(b"}")
            ]
        for update in announced:
            with contextlib.suppress(WeightError):  # it may have died with its trainer
                held = self._stage(receiver, update)
        assert held >= num_staged - 1
        receiver.close()

    def _stage(self, receiver: WeightReceiver, update: WeightUpdate) -> int:
        """Stage, and see that it is one version and nothing else."""
        for tensor in receiver.stage(update).values():
            assert torch.all(tensor == update.version)
        return update.version
