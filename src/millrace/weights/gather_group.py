"""Communication between the ranks of a trainer while they gather weights.

Promise: nothing here mixes with the collectives of a training step, and nothing is unpickled. If a
rank dies, all others raise RankLost at once. A wait for another rank's next step has no limit; when
all ranks are known to take part, the limit is timeout_s.
"""

import contextlib
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from millrace.core.errors import WeightError

_UNLIMITED = timedelta(days=365)


class RankLost(WeightError):
    """A rank of the trainer died, or hung in a collective."""


class GatherGroup:
    """A gloo group of all ranks, which make the same calls in the same order."""

    def __init__(self, *, timeout_s: float) -> None:
        """torch.distributed must be initialized; all of its ranks take part."""
        self.rank, self.count = dist.get_rank(), dist.get_world_size()
        self.is_broken = False  # a rank was lost
        self._timeout = timedelta(seconds=timeout_s)
        with self._detecting_loss():
            self._group: Any = dist.new_group(backend="gloo", timeout=_UNLIMITED)

    def all_max(self, numbers: Sequence[int]) -> list[int]:
        """Elementwise maximum over all ranks; waits for them without limit."""
        most = torch.tensor(numbers, dtype=torch.int64)
        with self._detecting_loss():
            dist.all_reduce(most, op=dist.ReduceOp.MAX, group=self._group)
        return most.tolist()

    def all_gather(self, numbers: Sequence[int]) -> list[list[int]]:
        """The numbers of every rank; all pass equally many."""
        mine = torch.tensor(numbers, dtype=torch.int64)
        theirs = [torch.empty_like(mine) for _ in range(self.count)]
        with self._detecting_loss():
            work = dist.all_gather(theirs, mine, group=self._group, async_op=True)
            assert work is not None
            work.wait(self._timeout)
        return [numbers.tolist() for numbers in theirs]

    def broadcast(self, message: bytes = b"") -> bytes:
        """Send rank 0's message to all others, which wait for it without limit and return it."""
        size = torch.tensor(len(message))
        with self._detecting_loss():
            dist.broadcast(size, src=0, group=self._group)
            content = torch.frombuffer(bytearray(message or int(size)), dtype=torch.uint8)
            dist.broadcast(content, src=0, group=self._group)
        return content.numpy().tobytes()

    def begin_send(self, buffer: torch.Tensor, *, number: int) -> Any:
        """Send to rank 0, which receives under the same number; both finish() the result."""
        with self._detecting_loss():
            return dist.isend(buffer, dst=0, group=self._group, tag=number)

    def begin_receive(self, buffer: torch.Tensor, *, source: int, number: int) -> Any:
        with self._detecting_loss():
            return dist.irecv(buffer, src=source, group=self._group, tag=number)

    def finish(self, work: Any) -> None:
        with self._detecting_loss():
            work.wait(self._timeout)

    @contextlib.contextmanager
    def _detecting_loss(self) -> Iterator[None]:
        if self.is_broken:
            raise RankLost("A rank of the trainer was lost earlier.")
        try:
            yield
        except RuntimeError as error:  # gloo raises nothing else
            self.is_broken = True
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise RankLost(
                "A rank of the trainer died, or hung for weights.timeout_s ="
                f" {self._timeout.total_seconds():g}, while weights were gathered ({reason});"
                " engines keep the weights they have, and the trainer restarts from its last"
                " checkpoint."
            ) from error
