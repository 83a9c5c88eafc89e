"""Expert routes: the experts that each token went to, recorded beside the token's KV.

A pool holds the routes of every token that has KV, at the KV slots of that KV. The pass that
computes the KV writes them; they are shared, copied and freed with it.

Promise: a completion has the routes of the passes that sampled it. Position t has the routes of the
pass that predicted token t + 1, even if its KV is recomputed later. The routes of a sequence are
read when it frees its slot, before its blocks can be reused.

The engine's thread calls everything. T = tokens of a pass, K = experts per token.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from millrace.inference.embedded.decode.attention import define_operator
from millrace.inference.embedded.kv.cache import KVCache
from millrace.models.routing import Routing


class RoutesPool:
    def __init__(self, routing: Routing, *, cache: KVCache, num_blocks: int) -> None:
        num_layers, top_k = routing.shape
        self._dtype = routing.dtype
        self._block_tokens = cache.block_tokens
        self._spare = num_blocks * cache.block_tokens  # a slot of one extra block, for idle rows
        self._routes = torch.zeros(
            num_layers,
            (num_blocks + 1) * cache.block_tokens,
            top_k,
            dtype=torch.uint8 if routing.dtype == np.uint8 else torch.int16,
            device=cache.device,
        )
        self._requested: list[RouteRead] = []
        # [T]; of the KV that the next pass computes.
        self.kv_slots = torch.empty(0, dtype=torch.int64, device=cache.device)
        cache.copied_along += [layer.view(num_blocks + 1, -1) for layer in self._routes]
        routing.install([RecordedRouter(layer, pool=self) for layer in self._routes])

    def begin_step(self, tables: Tensor, lengths: Tensor) -> None:
        """Set kv_slots for a decode step: rows [T] with `lengths` tokens, 0 = idle, in the blocks
        of `tables` [T, blocks]. Runs inside CUDA graphs."""
        at = (lengths - 1).clamp_min(0)
        blocks = tables.gather(1, (at // self._block_tokens)[:, None]).squeeze(1).long()
        kv_slots = blocks * self._block_tokens + at % self._block_tokens
        self.kv_slots = torch.where(lengths > 0, kv_slots, self._spare)

    def discard_next(self, num_rows: int) -> None:
        """The next pass caches no KV, and its routes are dropped."""
        self.kv_slots = torch.full((num_rows,), self._spare, device=self._routes.device)

    def read(self, kv_slots: np.ndarray) -> "RouteRead":
        """The routes that lie at these KV slots [n] now."""
        self._requested.append(RouteRead(self, kv_slots))
        return self._requested[-1]

    def fetch(self) -> None:
        """Copy all requested routes to the host, without waiting for the copy. Must run before a
        pass writes to their KV slots."""
        if not self._requested:
            return
        requested, self._requested = self._requested, []
        index = torch.from_numpy(np.concatenate([read.kv_slots for read in requested]))
        found = self._routes.index_select(1, index.to(self._routes.device)).transpose(0, 1)
        sent, arrived = (found if found.is_cuda else found.contiguous()), None
        if found.is_cuda:
            sent = torch.empty(found.shape, dtype=found.dtype, pin_memory=True)
            sent.copy_(found, non_blocking=True)
            arrived = torch.cuda.current_stream(found.device).record_event()
        for read, part in zip(requested, sent.split([len(r) for r in requested]), strict=True):
            read.sent, read.arrived = part.numpy().view(self._dtype), arrived


@dataclass(slots=True, eq=False)
class RouteRead:
    """Routes [n, layers, K] on their way to the host."""

    pool: RoutesPool
    kv_slots: np.ndarray  # [n]
    sent: np.ndarray | None = None  # complete once `arrived` has happened
    arrived: torch.Event | None = None

    def __len__(self) -> int:
        return len(self.kv_slots)

    def rows(self) -> np.ndarray:
        """Waits for the copy. Returns a view of an array that other reads share."""
        if self.sent is None:
            self.pool.fetch()
        if self.arrived is not None:
            self.arrived.synchronize()
        assert self.sent is not None
        return self.sent


class SequenceRoutes:
    """The known routes of one sequence, from a position on, without gaps."""

    def __init__(self, start: int, *, done: np.ndarray | None = None) -> None:
        self.end = start  # position after the last known one
        self._parts: list[RouteRead | np.ndarray] = []
        if done is not None and len(done):
            self.append(done)

    def append(self, part: RouteRead | np.ndarray) -> None:
        self._parts.append(part)
        self.end += len(part)

    def rows(self) -> np.ndarray | None:  # [n, layers, K]
        """A copy; None if no routes are known."""
        parts = [part if isinstance(part, np.ndarray) else part.rows() for part in self._parts]
        return np.concatenate(parts) if parts else None


class RecordedRouter:
    """The choice of one layer's router, recorded and left as it is."""

    def __init__(self, routes: Tensor, *, pool: RoutesPool) -> None:
        self._routes = routes  # [KV slots, K]
        self._pool = pool

    def choose(self, own: Tensor, *, scores: Tensor) -> Tensor:
        return torch.ops.millrace.record_routes(own, self._routes, self._pool.kv_slots)


def _record_routes(chosen: Tensor, pool: Tensor, kv_slots: Tensor) -> Tensor:
    pool.index_copy_(0, kv_slots, chosen.to(pool.dtype))
    return chosen.clone()


def _record_on_cuda(chosen: Tensor, pool: Tensor, kv_slots: Tensor) -> Tensor:
    from millrace.inference.embedded.decode.kernels import expert_kernels

    return expert_kernels.record_routes(chosen, pool, kv_slots)


define_operator(
    "record_routes(Tensor chosen, Tensor pool, Tensor kv_slots) -> Tensor",
    cuda=_record_on_cuda,
    cpu=_record_routes,
    shape=lambda chosen, *_: torch.empty_like(chosen),
)
