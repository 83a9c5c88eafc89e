"""The learner: one batch, one step, one version.

Promise: trainer logprobs are those of the distribution each token was drawn from (its temperature,
its kept ids). An update whose loss or gradient is not finite is skipped: weights and optimizer stay
as they were, and the step makes its version without it. A microbatch that does not fit into memory
is split, and the step is the same.

Master weights and optimizer state are float32; bfloat16, or float16 with a scaled loss, is used for
computing only. The model stays in eval mode: dropout would make the trainer's distribution another
one than the engine's. With an adapter, that alone is trained, published and saved.
Used by one thread. T = rows of a microbatch, N = trained tokens of it, D = hidden size.
"""

import dataclasses
import math
import sys
from dataclasses import dataclass
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from millrace.core.errors import CheckpointError, RunFailed
from millrace.core.microbatch import Batch, Microbatch
from millrace.models.fused_logprobs import chunked_token_logprobs
from millrace.models.fused_norm import fuse_norms
from millrace.models.loading import hidden_states, without_progress_bars
from millrace.models.logprobs import KeptRows
from millrace.models.packed_layout import PackedLayout
from millrace.models.trained_adapter import TrainedAdapter
from millrace.training import layers
from millrace.training.loss_scale import LossScale
from millrace.training.losses import Adapts, Anchored, Loss, TokenBatch
from millrace.training.metrics import StepMetrics
from millrace.training.optimizer import Schedule, build_optimizer
from millrace.training.splitting import halves
from millrace.training.token_batches import as_tensor, token_batch

STATE_FILE = "trainer_state.pt"


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Update:
    """What became of one batch; where it is not finite, nothing was changed."""

    metrics: StepMetrics
    num_splits: int
    grad_norm: float
    is_finite: bool


class Trainer:
    """`model` is float32 and was loaded with PACKED_ATTENTION."""

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        loss: Loss,
        adapter: TrainedAdapter | None = None,  # in the model; else all weights are trained
        schedule: Schedule,
        betas: tuple[float, float] = (0.9, 0.95),
        weight_decay: float = 0.0,
        max_grad_norm: float = 1.0,
        compute_dtype: torch.dtype = torch.float32,
        logprob_chunk: int = 1024,
        gradient_checkpointing: bool = False,
        compile_layers: bool = False,
    ) -> None:
        assert all(parameter.dtype == torch.float32 for parameter in model.parameters())
        self.model = model
        self.steps_done = 0  # = the Version of the weights
        self.skipped: tuple[int, ...] = ()  # of the last step: which of its batches taught nothing
        self._loss = loss
        self._adapter = adapter
        self._schedule = schedule
        self._max_grad_norm = max_grad_norm
        self._compute_dtype = compute_dtype
        self._scale = LossScale(is_on=compute_dtype is torch.float16)
        self._logprob_chunk = logprob_chunk
        self._optimizer = build_optimizer(model, betas=betas, weight_decay=weight_decay)
        self._compiles = compile_layers
        self._most_rows = sys.maxsize  # that have not yet been too many for the memory
        if compile_layers:
            layers.compile_layers(model)
        elif model.device.type == "cpu":
            fuse_norms(model)
        if gradient_checkpointing:
            layers.checkpoint_layers(model)

    def step(self, *batches: Batch) -> dict[str, float]:
        """One version: an optimizer update with each of the batches; returns their metrics.

        A batch whose update is skipped has no part in the metrics, unless all are.
        """
        assert batches, "a step learns something"
        num_proximal = 0  # forward passes that only ask what the policy before the step says
        # In the first update the policy before the step is the one that is computed anyway.
        if len(batches) > 1 and isinstance(self._loss, Anchored) and self._loss.needs_proximal:
            batches = tuple(self._with_proximal(batch) for batch in batches)
            num_proximal = sum(len(batch.microbatches) for batch in batches)
        learning_rate = self._schedule.at(self.steps_done)
        for group in self._optimizer.param_groups:
            group["lr"] = learning_rate
        updates = [self._update(batch) for batch in batches]
        self.skipped = tuple(i for i, update in enumerate(updates) if not update.is_finite)
        self.steps_done += 1
        told = [update for update in updates if update.is_finite] or updates
        metrics = StepMetrics()
        for update in told:
            metrics.extend(update.metrics)
        summary = metrics.summary()
        if isinstance(self._loss, Adapts) and told[0].is_finite:
            self._loss = self._loss.adapted(summary)
        return {
            **summary,
            "loss": summary["loss"] / len(told),
            "microbatch_splits": float(sum(update.num_splits for update in updates)),
            "loss_scale": self._scale.value,
            "proximal_microbatches": float(num_proximal),
            "grad_norm": sum(update.grad_norm for update in told) / len(told),
            "learning_rate": learning_rate,
            "updates_skipped": float(len(self.skipped)),
        }

    def token_logprobs(self, microbatch: Microbatch) -> tuple[Tensor, Tensor]:
        """Trainer logprobs and entropies [N] of the trained tokens, in order; differentiable."""
        device = self.model.device
        halves_precision = self._compute_dtype is not torch.float32
        with torch.autocast(device.type, dtype=self._compute_dtype, enabled=halves_precision):
            hidden = hidden_states(
                self.model,
                input_ids=as_tensor(microbatch.tokens, np.int64, device)[None],
                position_ids=as_tensor(microbatch.positions, np.int64, device)[None],
                layout=PackedLayout.of(
                    microbatch.lengths, parents=microbatch.parents, device=device
                ),
            )  # [T, D]
            kept = microbatch.kept
            return chunked_token_logprobs(
                self.model,
                hidden.index_select(0, as_tensor(microbatch.predictors, np.int64, device)),
                as_tensor(microbatch.targets, np.int64, device),
                temperatures=as_tensor(microbatch.temperatures, np.float32, device),
                kept=None if kept is None else KeptRows.of(kept, device=device),
                chunk=self._logprob_chunk,
                compiled=self._compiles,
            )

    def named_weights(self) -> dict[str, Tensor]:
        """What a version is made of: the adapter's tensors or else every parameter once, by name;
        tied ones under the first of their names."""
        if self._adapter is not None:
            return self._adapter.named_weights()
        return {name: parameter.detach() for name, parameter in self.model.named_parameters()}

    def save(self, folder: Path) -> None:
        """Write the model as a Hugging Face directory, or the adapter as a PEFT one, and beside it
        what a resumed run needs."""
        if self._adapter is not None:
            self._adapter.save(folder)
        else:
            with without_progress_bars():
                self.model.save_pretrained(folder)
        random = {"cpu": torch.get_rng_state()}
        if self.model.device.type == "cuda":
            random["cuda"] = torch.cuda.get_rng_state(self.model.device)
        state = {
            "steps_done": self.steps_done,
            "optimizer": self._optimizer.state_dict(),
            "random": random,
            "loss": self._loss.state() if isinstance(self._loss, Adapts) else {},
        }
        # To a file object: given a path, torch.save loses the reason why a write failed.
        with (folder / STATE_FILE).open("wb") as file:
            torch.save(state, file)

    def save_merged(self, folder: Path) -> None:
        """Write the model with its adapter merged into it, as a Hugging Face directory."""
        assert self._adapter is not None, "only adapters can be merged"
        self._adapter.save_merged(folder)

    def restore(self, folder: Path) -> None:
        """Go on where save() was called; a model without an adapter was loaded from that folder."""
        if self._adapter is not None:
            self._adapter.load(folder)
        try:
            state: dict[str, Any] = torch.load(
                folder / STATE_FILE, map_location="cpu", weights_only=True
            )
            self._optimizer.load_state_dict(state["optimizer"])
            self.steps_done = state["steps_done"]
            if isinstance(self._loss, Adapts):
                self._loss = self._loss.with_state(state["loss"])
        except (OSError, EOFError, RuntimeError, ValueError, KeyError, UnpicklingError) as error:
            raise CheckpointError(
                f"The trainer state in {str(folder)!r} cannot be read ({type(error).__name__});"
                " remove that checkpoint to resume from the one before it."
            ) from error
        torch.set_rng_state(state["random"]["cpu"])
        if self.model.device.type == "cuda" and "cuda" in state["random"]:
            torch.cuda.set_rng_state(state["random"]["cuda"], self.model.device)

    def state_bytes(self) -> int:
        """About what save() writes: the weights, and the optimizer's two moments of each."""
        return 3 * sum(w.numel() * w.element_size() for w in self.named_weights().values())

    def merged_bytes(self) -> int:
        """About what save_merged() writes."""
        return sum(p.numel() * p.element_size() for p in self.model.parameters())

    def accumulate(self, batch: Batch) -> tuple[StepMetrics, int]:
        """The gradient of the batch; returns its metrics and how many microbatches were split.

        A microbatch that does not fit into memory may have left half of its gradient behind, so the
        batch begins anew, and it and later ones of its size are split.
        """
        while True:
            parts, num_splits = self._fitting(batch)
            metrics = StepMetrics()
            self._optimizer.zero_grad(set_to_none=True)
            for part in parts:
                if not self._learn(part, batch, metrics):
                    self._lower_limit(part)
                    break
            else:
                self._scale.unscale(p.grad for p in self.model.parameters() if p.grad is not None)
                return metrics, num_splits

    def _update(self, batch: Batch) -> _Update:
        """One optimizer update, if it is finite. Where float16 overflowed, the gradient is computed
        again with a smaller scale."""
        assert batch.num_trained_tokens > 0, "a batch without trained tokens is no batch"
        scale = self._scale.value
        while True:
            metrics, num_splits = self.accumulate(batch)
            norm = torch.nn.utils.clip_grad_norm_(
                self.model.parameters(), max_norm=self._max_grad_norm
            )
            loss, grad_norm = torch.stack([metrics.loss, norm.double()]).tolist()
            overflowed = math.isfinite(loss) and not math.isfinite(grad_norm)
            if not (overflowed and self._scale.lower()):
                break
        is_finite = math.isfinite(loss) and math.isfinite(grad_norm)
        if is_finite:
            self._optimizer.step()
            self._scale.succeeded()
        else:
            self._scale.value = scale  # which was not the reason
        return _Update(
            metrics=metrics, num_splits=num_splits, grad_norm=grad_norm, is_finite=is_finite
        )

    @torch.no_grad()
    def _with_proximal(self, batch: Batch) -> Batch:
        """The batch, with what the trainer says before it learns from any of the step's batches."""
        while True:
            parts: list[Microbatch] = []
            for part in self._fitting(batch)[0]:
                try:
                    logprobs, _ = self.token_logprobs(part)
                except torch.OutOfMemoryError:
                    self._lower_limit(part)
                    break
                proximal = logprobs.cpu().numpy()
                parts.append(dataclasses.replace(part, proximal_logprobs=proximal))
            else:
                return dataclasses.replace(batch, microbatches=tuple(parts))

    def _lower_limit(self, part: Microbatch) -> None:
        """`part` was too much for the memory; raises RunFailed if it cannot be split."""
        self._most_rows = len(part.tokens) - 1
        if halves(part) is None:
            raise RunFailed(_too_long(len(part.tokens)))

    def _fitting(self, batch: Batch) -> tuple[list[Microbatch], int]:
        """The batch's microbatches with trained tokens, split where they have too many rows."""
        waiting = [m for m in batch.microbatches if len(m.targets)][::-1]
        parts: list[Microbatch] = []
        num_splits = 0
        while waiting:
            part = waiting.pop()
            both = halves(part) if len(part.tokens) > self._most_rows else None
            if both is None:
                parts.append(part)
            else:
                waiting += both[::-1]
                num_splits += 1
        return parts, num_splits

    def _learn(self, microbatch: Microbatch, batch: Batch, metrics: StepMetrics) -> bool:
        """Add its gradient; False = it does not fit into memory."""
        try:
            tokens = self._token_batch(microbatch, batch)
            loss, named = self._loss(tokens)
            (loss * self._scale.value).backward()
            metrics.add(tokens, loss=loss.detach(), named=named)
        except torch.OutOfMemoryError:
            return False
        return True

    def _token_batch(self, microbatch: Microbatch, batch: Batch) -> TokenBatch:
        logprobs, entropies = self.token_logprobs(microbatch)
        return token_batch(
            microbatch, batch, logprobs=logprobs, entropies=entropies, version=self.steps_done
        )


def _too_long(num_tokens: int) -> str:
    return (
        f"A sequence of {num_tokens} tokens does not fit into the trainer's memory; set"
        " trainer.gradient_checkpointing to true, or lower sampling.max_new_tokens"
        " (trainer.microbatch_tokens bounds several sequences together, not one)."
    )
