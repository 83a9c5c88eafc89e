"""A receiver in its own process, as the tests use it."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import torch
from forked_program import start_program

from millrace.core.errors import WeightError
from millrace.core.records import WeightUpdate
from millrace.weights.packing import DTYPES


class RemoteReceiver:
    """tests/contracts/transport_receiver.py; stage() as StagingReceiver has it."""

    def __init__(self, transport: str, **arguments: Any) -> None:
        self.process = start_program(Path(__file__).with_name("transport_receiver.py"))
        self.transport = transport
        self._is_opening = False
        self.open(**arguments)

    def open(self, **arguments: Any) -> None:
        """Replace the receiver by a new one with these arguments of make_receiver."""
        assert not self._is_opening
        self._send({"open": {"transport": self.transport, **arguments}})
        self._is_opening = True  # answered before the next answer: several start side by side

    def wait_open(self) -> None:
        assert self.process.stdout is not None
        if self._is_opening:
            self._is_opening = False
            assert msgspec.json.decode(self.process.stdout.readline()) is None

    def begin_stage(self, update: WeightUpdate, *, want: str = "sums") -> None:
        self._send({"stage": update, "want": want})

    def answer(self) -> Any:
        """What the receiver made of it; or an error's sentence."""
        assert self.process.stdout is not None
        self.wait_open()
        return msgspec.json.decode(self.process.stdout.readline())

    def sums(self, update: WeightUpdate) -> Any:
        self.begin_stage(update)
        return self.answer()

    def hash(self, update: WeightUpdate) -> str:
        """Of the weights it has after copying this in; or why it was refused, in a sentence."""
        self.begin_stage(update, want="hash")
        return self.answer()

    def live_hash(self) -> str:
        """Of the weights it has."""
        self._send({"live": True})
        return self.answer()

    def stage(self, update: WeightUpdate) -> Mapping[str, torch.Tensor]:
        self.begin_stage(update, want="bits")
        answer = self.answer()
        if isinstance(answer, str):
            raise WeightError(answer)
        return {name: _tensor(*bits) for name, bits in answer.items()}

    def close(self) -> None:
        self.process.kill()
        self.process.communicate()

    def _send(self, command: dict[str, Any]) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(msgspec.json.encode(command) + b"\n")
        self.process.stdin.flush()


def _tensor(dtype: str, shape: list[int], bits: str) -> torch.Tensor:
    flat = torch.empty(0, dtype=torch.uint8)
    if bits:  # frombuffer takes no empty range
        flat = torch.frombuffer(bytearray.fromhex(bits), dtype=torch.uint8)
    return flat.view(DTYPES[dtype]).view(shape)
