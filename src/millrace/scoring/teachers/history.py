"""The versions that a self-teacher keeps: a moving average, or the last few as they were.

Promise: take() returns tensors that are complete, belong to one version, and stay unchanged until
the next take(). Memory is bounded. An average is one float32 copy of the weights on the teacher's
device. A lag of k is at most k + 1 copies in host memory, in the dtype they arrive in.

Some versions may be skipped on their way here. An average then gives the next version the weight of
all it replaces; a lag serves the newest version that is old enough.

In a LoRA run the adapter's tensors are kept or averaged. Used by one thread.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class HistorySettings:
    """Which past of the policy the teacher is. Either lag or ema is set."""

    lag: int | None = None  # versions
    ema: float | None = None  # decay per version
    every: int = 1  # versions between two refreshes

    def build(
        self, start: Mapping[str, Tensor] | None, *, version: int
    ) -> "AveragedWeights | LaggedWeights":
        """`start`: the weights of `version` on the teacher's device; None = unknown."""
        if self.ema is not None:
            return AveragedWeights(start, decay=self.ema, every=self.every, version=version)
        assert self.lag is not None
        return LaggedWeights(lag=self.lag, every=self.every, version=version)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class VersionedTensors:
    version: int  # the newest version in it
    tensors: Mapping[str, Tensor]


class AveragedWeights:
    def __init__(
        self, start: Mapping[str, Tensor] | None, *, decay: float, every: int, version: int
    ) -> None:
        """Without `start`, the average starts with the first version that arrives."""
        self._decay = decay
        self._every = every
        self._version = version  # the newest version in the average
        self._refreshed_at = version
        self._average = None if start is None else _copies(start, dtype=torch.float32)

    def take(self, version: int, tensors: Mapping[str, Tensor]) -> VersionedTensors | None:
        """Add a newer version. Returns the weights to serve from now on, or None to keep them."""
        if self._average is None:
            self._average = _copies(tensors, dtype=torch.float32)
        else:
            share = 1 - self._decay ** (version - self._version)
            for name, average in self._average.items():
                average.lerp_(tensors[name].to(average.device, torch.float32), share)
        self._version = version
        if not _is_due(version, since=self._refreshed_at, every=self._every):
            return None
        self._refreshed_at = version
        return VersionedTensors(version=version, tensors=self._average)


class LaggedWeights:
    def __init__(self, *, lag: int, every: int, version: int) -> None:
        self._lag = lag
        self._every = every
        self._served = version
        self._refreshed_at = version
        self.kept: list[VersionedTensors] = []  # ascending; all but the first are too young

    def take(self, version: int, tensors: Mapping[str, Tensor]) -> VersionedTensors | None:
        """Add a newer version. Returns the weights to serve from now on, or None to keep them."""
        copies = _copies(tensors, dtype=None, device=torch.device("cpu"))
        self.kept.append(VersionedTensors(version=version, tensors=copies))
        old_enough = [kept for kept in self.kept if kept.version <= version - self._lag]
        if not old_enough:
            return None
        newest = old_enough[-1]
        self.kept = [kept for kept in self.kept if kept.version >= newest.version]
        is_due = _is_due(version, since=self._refreshed_at, every=self._every)
        if not is_due or newest.version <= self._served:
            return None
        self._served, self._refreshed_at = newest.version, version
        return newest


def _copies(
    tensors: Mapping[str, Tensor], *, dtype: torch.dtype | None, device: torch.device | None = None
) -> dict[str, Tensor]:
    """Copy tensors whose memory the receiver will reuse."""
    return {
        name: tensor.detach().to(device or tensor.device, dtype or tensor.dtype, copy=True)
        for name, tensor in tensors.items()
    }


def _is_due(version: int, *, since: int, every: int) -> bool:
    """True if a multiple of `every` was reached since then, even if that version was skipped."""
    return version // every > since // every
