"""The learner: one batch, one step, one version.

Promise: trainer logprobs are those of the distribution each token was drawn from (its temperature,
its kept ids, the experts that tokens went to). An update whose loss or gradient is not finite is
skipped: weights and optimizer stay as they were, and the step makes its version without it. A
microbatch that does not fit into memory is split, and the step is the same.

Master weights and optimizer state are float32; bfloat16, or float16 with a scaled loss, is used for
computing only. The model stays in eval mode: dropout would make the trainer's distribution another
one than the engine's. With an adapter, that alone is trained, published and saved. With a critic,
advantages are its judgement, and it learns from every batch that the policy learns from.
Used by one thread. T = rows of a microbatch, N = trained tokens of it, D = hidden size.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from torch import Tensor
from transformers import PreTrainedModel

from millrace.core.errors import CheckpointError
from millrace.core.microbatch import Batch, Microbatch
from millrace.models.fused_logprobs import chunked_distributions
from millrace.models.loading import write_model
from millrace.models.logprobs import KeptRows
from millrace.models.lora.trained import TrainedAdapter
from millrace.models.moe.routing import RouteReplay
from millrace.training.checkpoints.directory import CRITIC
from millrace.training.checkpoints.snapshot import STATE_FILE, TrainerSnapshot, host_copy
from millrace.training.critic import Critic, write_critic
from millrace.training.layers import arrange_layers
from millrace.training.losses.loss import Adapts, Anchored, Distils, Loss, Refers, TokenBatch
from millrace.training.metrics import StepMetrics, replayed_share
from millrace.training.optimizer import LossScale, Schedule, build_optimizer
from millrace.training.packing.splitting import RowLimit
from millrace.training.settings import TrainSettings
from millrace.training.token_batches import as_tensor, noted, packed_hidden_states, token_batch

# What torch and safetensors raise for files that are missing, damaged, or of another model.
_READING_ERRORS = (
    OSError,
    EOFError,
    RuntimeError,
    ValueError,
    KeyError,
    UnpicklingError,
    SafetensorError,
)


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
        critic: Critic | None = None,  # else batches bring their advantages
        replay: RouteReplay | None = None,  # of the model's routes; else its routers choose
        schedule: Schedule,
        technique: TrainSettings,
        logprob_chunk: int = 1024,
        epochs: int = 1,
        on_pass: Callable[[], None] = lambda: None,
    ) -> None:
        """`on_pass` is called before each forward pass of the policy: a step gets on."""
        assert all(parameter.dtype == torch.float32 for parameter in model.parameters())
        self.model = model
        self.steps_done = 0  # = the Version of the weights
        self.skipped: tuple[int, ...] = ()  # of the last step: which of its batches taught nothing
        self._loss = loss
        self._adapter = adapter
        self._critic = critic
        self._replay = replay
        self._schedule = schedule
        self._technique = technique
        self._scale = LossScale(is_on=technique.compute_dtype is torch.float16)
        self._logprob_chunk = logprob_chunk
        self._epochs = epochs  # that a step goes through its batches
        self._on_pass = on_pass
        self._optimizer = build_optimizer(model, technique)
        self._limit = RowLimit()
        arrange_layers(model, technique)

    def step(self, *batches: Batch) -> dict[str, float]:
        """One version: in each epoch an optimizer update with each of the batches; returns the
        metrics of all updates.

        A batch whose update is skipped has no part in the metrics, unless all are.
        """
        assert batches, "a step learns something"
        if self._critic is not None:
            batches = self._critic.judge(batches)
        num_proximal = 0  # forward passes that only ask what the policy before the step says
        # In the first update the policy before the step is the one that is computed anyway.
        is_several = len(batches) * self._epochs > 1
        if is_several and isinstance(self._loss, Anchored) and self._loss.needs_proximal:
            batches = tuple(self._with_proximal(batch) for batch in batches)
            num_proximal = sum(len(batch.microbatches) for batch in batches)
        refers = isinstance(self._loss, Refers) and self._loss.needs_reference
        if refers and self._adapter is not None:
            batches = tuple(self._with_reference(batch, self._adapter) for batch in batches)
        batches *= self._epochs
        learning_rate = 0.0 if self._policy_waits else self._schedule.at(self.steps_done)
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
            **({} if self._critic is None else self._critic.step_metrics()),
            **({} if self._replay is None else {"routing/replayed_share": replayed_share(batches)}),
            "loss": summary["loss"] / len(told),
            "batch/microbatch_splits": float(sum(update.num_splits for update in updates)),
            "loss_scale": self._scale.value,
            "batch/proximal_microbatches": float(num_proximal),
            "grad_norm": sum(update.grad_norm for update in told) / len(told),
            "learning_rate": learning_rate,
            "skipped/updates": float(len(self.skipped)),
        }

    def token_logprobs(self, microbatch: Microbatch) -> tuple[Tensor, Tensor]:
        """Trainer logprobs and entropies [N] of the trained tokens, in order; differentiable."""
        logprobs, entropies, _ = self._describe(microbatch, told=None)
        return logprobs, entropies

    def _describe(
        self, microbatch: Microbatch, *, told: np.ndarray | None
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """And those [N, K + 1] of the tokens `told` [N, K] and of all others."""
        self._on_pass()
        device = self.model.device
        if self._replay is not None:
            self._replay.begin(microbatch.routes, device=device)
        with self._technique.autocast(device):
            hidden = packed_hidden_states(self.model, microbatch)  # [T, D]
            kept = microbatch.kept
            return chunked_distributions(
                self.model,
                hidden.index_select(0, as_tensor(microbatch.predictors, np.int64, device)),
                as_tensor(microbatch.targets, np.int64, device),
                told=None if told is None else as_tensor(told, np.int64, device),
                temperatures=as_tensor(microbatch.temperatures, np.float32, device),
                kept=None if kept is None else KeptRows.of(kept, device=device),
                chunk=self._logprob_chunk,
                compiled=self._technique.compile_layers,
            )

    def named_weights(self) -> dict[str, Tensor]:
        """What a version is made of: the adapter's tensors or else every parameter once, by name;
        tied ones under the first of their names."""
        if self._adapter is not None:
            return self._adapter.named_weights()
        return {name: parameter.detach() for name, parameter in self.model.named_parameters()}

    def snapshot(self, *, merged_into: str | None = None) -> TrainerSnapshot:
        """What a resumed run needs, and the model as a Hugging Face directory or the adapter as a
        PEFT one; with `merged_into` also the model with its adapter merged, in a folder of that
        name."""
        return TrainerSnapshot(
            version=self.steps_done, state=host_copy(self._state()), parts=self._parts(merged_into)
        )

    def save(self, folder: Path) -> None:
        """Write what restore() reads, and wait for it."""
        self.snapshot().write(folder)

    def restore(self, folder: Path) -> None:
        """Go on where snapshot() was called; a model without an adapter was loaded from that
        folder."""
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
            if self._critic is not None:
                self._critic.restore(folder / CRITIC, state["critic"])
        except _READING_ERRORS as error:
            raise CheckpointError(
                f"The trainer state in {str(folder)!r} cannot be read ({type(error).__name__});"
                " remove that checkpoint to resume from the one before it."
            ) from error
        torch.set_rng_state(state["random"]["cpu"])
        if self.model.device.type == "cuda" and "cuda" in state["random"]:
            torch.cuda.set_rng_state(state["random"]["cuda"], self.model.device)

    def state_bytes(self) -> int:
        """About what a snapshot is, in memory and on the disk: the weights, and the optimizer's
        two moments of each."""
        of_policy = 3 * sum(w.numel() * w.element_size() for w in self.named_weights().values())
        return of_policy + (0 if self._critic is None else self._critic.state_bytes())

    def merged_bytes(self) -> int:
        """About what the model with its adapter merged adds to that."""
        return sum(p.numel() * p.element_size() for p in self.model.parameters())

    def accumulate(self, batch: Batch) -> tuple[StepMetrics, int]:
        """The gradient of the batch; returns its metrics and how many microbatches were split.

        A microbatch that does not fit into memory may have left half of its gradient behind, so the
        batch begins anew, and it and later ones of its size are split.
        """
        while True:
            parts, num_splits = self._limit.fitting(batch)
            metrics = StepMetrics()
            self._optimizer.zero_grad(set_to_none=True)
            for part in parts:
                if not self._learn(part, batch, metrics):
                    self._limit.lower(part)
                    break
            else:
                self._scale.unscale(p.grad for p in self.model.parameters() if p.grad is not None)
                return metrics, num_splits

    def _parts(self, merged_into: str | None) -> tuple[Callable[[Path], None], ...]:
        """Writers of the weights, each with its own copy of them."""
        parts: list[Callable[[Path], None]] = []
        if self._adapter is None:
            parts.append(partial(write_model, self.model, host_copy(self.model.state_dict())))
        else:
            parts.append(partial(self._adapter.write, host_copy(self._adapter.named_weights())))
        if merged_into is not None:
            assert self._adapter is not None, "only adapters can be merged"
            merged = host_copy(self._adapter.merged_weights())
            parts.append(lambda folder: write_model(self.model, merged, folder / merged_into))
        if self._critic is not None:
            critic = host_copy(self._critic.named_weights())
            parts.append(lambda folder: write_critic(critic, folder / CRITIC))
        return tuple(parts)

    def _state(self) -> dict[str, Any]:
        random = {"cpu": torch.get_rng_state()}
        if self.model.device.type == "cuda":
            random["cuda"] = torch.cuda.get_rng_state(self.model.device)
        state = {
            "steps_done": self.steps_done,
            "optimizer": self._optimizer.state_dict(),
            "random": random,
            "loss": self._loss.state() if isinstance(self._loss, Adapts) else {},
        }
        if self._critic is not None:
            state["critic"] = self._critic.state()
        return state

    @property
    def _policy_waits(self) -> bool:
        """True in steps in which the critic alone learns."""
        return self._critic is not None and self._critic.learns_alone(self.steps_done)

    def _update(self, batch: Batch) -> _Update:
        """One optimizer update, if it is finite. Where float16 overflowed, the gradient is computed
        again with a smaller scale."""
        assert batch.num_trained_tokens > 0, "a batch without trained tokens is no batch"
        scale = self._scale.value
        while True:
            metrics, num_splits = self.accumulate(batch)
            norm = torch.nn.utils.clip_grad_norm_(
                self.model.parameters(), max_norm=self._technique.max_grad_norm
            )
            loss, grad_norm = torch.stack([metrics.loss, norm.double()]).tolist()
            overflowed = math.isfinite(loss) and not math.isfinite(grad_norm)
            if not (overflowed and self._scale.lower()):
                break
        is_finite = math.isfinite(loss) and math.isfinite(grad_norm)
        if is_finite and self._critic is not None:  # before the policy: both learn, or none
            is_finite = self._critic.learn(batch)
        if is_finite:
            if not self._policy_waits:
                self._optimizer.step()
            self._scale.succeeded()
        else:
            self._scale.value = scale  # which was not the reason
        return _Update(
            metrics=metrics, num_splits=num_splits, grad_norm=grad_norm, is_finite=is_finite
        )

    def _with_proximal(self, batch: Batch) -> Batch:
        """What the trainer says before it learns from any of the step's batches."""
        return noted(
            batch,
            "proximal_logprobs",
            ask=lambda part: self.token_logprobs(part)[0],
            limit=self._limit,
        )

    def _with_reference(self, batch: Batch, adapter: TrainedAdapter) -> Batch:
        """What the weights beneath the adapter say, which are those that the run began with."""
        if all(part.reference_logprobs is not None for part in batch.microbatches):
            return batch  # another model was asked
        with adapter.disabled():
            return noted(
                batch,
                "reference_logprobs",
                # With routers of its own: it is asked what it would say, not what it would have.
                ask=lambda part: self.token_logprobs(replace(part, routes=None))[0],
                limit=self._limit,
            )

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
        wants_told = isinstance(self._loss, Distils) and self._loss.needs_told
        logprobs, entropies, told = self._describe(
            microbatch, told=microbatch.told_ids if wants_told else None
        )
        return token_batch(
            microbatch,
            batch,
            logprobs=logprobs,
            entropies=entropies,
            version=self.steps_done,
            told=told,
        )
