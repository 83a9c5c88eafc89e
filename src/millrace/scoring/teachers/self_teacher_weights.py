"""The weights of a self-teacher: receives the policy's versions, applies them, and saves them.

A teacher is a moving average of the versions, or lags some versions behind. Some versions may be
skipped on their way here. An average then gives the next version the weight of all it replaces; a
lag serves the newest version that is old enough. In a LoRA run the adapter's tensors are kept or
averaged. A restarted process continues from the saved file instead of the run's starting weights.

Promise: take() returns tensors that are complete, belong to one version, and stay unchanged until
the next take(). Memory is bounded. An average is one float32 copy of the weights on the teacher's
device. A lag of k is at most k + 1 copies in host memory, in the dtype they arrive in.
"""

import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from torch import Tensor
from transformers import PreTrainedModel

from millrace.config import RunConfig
from millrace.core.files import reason
from millrace.core.records import WeightUpdate
from millrace.inference.embedded.adapters import AdapterMerger
from millrace.inference.embedded.live_weights import LiveWeights, PreparedWeights
from millrace.models.loading import read_weights, resolve_dtype, write_weights
from millrace.models.lora.factors import adapter_of
from millrace.models.lora.folders import read_checkpoint
from millrace.models.routing import policy_tensors
from millrace.weights.transport import make_receiver

SAVE_EVERY_S = 60.0  # writing a copy of all weights is expensive


@dataclass(frozen=True, kw_only=True, slots=True)
class HistorySettings:
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
        self._version = self._refreshed_at = version  # the newest version in the average
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
        self._served = self._refreshed_at = version
        self.kept: list[VersionedTensors] = []  # ascending; all but the first are too young

    def take(self, version: int, tensors: Mapping[str, Tensor]) -> VersionedTensors | None:
        """As AveragedWeights.take()."""
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


class SelfTeacherWeights:
    """stage() and save() run in the staging thread, everything else in the main thread."""

    def __init__(
        self,
        model: PreTrainedModel,
        history: HistorySettings,
        config: RunConfig,
        *,
        version: int,
        adapter: Path | None,
        saved_path: Path,
    ) -> None:
        """`model` holds `version` of the policy, without its `adapter`. If the file at `saved_path`
        exists, its weights are newer and replace both."""
        lora = config.lora
        merger = None if lora is None else AdapterMerger(model, adapter_of(model, lora))
        self._live = LiveWeights(model, version=version, merger=merger, bank=None)
        start: Mapping[str, Tensor] | None = policy_tensors(model)
        if lora is not None:
            start = None if adapter is None else read_checkpoint(adapter)
        if saved_path.exists():
            version, tensors = read_weights(saved_path)
            start = {name: tensor.to(model.device) for name, tensor in tensors.items()}
        if start is not None and (adapter is not None or version != self._live.version):
            with torch.no_grad():
                self._live.commit(self._live.prepare(start, version=version))
        self._history = history.build(start, version=version)
        self._receiver = make_receiver(
            config.weights.transport,
            expected=self._live.shapes,
            dtype=resolve_dtype(config.transfer_dtype, model.device),
            device=model.device,
            payload=config.weights.payload,
            timeout_s=config.weights.timeout_s,
            role=saved_path.stem,  # its scorer's name: it shares its versions with no other process
        )
        self._saved_path = saved_path
        self._unsaved: VersionedTensors | None = None
        self._saved_s = -SAVE_EVERY_S  # monotonic

    @property
    def version(self) -> int | None:
        return self._live.version

    def stage(self, update: WeightUpdate) -> tuple[PreparedWeights | None, float]:
        """Receive a version. Returns the weights that become visible, or None to keep those in use,
        and the milliseconds it took. The caller commits or drops them before the next call."""
        started_s = time.perf_counter()
        due = self._history.take(update.version, self._receiver.stage(update))
        prepared = None
        if due is not None:
            self._unsaved = due
            prepared = self._live.prepare(due.tensors, version=due.version)
        return prepared, (time.perf_counter() - started_s) * 1000

    @torch.no_grad()
    def commit(self, prepared: PreparedWeights) -> None:
        self._live.commit(prepared)

    def save(self) -> None:
        """Write the latest weights, at most every SAVE_EVERY_S. Runs before the next stage(), so
        the tensors do not change."""
        if self._unsaved is None or time.monotonic() - self._saved_s < SAVE_EVERY_S:
            return
        try:
            write_weights(self._saved_path, self._unsaved.tensors, version=self._unsaved.version)
        except (OSError, SafetensorError) as error:
            # Not fatal: a restarted teacher would only start from older weights.
            message = f"{self._saved_path} cannot be written: {reason(error)}."
            print(message, file=sys.stderr, flush=True)
        self._unsaved, self._saved_s = None, time.monotonic()

    def close(self) -> None:
        self._receiver.close()
