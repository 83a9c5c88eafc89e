"""Context parallelism by Ulysses (arXiv 2309.14509): ranks that share the rows of each microbatch.

Every rank holds equally many contiguous rows, and computes embeddings, norms, matrix products and
the head for these alone. Before attention, an all-to-all gives each rank all rows of its part of
the heads, so layouts and kernels are those of one rank; a second one returns its own rows of all
heads. What was computed for single tokens is gathered, so every rank has the whole loss.

Promise: the sum of the ranks' gradients is the gradient of one rank. One rank copies and sends
nothing.

T = rows of a microbatch, n = rows of a rank, the last ones repeated where T is no multiple of cp,
N = tokens, H = heads, D = head size, W = H * D / cp of all tensors that are exchanged together.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor


class ContextGroup:
    """The ranks that share microbatches, as one of them sees them. Used by one thread."""

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        """`group`: None = one rank."""
        self._group = group
        self.size = 1 if group is None else group.size()
        self._index = 0 if group is None else group.rank()

    def local_rows(self, rows: np.ndarray) -> np.ndarray:  # [T, ...] -> [n, ...]
        if self.size == 1:
            return rows
        num_own = self._num_own(len(rows))
        own = np.arange(num_own) + self._index * num_own
        return rows[own.clip(max=len(rows) - 1)]

    def local_tokens(self, rows: np.ndarray, *, num_rows: int) -> "LocalTokens":
        """The tokens at these rows [N] that this rank has; `num_rows` is T."""
        if self.size == 1:
            return LocalTokens(context=self, rows=rows, chosen=None)
        num_own = self._num_own(num_rows)
        within = rows - self._index * num_own
        chosen = (within >= 0) & (within < num_own)
        return LocalTokens(context=self, rows=within[chosen], chosen=chosen)

    def sum(self, values: Tensor) -> Tensor:
        """The sum over the ranks, whose losses are equal: a gradient is that of this rank."""
        return values if self._group is None else _Sum.apply(values, self._group)

    def to_heads(self, *tensors: Tensor, num_rows: int) -> list[Tensor]:
        """Own rows of all heads, [n, H, D] each -> all rows of own heads [T, H / cp, D]."""
        # [n, cp, H / cp * D] each: heads are divided in order, so queries stay with their keys.
        parts = [x.reshape(len(x), self.size, -1) for x in tensors]
        together = _all_to_all(torch.cat(parts, -1).transpose(0, 1), self._group).flatten(0, 1)
        split = together[:num_rows].split([part.shape[-1] for part in parts], -1)
        pairs = zip(split, tensors, strict=True)
        return [part.unflatten(-1, (-1, x.shape[-1])).to(x.dtype) for part, x in pairs]

    def local_heads(self, of_heads: Tensor) -> Tensor:  # [H] -> [H / cp]
        return of_heads.chunk(self.size)[self._index]

    def to_rows(self, heads: Tensor) -> Tensor:
        """All rows of own heads [T, H / cp, D] -> own rows of all heads [n, H, D]."""
        num_own = self._num_own(len(heads))
        padded = F.pad(heads.flatten(1), (0, 0, 0, num_own * self.size - len(heads)))
        own = _all_to_all(padded.unflatten(0, (self.size, num_own)), self._group).transpose(0, 1)
        return own.flatten(1).unflatten(-1, (-1, heads.shape[-1]))

    def _num_own(self, num_rows: int) -> int:
        return -(-num_rows // self.size)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class LocalTokens:
    """The tokens of a microbatch whose rows are on this rank."""

    context: ContextGroup
    rows: np.ndarray  # [own tokens] among the rank's rows
    chosen: np.ndarray | None  # [N] bool; None = all

    def of(self, values: np.ndarray) -> np.ndarray:  # [N, ...] -> [own tokens, ...]
        return values if self.chosen is None else values[self.chosen]

    def gather(self, values: Tensor) -> Tensor:  # [own tokens, ...] -> [N, ...]
        """The values of all ranks; differentiable."""
        if self.chosen is None:
            return values
        index = torch.from_numpy(np.flatnonzero(self.chosen)).to(values.device)
        everything = values.new_zeros(len(self.chosen), *values.shape[1:])
        return self.context.sum(everything.index_copy(0, index, values))


def _exchange(sent: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """[cp, n, W] by receiver -> by sender; differentiable."""
    return _AllToAll.apply(sent, group)


_all_to_all: Any = torch.compiler.disable(_exchange)


class _AllToAll(torch.autograd.Function):
    """torch has public collectives only without gradients."""

    @staticmethod
    def forward(ctx: Any, sent: Tensor, group: dist.ProcessGroup | None) -> Tensor:
        ctx.group = group
        sent = sent.contiguous()
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=group)
        return received

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return _AllToAll.apply(grads[0], ctx.group), None


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, group: dist.ProcessGroup) -> Tensor:
        total = values.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0], None
