"""Where tokens went in a mixture of experts, noted beside their KV.

A pool holds the routes of every token that has KV, at the kv_slots of that KV: they are written by
the pass that computes it, shared, copied and given up with it. So whatever has KV has routes:
prompts, prefixes that were found, forks, sequences that were resumed.

Promise: the routes of a completion are those of the passes that sampled it: position t has the
routes of the pass that predicted token t + 1, whatever became of its KV later. What a sequence has
fed is read when it gives up its slot, before its blocks can be another's.

Called by the engine's thread. T = tokens of a pass, K = experts per token.
"""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from millrace.inference.embedded.decode.attention import define_operator
from millrace.inference.embedded.kv.cache import KVCache
from millrace.models.routing import Routing


class RoutesPool:
    def __init__(
        self, routing: Routing, *, cache: KVCache, num_blocks: int, device: torch.device
    ) -> None:
        num_layers, top_k = routing.shape
        self._dtype = routing.dtype
        # One block more: rows that idle write there.
        self._spare = num_blocks * cache.block_tokens
        self._block_tokens = cache.block_tokens
        self._routes = torch.zeros(
            num_layers,
            (num_blocks + 1) * cache.block_tokens,
            top_k,
            dtype=torch.uint8 if routing.dtype == np.uint8 else torch.int16,
            device=device,
        )
        cache.copy_with_blocks(layer.view(num_blocks + 1, -1) for layer in self._routes)
        self._requested: list[tuple[np.ndarray, RouteRead]] = []
        self._target = _WriteTarget(kv_slots=torch.empty(0, dtype=torch.int64, device=device))
        routing.install([_RecordedRouter(layer, target=self._target) for layer in self._routes])

    def begin(self, kv_slots: Tensor) -> None:
        """The next pass computes the KV of these kv_slots, [T] int64."""
        self._target.kv_slots = kv_slots

    def begin_step(self, tables: Tensor, lengths: Tensor) -> None:
        """The same of a step of a round: rows [T] with `lengths` tokens, 0 = idle, in the blocks of
        `tables` [T, blocks]. Runs inside CUDA graphs."""
        at = (lengths - 1).clamp_min(0)
        blocks = tables.gather(1, (at // self._block_tokens)[:, None]).squeeze(1).long()
        kv_slots = blocks * self._block_tokens + at % self._block_tokens
        self.begin(torch.where(lengths > 0, kv_slots, self._spare))

    def discard_next(self, num_rows: int) -> None:
        """The next pass leaves no KV, and nothing is kept of where its tokens go."""
        self.begin(torch.full((num_rows,), self._spare, device=self._routes.device))

    def read(self, kv_slots: np.ndarray) -> "RouteRead":
        """What lies at these kv_slots [n] now."""
        route_read = RouteRead(self, len(kv_slots))
        self._requested.append((kv_slots, route_read))
        return route_read

    def fetch(self) -> None:
        """Send the host what was asked for, all at once; to be called before anything is written
        where it lies. Nobody waits for it."""
        if not self._requested:
            return
        index = torch.from_numpy(np.concatenate([kv_slots for kv_slots, _ in self._requested]))
        found = self._routes.index_select(1, index.to(self._routes.device)).transpose(0, 1)
        sent, arrived = found.contiguous(), None
        if found.is_cuda:
            sent = torch.empty(found.shape, dtype=found.dtype, pin_memory=True)
            sent.copy_(found, non_blocking=True)
            arrived = torch.cuda.current_stream(found.device).record_event()
        parts = sent.split([len(kv_slots) for kv_slots, _ in self._requested])
        for part, (_, route_read) in zip(parts, self._requested, strict=True):
            route_read.send(part, dtype=self._dtype, arrived=arrived)
        self._requested.clear()


class RouteRead:
    """Routes [n, layers, K] on their way to the host."""

    def __init__(self, pool: RoutesPool, count: int) -> None:
        self._pool = pool
        self._count = count
        self._sent: np.ndarray | None = None
        self._arrived: torch.Event | None = None

    def __len__(self) -> int:
        return self._count

    def send(self, part: Tensor, *, dtype: np.dtype, arrived: torch.Event | None) -> None:
        self._sent = part.numpy().view(dtype)
        self._arrived = arrived

    def rows(self) -> np.ndarray:
        """Waits until they are here. A view: they come with those of others."""
        if self._sent is None:
            self._pool.fetch()
        if self._arrived is not None:
            self._arrived.synchronize()
        assert self._sent is not None
        return self._sent


class SequenceRoutes:
    """What is known of one sequence, from a position on, without gaps."""

    def __init__(self, start: int, *, done: np.ndarray | None = None) -> None:
        self.end = start  # position behind the last one that is known
        self._parts: list[RouteRead | np.ndarray] = []
        if done is not None and len(done):
            self.append(done)

    def append(self, part: RouteRead | np.ndarray) -> None:
        self._parts.append(part)
        self.end += len(part)

    def rows(self) -> np.ndarray | None:  # [n, layers, K]
        """None if nothing is known."""
        parts = [part if isinstance(part, np.ndarray) else part.rows() for part in self._parts]
        return np.concatenate(parts) if parts else None  # a copy


class _WriteTarget:
    """Where the pass at hand writes; one for all layers."""

    def __init__(self, *, kv_slots: Tensor) -> None:
        self.kv_slots = kv_slots  # [T] int64


class _RecordedRouter:
    """The rule of one layer: what its router chooses itself, noted."""

    def __init__(self, pool: Tensor, *, target: _WriteTarget) -> None:
        self._pool = pool  # [kv_slots, K]
        self._target = target

    def choose(self, own: Tensor) -> Tensor:
        return torch.ops.millrace.record_routes(own, self._pool, self._target.kv_slots)


def _record_routes(chosen: Tensor, pool: Tensor, kv_slots: Tensor) -> Tensor:
    pool.index_copy_(0, kv_slots, chosen.to(pool.dtype))
    return chosen.clone()


def _shape(chosen: Tensor, *_: Any) -> Tensor:
    return torch.empty_like(chosen)


# The pool is written to without being declared, for the reason given at paged_decode: whoever needs
# the routes needs the experts' output, and that needs the output of this operator.
define_operator(
    "record_routes(Tensor chosen, Tensor pool, Tensor kv_slots) -> Tensor",
    cuda=_record_routes,
    cpu=_record_routes,
    shape=_shape,
)
