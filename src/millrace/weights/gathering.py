"""All ranks of a trainer as one sender: sharded weights are gathered while they are sent.

Promise: no rank holds gathered values of more than two buckets. Rank 0 writes each bucket into its
transport's memory. The published bytes are those that the same weights without sharding would give.

Every rank makes a GatheringSender and publishes the same versions of the same tensors; only rank 0
has the transport and releases versions. A rank with an older version than another drops it
(Superseded) and tries again with its next. If a rank is lost, all others raise RankLost at once and
nothing of that version is published. A wait for another rank's next step has no limit; when all
ranks are known to take part, the limit is timeout_s. Nothing here mixes with the collectives of a
training step, and nothing is unpickled.

With payload = "delta", each of the other ranks keeps what it sent last, and sends the words that
changed since then, unless that is not smaller. Rank 0 has the rest in the base of its own delta.

Used by one thread of each rank: the publisher's, then the one that closes it.
"""

import contextlib
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from functools import partial
from itertools import groupby
from operator import attrgetter
from typing import Any, NamedTuple

import msgspec
import torch
import torch.distributed as dist
import xxhash

from millrace.core.errors import WeightError
from millrace.core.records import Delta, TensorSpec, WeightUpdate
from millrace.models.sharding import local_part
from millrace.weights import packing
from millrace.weights.backends import NoSpace, PackingSender, Payload, PayloadSlot, Superseded
from millrace.weights.shards import ShardPiece, box_of, boxes_of, places_of, plan, size_of

_CLOSING = 2**62  # the version that ranks agree on when they close
_UNLIMITED = timedelta(days=365)
_WHOLE = -1  # instead of the number of changed words: the bucket is sent whole


class RankMessage(msgspec.Struct, kw_only=True, frozen=True):
    """A message from rank 0 to the others."""

    dtype: str = ""  # of floating-point weights during the transfer; only in the first message
    payload: Payload = "full"  # likewise
    gathers: bool = False  # rank 0 is ready for their parts
    base: int | None = None  # the version to which their changes apply, if rank 0 has one
    update: WeightUpdate | None = None  # rank 0 has published this
    no_space: str = ""  # publishing failed, but may succeed later
    failure: str = ""  # publishing failed


class _Shards(NamedTuple):
    """This rank's part of each tensor, and the plan of all ranks."""

    parts: Mapping[str, torch.Tensor]
    origins: Mapping[str, tuple[int, ...]]  # of the parts in their tensors
    own: Sequence[ShardPiece]  # the pieces of rank 0
    buckets: Sequence[Sequence[ShardPiece]]  # those of the others

    def read(self, piece: ShardPiece) -> torch.Tensor:
        name = piece.spec.name
        return piece.box.within(self.parts[name], origin=self.origins[name])

    def new_buffer(self, num_bytes: int) -> torch.Tensor:
        """Zeros on the host, so that equal pieces make equal bytes; pinned beside a GPU."""
        on_gpu = any(part.is_cuda for part in self.parts.values())
        return torch.zeros(num_bytes, dtype=torch.uint8, pin_memory=on_gpu)


class _Transfer(NamedTuple):
    """What rank 0 receives of one rank's pieces in a bucket."""

    pieces: Sequence[ShardPiece]
    changes: Delta | None  # None = the buffer has all values
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
        self._group = GatherGroup(timeout_s=timeout_s)
        self._sender: PackingSender | None = None
        if self._group.rank == 0:
            with self._reporting_failures():
                self._sender = make_sender()
            self.dtype, payload = self._sender.dtype, self._sender.payload
            dtype = str(self.dtype).removeprefix("torch.")
            self._send_message(RankMessage(dtype=dtype, payload=payload))
        else:
            message = self._receive_message()
            self.dtype, payload = packing.DTYPES[message.dtype], message.payload
        self._is_delta = payload == "delta"
        # Rank 0 rebuilds the values of a bucket from its changes, beside two that are in flight.
        self._bucket_bytes = bucket_bytes * 2 // 3 if self._is_delta else bucket_bytes
        self._plan: tuple[list[ShardPiece], list[list[ShardPiece]]] = [], []
        self._planned_for: object = None  # the layout of all tensors on all ranks
        # With deltas, what this rank sent last, by bucket; of which version, if it is complete.
        self._sent: dict[int, torch.Tensor] = {}
        self._sent_version: int | None = None

    @property
    def has_room(self) -> bool:
        """Rank 0 decides; the others publish and wait for it."""
        return self._sender is None or self._sender.has_room

    def publish(self, version: int, tensors: Mapping[str, torch.Tensor]) -> WeightUpdate:
        """Returns the same update on all ranks."""
        specs, _ = packing.lay_out(tensors, dtype=self.dtype)
        self._agree(version, specs)
        if self._sender is not None:
            with self._reporting_failures():
                pack = partial(self._receive_shards, version)
                update = self._sender.publish(version, tensors, pack=pack)
            self._send_message(RankMessage(update=update))
            return update
        message = self._receive_message()
        if message.gathers:
            self._send_shards(version, tensors, specs, base=message.base)
            message = self._receive_message()
        assert message.update is not None
        return message.update

    def release(self, version: int) -> None:
        if self._sender is not None:
            self._sender.release(version)

    def close(self) -> None:
        """Returns when all ranks have called it; raises RankLost if one has died meanwhile."""
        try:
            if not self._group.is_broken:
                self._agree(_CLOSING, ())
        finally:
            if self._sender is not None:
                self._sender.close()

    def _agree(self, version: int, specs: Sequence[TensorSpec]) -> None:
        """Returns when all ranks publish this version; raises Superseded if one has a newer."""
        layout = xxhash.xxh3_64_intdigest(msgspec.json.encode(specs)) >> 2  # fits into an int64
        while True:
            newest, oldest, *layouts = self._group.all_max([version, -version, layout, -layout])
            if version < newest:
                raise Superseded(f"Another rank holds version {newest} already.")
            if -oldest == newest:
                break
        if layouts != [layout, -layout]:
            raise WeightError(
                f"The trainer's ranks publish version {version} with different names, shapes or"
                " types; pass the same parameters in the same order on all ranks."
            )

    def _receive_shards(
        self,
        version: int,
        tensors: Mapping[str, torch.Tensor],
        slot: PayloadSlot,
    ) -> None:
        """Fill the slot with the pieces of all ranks. Replaces packing.pack() on rank 0."""
        assert self._sender is not None
        specs, views = slot.layout, slot.views
        base = self._sender.base_for(specs)
        self._send_message(RankMessage(gathers=True, base=base and base.version))
        shards = self._find_shards(tensors, specs)
        old_views = {} if base is None else base.views

        def finish(transfers: Sequence[_Transfer]) -> None:
            for pieces, changes, buffer, work in transfers:
                self._group.finish(work)
                if changes is not None:
                    blob, buffer = buffer, shards.new_buffer(size_of(pieces))
                    for piece, place in places_of(pieces, buffer):
                        place.copy_(piece.box.within(old_views[piece.spec.name]))
                    packing.apply_delta(
                        blob, delta=changes, base=buffer, into=buffer, version=version
                    )
                for piece, place in places_of(pieces, buffer):
                    piece.box.within(views[piece.spec.name]).copy_(place)

        in_flight: deque[list[_Transfer]] = deque()
        rank = attrgetter("rank")
        for number, bucket in enumerate(shards.buckets):
            by_rank = [[*of] for _, of in groupby(sorted(bucket, key=rank), key=rank)]
            begin = partial(self._begin_receive, shards, number=number, has_base=bool(base))
            in_flight.append([begin(pieces) for pieces in by_rank])
            if len(in_flight) == 2:
                finish(in_flight.popleft())
        for piece in shards.own:  # while the last buckets are in flight
            piece.box.within(views[piece.spec.name]).copy_(shards.read(piece))
        while in_flight:
            finish(in_flight.popleft())

    def _begin_receive(
        self, shards: _Shards, pieces: Sequence[ShardPiece], *, number: int, has_base: bool
    ) -> _Transfer:
        source, num_bytes, changes = pieces[0].rank, size_of(pieces), None
        if has_base:
            num_changed = torch.empty(1, dtype=torch.int64)
            header = self._group.begin_receive(num_changed, source=source, number=2 * number + 1)
            self._group.finish(header)
            if (count := int(num_changed)) != _WHOLE:
                word_bytes = self.dtype.itemsize
                num_bytes = packing.delta_bytes(count, num_bytes=num_bytes, word_bytes=word_bytes)
                sizes = {"num_changed": count, "word_bytes": word_bytes, "num_bytes": num_bytes}
                changes = Delta(base=0, location="", **sizes)  # only ranks exchange it
        buffer = shards.new_buffer(num_bytes)
        work = self._group.begin_receive(buffer, source=source, number=2 * number)
        return _Transfer(pieces, changes, buffer, work)

    def _send_shards(
        self,
        version: int,
        tensors: Mapping[str, torch.Tensor],
        specs: Sequence[TensorSpec],
        *,
        base: int | None,
    ) -> None:
        """Send this rank's pieces to rank 0: their changes since `base`, or all values."""
        shards = self._find_shards(tensors, specs)
        if base is None or base != self._sent_version:
            self._sent.clear()
        self._sent_version = None  # until all of it is replaced
        in_flight: deque[list[tuple[torch.Tensor, Any]]] = deque()  # with what is being sent

        def finish() -> None:
            for _, work in in_flight.popleft():
                self._group.finish(work)

        for number, bucket in enumerate(shards.buckets):
            pieces = [piece for piece in bucket if piece.rank == self._group.rank]
            if not pieces:
                continue
            messages = self._messages(shards, pieces, number=number, has_base=base is not None)
            send = self._group.begin_send
            in_flight.append([(sent, send(sent, number=tag)) for tag, sent in messages])
            if len(in_flight) == 2:
                finish()
        while in_flight:
            finish()
        self._sent_version = version

    def _messages(
        self, shards: _Shards, pieces: Sequence[ShardPiece], *, number: int, has_base: bool
    ) -> Iterator[tuple[int, torch.Tensor]]:
        """What to send of a bucket, by tag: if rank 0 has a base, the number of changed words; then
        the changes or all values."""
        buffer = shards.new_buffer(size_of(pieces))
        for piece, place in places_of(pieces, buffer):
            place.copy_(shards.read(piece))
        changes = None
        if (previous := self._sent.pop(number, None)) is not None:
            changes = packing.find_delta(buffer, previous, word_bytes=self.dtype.itemsize)
        if self._is_delta:
            self._sent[number] = buffer
        if has_base:
            yield 2 * number + 1, torch.tensor([_WHOLE if changes is None else len(changes[0])])
        if changes is not None:
            buffer = shards.new_buffer(sum(part.nbytes for part in changes))
            packing.write_delta(changes, into=buffer)
        yield 2 * number, buffer

    def _find_shards(
        self, tensors: Mapping[str, torch.Tensor], specs: Sequence[TensorSpec]
    ) -> _Shards:
        boxes = [box_of(name, tensor) for name, tensor in tensors.items()]
        numbers = [number for box in boxes for number in (*box.offset, *box.shape)]
        found = self._group.all_gather(numbers)
        if self._planned_for != (specs, found):  # once for each layout
            dims = [len(box.shape) for box in boxes]
            all_boxes = [boxes_of(numbers, dims) for numbers in found]
            self._plan = plan(specs, all_boxes, bucket_bytes=self._bucket_bytes)
            self._planned_for = specs, found
            self._sent.clear()
        own, buckets = self._plan
        return _Shards(
            parts={name: local_part(tensor).detach() for name, tensor in tensors.items()},
            origins={name: box.offset for name, box in zip(tensors, boxes, strict=True)},
            own=own,
            buckets=buckets,
        )

    def _send_message(self, message: RankMessage) -> None:
        self._group.broadcast(msgspec.json.encode(message))

    def _receive_message(self) -> RankMessage:
        """Raises the error of rank 0, if it failed."""
        message = msgspec.json.decode(self._group.broadcast(), type=RankMessage)
        if message.no_space:
            raise NoSpace(message.no_space)
        if message.failure:
            raise WeightError(f"Rank 0 of the trainer could not publish: {message.failure}")
        return message

    @contextlib.contextmanager
    def _reporting_failures(self) -> Iterator[None]:
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


WeightSender = PackingSender | GatheringSender


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
            reason = (str(error) or type(error).__name__).splitlines()[0]
            raise RankLost(
                f"A rank of the trainer died, or hung for {self._timeout.total_seconds():g} s,"
                f" while weights were gathered ({reason}); engines keep the weights they have, and"
                " the trainer restarts from its last checkpoint."
            ) from error
