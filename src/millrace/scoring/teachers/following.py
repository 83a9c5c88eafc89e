"""How a teacher comes by the policy's versions, what becomes of them there, and what is left of it
when its process is lost.
"""

import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from safetensors import SafetensorError
from torch import Tensor
from transformers import PreTrainedModel

from millrace.config import RunConfig
from millrace.core.files import reason
from millrace.core.protocols import WeightReceiver
from millrace.core.weight_update import WeightUpdate
from millrace.inference.embedded.live_weights import LiveWeights, PreparedWeights
from millrace.inference.embedded.lora.merging import AdapterMerger
from millrace.models.lora.factors import adapter_of
from millrace.models.lora.folders import read_checkpoint
from millrace.models.weight_file import read_weights, write_weights
from millrace.scoring.teachers.history import Due, Following
from millrace.weights.receiver import make_receiver

KEEP_S = 60.0


class History(Protocol):
    def take(self, version: int, tensors: Mapping[str, Tensor]) -> Due | None: ...


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Staged:
    prepared: PreparedWeights | None  # None = the teacher stays as it is
    stage_ms: float


class PastVersions:
    """What the teacher was made of lately, in a file. Used by the staging thread.

    It is written every KEEP_S at most: a copy of the weights is a lot to write. A process that
    begins with it goes on from there, see follow().
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._due: Due | None = None  # newer than the file
        self._kept_s = -KEEP_S  # monotonic

    def recall(self) -> Due | None:
        if not self._path.exists():
            return None
        version, tensors = read_weights(self._path)
        return Due(version=version, tensors=tensors)

    def note(self, due: Due) -> None:
        self._due = due

    def keep(self) -> None:
        if self._due is None or time.monotonic() - self._kept_s < KEEP_S:
            return
        try:
            write_weights(self._path, self._due.tensors, version=self._due.version)
        except (OSError, SafetensorError) as error:  # the run goes on; only a loss would cost more
            print(f"{self._path} cannot be written: {reason(error)}.", file=sys.stderr, flush=True)
        self._due, self._kept_s = None, time.monotonic()


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Followed:
    """The policy's weights, its past, and their way here."""

    live: LiveWeights
    history: History
    receiver: WeightReceiver
    past: PastVersions | None

    def stage(self, update: WeightUpdate) -> Staged:
        """Fetch a version, and make ready what is due. Runs in the staging thread; what it returns
        is committed or dropped before it is called again."""
        started_s = time.perf_counter()
        due = self.history.take(update.version, self.receiver.stage(update))
        if due is not None and self.past is not None:
            self.past.note(due)
        prepared = None if due is None else self.live.prepare(due.tensors, version=due.version)
        return Staged(prepared=prepared, stage_ms=(time.perf_counter() - started_s) * 1000)

    @torch.no_grad()
    def commit(self, prepared: PreparedWeights) -> None:
        self.live.commit(prepared)

    def keep(self) -> None:
        """Runs in the staging thread, before the next stage(): what is due has not changed."""
        if self.past is not None:
            self.past.keep()


def follow(
    model: PreTrainedModel,
    following: Following,
    config: RunConfig,
    *,
    version: int,
    adapter: Path | None,
    past: PastVersions | None = None,
) -> Followed:
    """`model` is `version` of the policy, with `adapter` on top of it if there is one. What `past`
    has kept is newer, and takes its place."""
    merger = None if config.lora is None else AdapterMerger(model, adapter_of(model, config.lora))
    live = LiveWeights(model, version=version, merger=merger, bank=None)
    start: Mapping[str, Tensor] | None = dict(model.named_parameters())
    if config.lora is not None:
        start = None if adapter is None else read_checkpoint(adapter)
    if past is not None and (recalled := past.recall()) is not None:
        start = {name: tensor.to(model.device) for name, tensor in recalled.tensors.items()}
        version = recalled.version
    if start is not None and (adapter is not None or version != live.version):
        with torch.no_grad():
            live.commit(live.prepare(start, version=version))
    return Followed(
        live=live,
        past=past,
        history=following.history(start, version=version),
        receiver=make_receiver(
            config.weights.transport,
            expected=live.shapes,
            dtype=getattr(torch, config.travel_dtype),
            device=model.device,
            payload=config.weights.payload,
            timeout_s=config.weights.timeout_s,
        ),
    )
