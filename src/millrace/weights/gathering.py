"""All ranks of a trainer as one sender: sharded weights are gathered while they are sent.

Promise: no rank holds gathered values of more than two buckets. Rank 0 writes each bucket into its
transport's memory; the others send their parts and keep nothing. The published bytes are those that
the same weights without sharding would give.

Every rank makes a GatheringSender, publishes the same versions of the same tensors, and closes it;
only rank 0 has the transport and releases versions. Ranks agree on the version to send: a rank with
an older one drops it (Superseded) and tries again with its next. If a rank is lost, all others
raise RankLost and nothing of that version is published.

Used by one thread of each rank: the publisher's, then the one that closes it.
"""

import contextlib
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from itertools import groupby, islice
from typing import Any, NamedTuple

import msgspec
import torch
import torch.distributed as dist
import xxhash

from millrace.core.errors import WeightError
from millrace.core.records import TensorSpec, WeightUpdate
from millrace.weights import packing
from millrace.weights.send_backend import NoSpace, PackingSender, Superseded
from millrace.weights.shards import Box, ShardPiece, box_of, local_part, plan

_CLOSING = 2**62  # the version that ranks agree on when they close
_UNLIMITED = timedelta(days=365)


class RankLost(WeightError):
    """A rank of the trainer died, or hung in a collective."""


class Ranks:
    """Communication between the ranks of one trainer, in a separate gloo group.

    Nothing here mixes with the collectives of a training step, and nothing is unpickled. If a rank
    dies, all others raise RankLost at once. A wait for another rank's next step has no limit; when
    all ranks are known to take part, timeout_s is the limit. All ranks make the same calls in the
    same order.
    """

    def __init__(self, *, timeout_s: float) -> None:
        """torch.distributed must be initialized; all of its ranks take part."""
        self.rank, self.count = dist.get_rank(), dist.get_world_size()
        self._timeout = timedelta(seconds=timeout_s)
        self._is_broken = False
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
        if self._is_broken:
            raise RankLost("A rank of the trainer was lost earlier.")
        try:
            yield
        except RuntimeError as error:  # gloo raises nothing else
            self._is_broken = True
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise RankLost(
                "A rank of the trainer died, or hung for weights.timeout_s ="
                f" {self._timeout.total_seconds():g}, while weights were gathered ({reason});"
                " engines keep the weights they have. Resume the run from its last checkpoint."
            ) from error


class RankMessage(msgspec.Struct, kw_only=True, frozen=True):
    """A message from rank 0 to the others; one field is set."""

    dtype: str = ""  # of floating-point weights during the transfer
    gathers: bool = False  # rank 0 is ready for their parts
    update: WeightUpdate | None = None  # rank 0 has published this
    no_space: str = ""  # publishing failed, but may succeed later
    failure: str = ""  # publishing failed


class _Transfer(NamedTuple):
    """One rank's part of a bucket, during its transfer."""

    pieces: Sequence[ShardPiece]
    buffer: torch.Tensor  # [num_bytes] uint8
    work: Any


class GatheringSender:
    def __init__(
        self,
        make_sender: Callable[[], PackingSender],
        *,
        bucket_bytes: int = 2**26,
        timeout_s: float = 60.0,
    ) -> None:
        """`make_sender` is called on rank 0 alone. torch.distributed must be initialized."""
        self._bucket_bytes = bucket_bytes
        self._ranks = Ranks(timeout_s=timeout_s)
        self._sender: PackingSender | None = None
        if self._ranks.rank == 0:
            with self._report_failures():
                self._sender = make_sender()
            self.dtype = self._sender.dtype
            self._send_message(RankMessage(dtype=str(self.dtype).removeprefix("torch.")))
        else:
            self.dtype = packing.DTYPES[self._receive_message().dtype]

    @property
    def has_room(self) -> bool:
        """Rank 0 decides; the others publish and wait for it."""
        return self._sender is None or self._sender.has_room

    def publish(self, version: int, tensors: Mapping[str, torch.Tensor]) -> WeightUpdate:
        """Returns the same update on all ranks."""
        specs, _ = packing.lay_out(tensors, dtype=self.dtype)
        self._agree(version, specs)
        if self._sender is not None:
            with self._report_failures():
                update = self._sender.publish(version, tensors, pack=self._gather)
            self._send_message(RankMessage(update=update))
            return update
        message = self._receive_message()
        if message.gathers:
            self._gather(tensors, specs, payload=None)
            message = self._receive_message()
        assert message.update is not None
        return message.update

    def release(self, version: int) -> None:
        if self._sender is not None:
            self._sender.release(version)

    def close(self) -> None:
        """Returns when all ranks have called it; raises RankLost if one has died."""
        try:
            self._agree(_CLOSING, ())
        finally:
            if self._sender is not None:
                self._sender.close()

    def _agree(self, version: int, specs: Sequence[TensorSpec]) -> None:
        """Returns when all ranks publish this version; raises Superseded if one has a newer."""
        layout = xxhash.xxh3_64_intdigest(msgspec.json.encode(specs)) >> 2  # fits into an int64
        while True:
            newest, oldest, *layouts = self._ranks.all_max([version, -version, layout, -layout])
            if version < newest:
                raise Superseded(f"Another rank holds version {newest} already.")
            if -oldest == newest:
                break
        if layouts != [layout, -layout]:
            raise WeightError(
                f"The trainer's ranks publish version {version} with different names, shapes or"
                " types; pass the same parameters in the same order on all ranks."
            )

    def _gather(
        self,
        tensors: Mapping[str, torch.Tensor],
        specs: Sequence[TensorSpec],
        payload: torch.Tensor | None,  # filled by rank 0; None on all others
    ) -> None:
        """Replaces packing.pack() on rank 0."""
        if payload is not None:
            self._send_message(RankMessage(gathers=True))
        here = {name: local_part(tensor).detach() for name, tensor in tensors.items()}
        boxes = self._all_boxes([box_of(name, tensor) for name, tensor in tensors.items()])
        origins = {s.name: b.offset for s, b in zip(specs, boxes[self._ranks.rank], strict=True)}
        own, buckets = plan(specs, boxes, bucket_bytes=self._bucket_bytes)
        views = {} if payload is None else packing.unpack(specs, payload)

        def part(piece: ShardPiece) -> torch.Tensor:
            return piece.box.within(here[piece.spec.name], origin=origins[piece.spec.name])

        in_flight: deque[list[_Transfer]] = deque()
        for number, bucket in enumerate(buckets):
            in_flight.append(list(self._transfers(bucket, part=part, number=number)))
            if len(in_flight) == 2:
                self._finish(in_flight.popleft(), views)
        if payload is not None:  # while the last two are on the wire
            for piece in own:
                piece.box.within(views[piece.spec.name]).copy_(part(piece))
        while in_flight:
            self._finish(in_flight.popleft(), views)

    def _all_boxes(self, boxes: Sequence[Box]) -> list[list[Box]]:
        """The boxes of all ranks, which have as many dimensions as ours."""
        numbers = [number for box in boxes for number in (*box.offset, *box.shape)]
        dims = [len(box.shape) for box in boxes]
        return [
            [Box(offset=tuple(islice(found, n)), shape=tuple(islice(found, n))) for n in dims]
            for found in map(iter, self._ranks.all_gather(numbers))
        ]

    def _transfers(
        self,
        bucket: Sequence[ShardPiece],
        *,
        part: Callable[[ShardPiece], torch.Tensor],
        number: int,
    ) -> Iterator[_Transfer]:
        """Start this rank's send to a bucket; on rank 0, all receives."""
        by_rank = sorted(bucket, key=lambda piece: piece.rank)
        for rank, group in groupby(by_rank, key=lambda piece: piece.rank):
            if self._ranks.rank not in (0, rank):
                continue
            pieces = list(group)
            num_bytes = sum(piece.room_bytes for piece in pieces)
            buffer = torch.empty(num_bytes, dtype=torch.uint8)
            if self._ranks.rank == 0:
                work = self._ranks.begin_receive(buffer, source=rank, number=number)
            else:
                for piece, place in _places(pieces, buffer):
                    place.copy_(part(piece))
                work = self._ranks.begin_send(buffer, number=number)
            yield _Transfer(pieces, buffer, work)

    def _finish(self, transfers: Sequence[_Transfer], views: Mapping[str, torch.Tensor]) -> None:
        for pieces, buffer, work in transfers:
            self._ranks.finish(work)
            if self._ranks.rank == 0:
                for piece, place in _places(pieces, buffer):
                    piece.box.within(views[piece.spec.name]).copy_(place)

    def _send_message(self, message: RankMessage) -> None:
        self._ranks.broadcast(msgspec.json.encode(message))

    def _receive_message(self) -> RankMessage:
        """Raises the error of rank 0, if it failed."""
        message = msgspec.json.decode(self._ranks.broadcast(), type=RankMessage)
        if message.no_space:
            raise NoSpace(message.no_space)
        if message.failure:
            raise WeightError(f"Rank 0 of the trainer could not publish: {message.failure}")
        return message

    @contextlib.contextmanager
    def _report_failures(self) -> Iterator[None]:
        try:
            yield
        except RankLost:
            raise  # the others notice it themselves
        except NoSpace as error:
            self._send_message(RankMessage(no_space=str(error)))
            raise
        except Exception as error:
            self._send_message(RankMessage(failure=str(error) or type(error).__name__))
            raise


def _places(
    pieces: Sequence[ShardPiece], buffer: torch.Tensor
) -> Iterator[tuple[ShardPiece, torch.Tensor]]:
    """Views of each piece in its rank's buffer."""
    at = 0
    for piece in pieces:
        flat = buffer[at : at + piece.num_bytes].view(packing.DTYPES[piece.spec.dtype])
        yield piece, flat.view(piece.box.shape)
        at += piece.room_bytes
