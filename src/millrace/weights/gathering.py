"""All ranks of a trainer as one sender: weights that live as shards are gathered as they go out.

Promise: no rank ever holds more gathered values than two buckets. Rank 0 writes each bucket where
its transport keeps the version; the others send their parts and keep nothing. What is published is
bit for bit what the same weights in one piece would be.

Every rank makes one, publishes the same versions of the same tensors, and closes it; only rank 0
has the transport, and releases versions. Which of several versions goes out is agreed: a rank with
an older one than another's drops it (Superseded) and comes again. A rank that is lost is a RankLost
on all others, and nothing of that version is published.

Used by one thread of each rank: the publisher's, and after it has ended the one that closes it.
"""

import contextlib
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import msgspec
import torch
import xxhash

from millrace.core.errors import WeightError
from millrace.core.weight_update import TensorSpec, WeightUpdate
from millrace.weights import packing
from millrace.weights.ranks import RankLost, Ranks
from millrace.weights.send_backend import NoSpace, PackingSender, Superseded
from millrace.weights.shards import Box, ShardPiece, box_of, local_part, plan

_CLOSING = 2**62  # the version that ranks agree on in the end


class Word(msgspec.Struct, kw_only=True, frozen=True):
    """What rank 0 tells the others: one of these."""

    dtype: str = ""  # what floating-point weights travel as
    gathers: bool = False  # it is ready for their parts
    update: WeightUpdate | None = None  # it has published this
    no_space: str = ""  # it could not, but may later
    failure: str = ""  # it could not


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Transfer:
    """What one rank brings to a bucket, on its way."""

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
            with self._telling_failures():
                self._sender = make_sender()
            self.dtype = self._sender.dtype
            self._say(Word(dtype=str(self.dtype).removeprefix("torch.")))
        else:
            self.dtype = packing.DTYPES[self._hear().dtype]

    @property
    def has_room(self) -> bool:
        """Rank 0 knows; the others come and wait for it."""
        return self._sender is None or self._sender.has_room

    def publish(self, version: int, tensors: Mapping[str, torch.Tensor]) -> WeightUpdate:
        """Returns the same update on all ranks."""
        specs, _ = packing.lay_out(tensors, dtype=self.dtype)
        self._agree(version, specs)
        if self._sender is None:
            return self._follow(tensors, specs)
        with self._telling_failures():
            update = self._sender.publish(version, tensors, pack=self._pack)
        self._say(Word(update=update))
        return update

    def release(self, version: int) -> None:
        if self._sender is not None:
            self._sender.release(version)

    def close(self) -> None:
        """Returns when all ranks have called it; raises RankLost if one is not there any more."""
        try:
            self._agree(_CLOSING, ())
        finally:
            if self._sender is not None:
                self._sender.close()

    def _agree(self, version: int, specs: Sequence[TensorSpec]) -> None:
        """Returns when all ranks have come with this version; Superseded if one has a newer."""
        layout = xxhash.xxh3_64_intdigest(msgspec.json.encode(specs)) >> 2  # fits into an int64
        while True:
            newest, oldest, *layouts = self._ranks.largest([version, -version, layout, -layout])
            if version < newest:
                raise Superseded(f"Another rank holds version {newest} already.")
            if -oldest == newest:
                break
        if layouts != [layout, -layout]:
            raise WeightError(
                f"The trainer's ranks publish version {version} with other names, shapes or types"
                " than each other; pass the same parameters in the same order on all."
            )

    def _follow(
        self, tensors: Mapping[str, torch.Tensor], specs: Sequence[TensorSpec]
    ) -> WeightUpdate:
        word = self._hear()
        if word.gathers:
            self._gather(tensors, specs, payload=None)
            word = self._hear()
        assert word.update is not None
        return word.update

    def _pack(
        self,
        tensors: Mapping[str, torch.Tensor],
        specs: Sequence[TensorSpec],
        *,
        into: torch.Tensor,
    ) -> None:
        """Rank 0's place of packing.pack()."""
        self._say(Word(gathers=True))
        self._gather(tensors, specs, payload=into)

    def _gather(
        self,
        tensors: Mapping[str, torch.Tensor],
        specs: Sequence[TensorSpec],
        *,
        payload: torch.Tensor | None,  # filled by rank 0; None on all others
    ) -> None:
        here = {name: local_part(tensor).detach() for name, tensor in tensors.items()}
        boxes = self._all_boxes([box_of(name, tensor) for name, tensor in tensors.items()])
        origins = {s.name: b.offset for s, b in zip(specs, boxes[self._ranks.rank], strict=True)}
        own, buckets = plan(specs, boxes, bucket_bytes=self._bucket_bytes)
        views = {} if payload is None else packing.unpack(specs, payload)

        def part(piece: ShardPiece) -> torch.Tensor:
            return piece.box.within(here[piece.spec.name], origin=origins[piece.spec.name])

        under_way: deque[list[_Transfer]] = deque()
        for number, bucket in enumerate(buckets):
            under_way.append(list(self._transfers(bucket, part=part, number=number)))
            if len(under_way) == 2:
                self._finish(under_way.popleft(), views)
        if payload is not None:  # while the last two are on the wire
            for piece in own:
                piece.box.within(views[piece.spec.name]).copy_(part(piece))
        while under_way:
            self._finish(under_way.popleft(), views)

    def _all_boxes(self, boxes: Sequence[Box]) -> list[list[Box]]:
        """Those of all ranks, which have as many dimensions as ours."""
        numbers = [number for box in boxes for number in (*box.offset, *box.shape)]
        return [_boxes(theirs, like=boxes) for theirs in self._ranks.everyones(numbers)]

    def _transfers(
        self,
        bucket: Sequence[ShardPiece],
        *,
        part: Callable[[ShardPiece], torch.Tensor],
        number: int,
    ) -> Iterator[_Transfer]:
        """Begin what this rank brings to a bucket or, as rank 0, all that is brought."""
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
            yield _Transfer(pieces=pieces, buffer=buffer, work=work)

    def _finish(self, transfers: Sequence[_Transfer], views: Mapping[str, torch.Tensor]) -> None:
        for transfer in transfers:
            self._ranks.finish(transfer.work)
            if self._ranks.rank == 0:
                for piece, place in _places(transfer.pieces, transfer.buffer):
                    piece.box.within(views[piece.spec.name]).copy_(place)

    def _say(self, word: Word) -> None:
        self._ranks.say(msgspec.json.encode(word))

    def _hear(self) -> Word:
        """Raises what rank 0 failed with."""
        word = msgspec.json.decode(self._ranks.hear(), type=Word)
        if word.no_space:
            raise NoSpace(word.no_space)
        if word.failure:
            raise WeightError(f"Rank 0 of the trainer could not publish: {word.failure}")
        return word

    @contextlib.contextmanager
    def _telling_failures(self) -> Iterator[None]:
        """What goes wrong on rank 0 alone, the others are told."""
        try:
            yield
        except RankLost:
            raise  # they notice by themselves
        except NoSpace as error:
            self._say(Word(no_space=str(error)))
            raise
        except Exception as error:
            self._say(Word(failure=str(error) or type(error).__name__))
            raise


def _boxes(numbers: Sequence[int], *, like: Sequence[Box]) -> list[Box]:
    boxes: list[Box] = []
    at = 0
    for box in like:
        middle, end = at + len(box.offset), at + 2 * len(box.offset)
        boxes.append(Box(offset=tuple(numbers[at:middle]), shape=tuple(numbers[middle:end])))
        at = end
    return boxes


def _places(
    pieces: Sequence[ShardPiece], buffer: torch.Tensor
) -> Iterator[tuple[ShardPiece, torch.Tensor]]:
    """Where each piece lies in what its rank brings."""
    at = 0
    for piece in pieces:
        flat = buffer[at : at + piece.num_bytes].view(packing.DTYPES[piece.spec.dtype])
        yield piece, flat.view(piece.box.shape)
        at += piece.room_bytes
