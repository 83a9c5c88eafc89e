"""The weights of a self-teacher: receives the policy's versions, applies them, and saves them.

A restarted process continues from the saved file instead of the run's starting weights.
"""

import sys
import time
from collections.abc import Mapping
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
from millrace.scoring.teachers.history import HistorySettings, VersionedTensors
from millrace.weights.transport import make_receiver

SAVE_EVERY_S = 60.0  # writing a copy of all weights is expensive


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
        start: Mapping[str, Tensor] | None = dict(model.named_parameters())
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
            dtype=resolve_dtype(config.travel_dtype, model.device),
            device=model.device,
            payload=config.weights.payload,
            timeout_s=config.weights.timeout_s,
        )
        self._saved_path = saved_path
        self._unsaved: VersionedTensors | None = None
        self._saved_s = -SAVE_EVERY_S  # monotonic

    @property
    def version(self) -> int | None:
        """The version that the model holds."""
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
