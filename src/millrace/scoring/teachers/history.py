"""What of the policy's past a self-teacher keeps: a moving average, or some versions as they were.

Promise: what due() returns is complete, belongs to one version, and stays as it is until the next
take(). Memory is bounded: an average is one copy of the weights in float32 where the teacher
computes; a lag of k is k + 1 copies at most, in the host's memory, in the type they travel in.
Versions may be left out on their way here. An average then gives the newer one the weight of all
that it stands for; a lag serves the newest version that is old enough.

With adapters it is their tensors that are kept or averaged. Used by one thread.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class Following:
    """Which of the policy's past a teacher is: one of lag and ema."""

    lag: int | None = None  # versions back
    ema: float | None = None  # what an average keeps of itself when a version is added
    every: int = 1  # versions from one refresh to the next

    def history(
        self, start: Mapping[str, Tensor] | None, *, version: int
    ) -> "AveragedWeights | LaggedWeights":
        """`start` is `version` of the weights, on the teacher's device; None = not known."""
        if self.ema is not None:
            return AveragedWeights(start, decay=self.ema, every=self.every, version=version)
        assert self.lag is not None
        return LaggedWeights(lag=self.lag, every=self.every, version=version)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Due:
    """What the teacher shall hold from now on."""

    version: int  # the newest that is in it
    tensors: Mapping[str, Tensor]


class AveragedWeights:
    def __init__(
        self, start: Mapping[str, Tensor] | None, *, decay: float, every: int, version: int
    ) -> None:
        """Without a `start`, the first version that comes is one."""
        self._decay = decay
        self._every = every
        self._version = version  # the newest in it
        self._refreshed_at = version
        self._average = None if start is None else _copies(start, dtype=torch.float32)

    def take(self, version: int, tensors: Mapping[str, Tensor]) -> Due | None:
        """A newer version; returns what is due to be served now, if anything is."""
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
        return Due(version=version, tensors=self._average)


class LaggedWeights:
    def __init__(self, *, lag: int, every: int, version: int) -> None:
        self._lag = lag
        self._every = every
        self._served = version
        self._refreshed_at = version
        self._kept: list[Due] = []  # ascending; all but the first newer than the lag allows

    def take(self, version: int, tensors: Mapping[str, Tensor]) -> Due | None:
        """A newer version; returns what is due to be served now, if anything is."""
        copies = _copies(tensors, dtype=None, device=torch.device("cpu"))
        self._kept.append(Due(version=version, tensors=copies))
        old_enough = [due for due in self._kept if due.version <= version - self._lag]
        if not old_enough:
            return None
        newest = old_enough[-1]
        self._kept = [due for due in self._kept if due.version >= newest.version]
        is_due = _is_due(version, since=self._refreshed_at, every=self._every)
        if not is_due or newest.version <= self._served:
            return None
        self._served, self._refreshed_at = newest.version, version
        return newest

    @property
    def num_kept(self) -> int:
        return len(self._kept)


def _copies(
    tensors: Mapping[str, Tensor], *, dtype: torch.dtype | None, device: torch.device | None = None
) -> dict[str, Tensor]:
    """Of tensors that are lent."""
    return {
        name: tensor.detach().to(device or tensor.device, dtype or tensor.dtype, copy=True)
        for name, tensor in tensors.items()
    }


def _is_due(version: int, *, since: int, every: int) -> bool:
    """True if a version at which to refresh has come; it may itself have been left out."""
    return version // every > since // every
