"""The weights of a self-teacher: receives the policy's versions, applies them, and saves them.

A restarted process continues from the saved file instead of the run's starting weights.
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
from millrace.core.protocols import WeightReceiver
from millrace.core.records import WeightUpdate
from millrace.inference.embedded.live_weights import LiveWeights, PreparedWeights
from millrace.inference.embedded.lora.bank import AdapterMerger
from millrace.models.loading import read_weights, resolve_dtype, write_weights
from millrace.models.lora.factors import adapter_of
from millrace.models.lora.folders import read_checkpoint
from millrace.scoring.teachers.history import (
    AveragedWeights,
    HistorySettings,
    LaggedWeights,
    VersionedTensors,
)
from millrace.weights.transport import make_receiver

SAVE_EVERY_S = 60.0  # writing a copy of all weights is expensive


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Staged:
    """The outcome of staging one update."""

    prepared: PreparedWeights | None  # None = the teacher keeps its weights
    stage_ms: float


class SavedWeights:
    """The file with the teacher's latest weights. Used by the staging thread.

    It is written at most every SAVE_EVERY_S.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._unsaved: VersionedTensors | None = None
        self._saved_s = -SAVE_EVERY_S  # monotonic

    def load(self) -> VersionedTensors | None:
        if not self._path.exists():
            return None
        version, tensors = read_weights(self._path)
        return VersionedTensors(version=version, tensors=tensors)

    def update(self, weights: VersionedTensors) -> None:
        self._unsaved = weights

    def save(self) -> None:
        if self._unsaved is None or time.monotonic() - self._saved_s < SAVE_EVERY_S:
            return
        try:
            write_weights(self._path, self._unsaved.tensors, version=self._unsaved.version)
        except (OSError, SafetensorError) as error:
            # Not fatal: a restarted teacher would only start from older weights.
            print(f"{self._path} cannot be written: {reason(error)}.", file=sys.stderr, flush=True)
        self._unsaved, self._saved_s = None, time.monotonic()


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class SelfTeacherWeights:
    """The teacher's live weights, the history behind them, and the receiver of new versions."""

    live: LiveWeights
    history: AveragedWeights | LaggedWeights
    receiver: WeightReceiver
    saved: SavedWeights | None

    def stage(self, update: WeightUpdate) -> Staged:
        """Receive a version and prepare what becomes visible. Runs in the staging thread. The
        caller commits or drops the result before the next call."""
        started_s = time.perf_counter()
        due = self.history.take(update.version, self.receiver.stage(update))
        if due is not None and self.saved is not None:
            self.saved.update(due)
        prepared = None if due is None else self.live.prepare(due.tensors, version=due.version)
        return Staged(prepared=prepared, stage_ms=(time.perf_counter() - started_s) * 1000)

    @torch.no_grad()
    def commit(self, prepared: PreparedWeights) -> None:
        self.live.commit(prepared)

    def save(self) -> None:
        """Runs in the staging thread before the next stage(), so the tensors do not change."""
        if self.saved is not None:
            self.saved.save()


def build_self_teacher_weights(
    model: PreTrainedModel,
    history: HistorySettings,
    config: RunConfig,
    *,
    version: int,
    adapter: Path | None,
    saved: SavedWeights | None = None,
) -> SelfTeacherWeights:
    """`model` holds `version` of the policy, without its `adapter`. If `saved` has weights, these
    are newer and replace both."""
    merger = None if config.lora is None else AdapterMerger(model, adapter_of(model, config.lora))
    live = LiveWeights(model, version=version, merger=merger, bank=None)
    start: Mapping[str, Tensor] | None = dict(model.named_parameters())
    if config.lora is not None:
        start = None if adapter is None else read_checkpoint(adapter)
    if saved is not None and (newer := saved.load()) is not None:
        start = {name: tensor.to(model.device) for name, tensor in newer.tensors.items()}
        version = newer.version
    if start is not None and (adapter is not None or version != live.version):
        with torch.no_grad():
            live.commit(live.prepare(start, version=version))
    return SelfTeacherWeights(
        live=live,
        saved=saved,
        history=history.build(start, version=version),
        receiver=make_receiver(
            config.weights.transport,
            expected=live.shapes,
            dtype=resolve_dtype(config.travel_dtype, model.device),
            device=model.device,
            payload=config.weights.payload,
            timeout_s=config.weights.timeout_s,
        ),
    )
