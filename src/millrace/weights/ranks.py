"""How the ranks of one trainer talk about weights: a gloo group of their own.

Promise: nothing here mixes with the collectives of a training step, and nothing is unpickled. A
rank that dies is a RankLost on all others at once. Where ranks wait for each other's next step they
wait without limit; where all are known to be there, timeout_s is the limit.

Used by one thread of each rank. All ranks make the same calls in the same order.
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
    """A rank of the trainer died, or hung while all were needed."""


class Ranks:
    def __init__(self, *, timeout_s: float) -> None:
        """torch.distributed must be initialized; every rank of it takes part."""
        self.rank, self.count = dist.get_rank(), dist.get_world_size()
        self._timeout = timedelta(seconds=timeout_s)
        self._is_broken = False
        with self._noticing_loss():
            group = dist.new_group(backend="gloo", timeout=_UNLIMITED)
        assert isinstance(group, dist.ProcessGroup)
        self._group = group

    def largest(self, numbers: Sequence[int]) -> list[int]:
        """Place by place, over all ranks; waits for them without limit."""
        most = torch.tensor(numbers, dtype=torch.int64)
        with self._noticing_loss():
            dist.all_reduce(most, op=dist.ReduceOp.MAX, group=self._group)
        return most.tolist()

    def everyones(self, numbers: Sequence[int]) -> list[list[int]]:
        """What each rank gave, all the same number of numbers."""
        mine = torch.tensor(numbers, dtype=torch.int64)
        theirs = [torch.empty_like(mine) for _ in range(self.count)]
        with self._noticing_loss():
            work = dist.all_gather(theirs, mine, group=self._group, async_op=True)
            assert work is not None
            work.wait(self._timeout)
        return [numbers.tolist() for numbers in theirs]

    def say(self, line: bytes) -> None:
        """Rank 0's word to all others, who hear() it."""
        content = torch.frombuffer(bytearray(line), dtype=torch.uint8)
        with self._noticing_loss():
            dist.broadcast(torch.tensor(len(content)), src=0, group=self._group)
            dist.broadcast(content, src=0, group=self._group)

    def hear(self) -> bytes:
        """Waits for it without limit."""
        size = torch.tensor(0)
        with self._noticing_loss():
            dist.broadcast(size, src=0, group=self._group)
            content = torch.empty(int(size), dtype=torch.uint8)
            dist.broadcast(content, src=0, group=self._group)
        return content.numpy().tobytes()

    def begin_send(self, buffer: torch.Tensor, *, number: int) -> Any:
        """To rank 0, which receives the same number; both finish() what this returns."""
        with self._noticing_loss():
            return dist.isend(buffer, dst=0, group=self._group, tag=number)

    def begin_receive(self, buffer: torch.Tensor, *, source: int, number: int) -> Any:
        with self._noticing_loss():
            return dist.irecv(buffer, src=source, group=self._group, tag=number)

    def finish(self, work: Any) -> None:
        with self._noticing_loss():
            work.wait(self._timeout)

    @contextlib.contextmanager
    def _noticing_loss(self) -> Iterator[None]:
        if self._is_broken:
            raise RankLost("A rank of the trainer was lost before.")
        try:
            yield
        except RuntimeError as error:  # all that gloo raises
            self._is_broken = True
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise RankLost(
                "A rank of the trainer died, or hung for weights.timeout_s ="
                f" {self._timeout.total_seconds():g}, while weights were gathered ({reason});"
                " engines keep the weights they have: resume the run from its last checkpoint."
            ) from error
