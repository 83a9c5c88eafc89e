"""Where tokens went in a mixture of experts, noted beside their KV.

A pool holds the routes of every token that has KV, at the slots of that KV: they are written by
the pass that computes it, shared, copied and given up with it. So whatever has KV has routes:
prompts, prefixes that were found, forks, sequences that were resumed.

Promise: the routes of a completion are those of the passes that sampled it: position t has the
routes of the pass that predicted token t + 1, whatever became of its KV later. What a sequence has
fed is read when it gives up its lane, before its blocks can be another's.

Called by the engine's thread. T = tokens of a pass, K = experts per token.
"""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from millrace.engines.embedded.decode.operators import define_operator
from millrace.engines.embedded.kv_cache import KVCache
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
        cache.ride_along(layer.view(num_blocks + 1, -1) for layer in self._routes)
        self._place = _Place(slots=torch.empty(0, dtype=torch.int64, device=device))
        routing.install([_Noted(layer, place=self._place) for layer in self._routes])

    def begin(self, slots: Tensor) -> None:
        """The next pass computes the KV of these slots, [T] int64."""
        self._place.slots = slots

    def begin_step(self, tables: Tensor, lengths: Tensor) -> None:
        """The same of a step of a round: rows [T] with `lengths` tokens, 0 = idle, in the blocks of
        `tables` [T, blocks]. Runs inside CUDA graphs."""
        at = (lengths - 1).clamp_min(0)
        blocks = tables.gather(1, (at // self._block_tokens)[:, None]).squeeze(1).long()
        slots = blocks * self._block_tokens + at % self._block_tokens
        self.begin(torch.where(lengths > 0, slots, self._spare))

    def look_away(self, num_rows: int) -> None:
        """The next pass leaves no KV, and nothing is kept of where its tokens go."""
        self.begin(torch.full((num_rows,), self._spare, device=self._routes.device))

    def read(self, slots: np.ndarray) -> "Reading":
        """What lies at these slots [n] now."""
        index = torch.from_numpy(slots).to(self._routes.device)
        found = self._routes.index_select(1, index).transpose(0, 1).contiguous()
        return Reading(found, dtype=self._dtype)


class Reading:
    """Routes [n, layers, K] on their way to the host: nobody waits for them until rows()."""

    def __init__(self, found: Tensor, *, dtype: np.dtype) -> None:
        self._dtype = dtype
        self._count = len(found)
        self._host = found
        self._arrived: torch.Event | None = None
        if found.is_cuda:
            self._host = torch.empty(found.shape, dtype=found.dtype, pin_memory=True)
            self._host.copy_(found, non_blocking=True)
            self._arrived = torch.cuda.current_stream(found.device).record_event()

    def __len__(self) -> int:
        return self._count

    def rows(self) -> np.ndarray:
        if self._arrived is not None:
            self._arrived.synchronize()
        return self._host.numpy().view(self._dtype)


class SequenceRoutes:
    """What is known of one sequence, from a position on, without gaps."""

    def __init__(self, start: int, *, done: np.ndarray | None = None) -> None:
        self.end = start  # position behind the last one that is known
        self._parts: list[Reading | np.ndarray] = []
        if done is not None and len(done):
            self.append(done)

    def append(self, part: Reading | np.ndarray) -> None:
        self._parts.append(part)
        self.end += len(part)

    def rows(self) -> np.ndarray | None:  # [n, layers, K]
        """None if nothing is known."""
        parts = [part if isinstance(part, np.ndarray) else part.rows() for part in self._parts]
        return np.concatenate(parts) if parts else None


class _Place:
    """Where the pass at hand writes; one for all layers."""

    def __init__(self, *, slots: Tensor) -> None:
        self.slots = slots  # [T] int64


class _Noted:
    """The rule of one layer: what its router chooses itself, noted."""

    def __init__(self, pool: Tensor, *, place: _Place) -> None:
        self._pool = pool  # [slots, K]
        self._place = place

    def choose(self, own: Tensor) -> Tensor:
        return torch.ops.millrace.note_routes(own, self._pool, self._place.slots)


def _note_routes(chosen: Tensor, pool: Tensor, slots: Tensor) -> Tensor:
    pool.index_copy_(0, slots, chosen.to(pool.dtype))
    return chosen.clone()


def _shape(chosen: Tensor, *_: Any) -> Tensor:
    return torch.empty_like(chosen)


# The pool is written to without being declared, for the reason given at paged_decode: whoever needs
# the routes needs the experts' output, and that needs the output of this operator.
define_operator(
    "note_routes(Tensor chosen, Tensor pool, Tensor slots) -> Tensor",
    cuda=_note_routes,
    cpu=_note_routes,
    shape=_shape,
)
