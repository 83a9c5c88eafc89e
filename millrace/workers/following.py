"""How a teacher comes by the policy's versions, and what becomes of them there."""

import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor
from transformers import PreTrainedModel

from millrace.config import RunConfig
from millrace.core.protocols import WeightReceiver
from millrace.core.weight_update import WeightUpdate
from millrace.engines.embedded.live_weights import LiveWeights, Prepared
from millrace.engines.embedded.merging import AdapterMerger
from millrace.models.adapter_folders import read_checkpoint
from millrace.models.adapters import adapter_of
from millrace.weights.history import Due, Following
from millrace.weights.receiver import make_receiver


class History(Protocol):
    def take(self, version: int, tensors: Mapping[str, Tensor]) -> Due | None: ...


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Staged:
    prepared: Prepared | None  # None = the teacher stays as it is
    stage_ms: float


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Followed:
    """The policy's weights, its past, and their way here."""

    live: LiveWeights
    history: History
    receiver: WeightReceiver

    def stage(self, update: WeightUpdate) -> Staged:
        """Fetch a version, and make ready what is due. Runs in the staging thread; what it returns
        is committed or dropped before it is called again."""
        started_s = time.perf_counter()
        due = self.history.take(update.version, self.receiver.stage(update))
        prepared = None if due is None else self.live.prepare(due.tensors, version=due.version)
        return Staged(prepared=prepared, stage_ms=(time.perf_counter() - started_s) * 1000)

    @torch.no_grad()
    def commit(self, prepared: Prepared) -> None:
        self.live.commit(prepared)


def follow(
    model: PreTrainedModel,
    following: Following,
    config: RunConfig,
    *,
    version: int,
    adapter: Path | None,
) -> Followed:
    """`model` is `version` of the policy, with `adapter` on top of it if there is one."""
    merger = None if config.lora is None else AdapterMerger(model, adapter_of(model, config.lora))
    live = LiveWeights(model, version=version, merger=merger, bank=None)
    start: Mapping[str, Tensor] | None = dict(model.named_parameters())
    if config.lora is not None:
        start = None if adapter is None else read_checkpoint(adapter)
    if adapter is not None:
        assert start is not None
        with torch.no_grad():
            live.commit(live.prepare(start, version=version))
    return Followed(
        live=live,
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
