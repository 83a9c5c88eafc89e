"""Penalties, biases and top logprobs: what some rows of a step need besides a draw.

The tensors lie on the device and keep their addresses, so steps of the decode loop read and update
them inside CUDA graphs. Single passes use the same code.

The engine's thread calls everything. P = such rows, V = vocabulary, K = top logprobs per token,
N = steps of a launch.
"""

import math
from collections.abc import Callable
from functools import cache, partial
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

_ROW_PARTS, _PART_SIZE = 64, 256  # of a row of logits, at most and at least


class LogitChanges(NamedTuple):
    """How rows differ from plain ones. A place is row * V + token id."""

    sampled: np.ndarray  # int64; places of all tokens that the rows have sampled
    biased: np.ndarray  # int64; places with a bias, each once
    biases: np.ndarray  # float32
    penalties: np.ndarray  # [2, P] float32; presence, frequency


class LogitAdjuster:
    def __init__(self, num_rows: int, vocab_size: int, *, device: torch.device) -> None:
        # Counts and not their effect, which would depend on the order of float additions.
        self._counts = torch.zeros(num_rows, vocab_size, device=device)
        self._biases = torch.zeros_like(self._counts)
        self._penalties = torch.zeros(2, num_rows, device=device)

    def load(self, changes: LogitChanges) -> None:
        sampled, biased, biases, penalties = (
            torch.from_numpy(array).to(self._counts.device) for array in changes
        )
        ones = torch.ones_like(sampled, dtype=torch.float32)
        self._counts.zero_().view(-1).index_add_(0, sampled, ones)
        self._biases.zero_().view(-1).index_copy_(0, biased, biases)
        self._penalties.copy_(penalties)

    def adjusted(self, logits: Tensor, *, compiled: Callable[..., Tensor] | None = None) -> Tensor:
        """Logits [P, V] with the changes. `compiled`: adjusted_logits()."""
        adjust = compiled or adjusted_logits
        return adjust(logits, self._counts, self._biases, self._penalties)

    def count(self, tokens: Tensor) -> None:
        """The rows have sampled these tokens [P] int64."""
        ones = torch.ones_like(tokens[:, None], dtype=torch.float32)
        self._counts.scatter_add_(1, tokens[:, None], ones)


def adjusted_logits(logits: Tensor, counts: Tensor, biases: Tensor, penalties: Tensor) -> Tensor:
    presence, frequency = penalties[:, :, None]
    return logits - (presence * (counts > 0) + frequency * counts) + biases


def adjusted_rows(logits: Tensor, rows: np.ndarray, changes: LogitChanges) -> Tensor:
    """Logits [R, V], with the changes of these rows [P]."""
    adjuster = LogitAdjuster(len(rows), logits.shape[1], device=logits.device)
    adjuster.load(changes)
    at, logits = torch.from_numpy(rows).to(logits.device), logits.clone()
    logits[at] = adjuster.adjusted(logits[at])
    return logits


def top_logprobs(
    logits: Tensor,  # [P, V]
    temperatures: Tensor,
    *,
    drawn: tuple[Tensor, Tensor],  # tokens [P] and their logprobs, of these rows
    allowed: Tensor | None,  # [P, V]
    num_top: int,
) -> tuple[Tensor, Tensor]:
    """The likeliest ids among the allowed ones, int32, and their logprobs [P, K]."""
    tokens, logprobs = drawn
    temperatures = temperatures.masked_fill(temperatures == 0, 1.0)[:, None]
    # A logprob is a scaled logit minus a number that is the same for all ids of the row.
    own = logits.gather(1, tokens[:, None]) / temperatures
    if allowed is not None:
        logits = logits.masked_fill(~allowed, -torch.inf)
    values, ids = _largest(logits, min(num_top, logits.shape[1]))
    return ids.int(), values / temperatures - (own - logprobs[:, None])


def _largest(x: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The `count` largest of each row [P, V] and their places, largest first. On a GPU, torch's
    topk leaves most processors idle if rows are few and long, so parts of rows come first."""
    num_parts = math.gcd(x.shape[1], _ROW_PARTS)
    if not x.is_cuda or x.shape[1] < num_parts * max(count, _PART_SIZE):
        values, places = x.topk(count, dim=-1)
        return values, places
    values, places = x.unflatten(1, (num_parts, -1)).topk(count, dim=-1)
    places += torch.arange(num_parts, device=x.device)[:, None] * (x.shape[1] // num_parts)
    values, chosen = values.flatten(1).topk(count, dim=-1)
    return values, places.flatten(1).gather(1, chosen)


class TopRecorder:
    """The top logprobs of the steps of a launch."""

    def __init__(self, num_rows: int, num_top: int, *, num_steps: int, device: torch.device):
        shape = (num_steps, 2, num_rows, num_top)  # ids, and the bits of logprobs
        self._out = torch.zeros(shape, dtype=torch.int32, device=device)

    def record(self, step: Tensor, *, ids: Tensor, logprobs: Tensor) -> None:
        """Those of one step [1]: [P, K] each. Runs inside CUDA graphs."""
        both = torch.stack([ids, logprobs.view(torch.int32)])
        self._out.index_copy_(0, step, both[None])

    def read(self, *, num_steps: int) -> tuple[np.ndarray, np.ndarray]:
        """Ids and logprobs [N, P, K]. A copy on a CPU, too: the next launch overwrites them."""
        out = self._out[:num_steps].to("cpu", copy=True).numpy()
        return out[:, 0], out[:, 1].view(np.float32)


class ExtraRows:
    """The adjusters and recorders of the decode loop. The rows that need them come first in a
    launch; `num_rows` of them have few values, because steps are captured for each."""

    def __init__(
        self, vocab_size: int, *, num_steps: int, device: torch.device, compiles: bool
    ) -> None:
        # By number of rows, and of top logprobs. Each is made once, outside of CUDA graphs.
        self.adjuster = cache(partial(LogitAdjuster, vocab_size=vocab_size, device=device))
        self.recorder = cache(partial(TopRecorder, num_steps=num_steps, device=device))
        self._compiled = torch.compile(adjusted_logits) if compiles else None

    def adjust(self, logits: Tensor, *, num_rows: int) -> None:
        """Change the first rows of logits [B, V]. Runs inside CUDA graphs."""
        own = logits[:num_rows]
        own.copy_(self.adjuster(num_rows).adjusted(own, compiled=self._compiled))
