"""The trainer: one step learns from one or more batches and makes one version.

Promise: an update whose loss or gradient is not finite is skipped. Weights and optimizer stay as
they were, and the step still makes its version.

With an adapter, only the adapter is trained, published and saved. With a critic, the critic
computes the advantages, and it learns from every batch that the policy learns from.
Used by one thread.
"""

import math
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import numpy as np
from safetensors import SafetensorError
from torch import Tensor

from millrace.core.errors import CheckpointError, RunFailed
from millrace.core.microbatch import Batch, Microbatch
from millrace.training.adapters.shared_passes import PolicyBatch, clipped_gradients
from millrace.training.checkpoints.directory import CRITIC
from millrace.training.checkpoints.shards import own_parts, sharded_tensors
from millrace.training.checkpoints.snapshot import (
    OPTIMIZER,
    STATE_FORMAT,
    Parts,
    TrainerSnapshot,
    host_copy,
    load_state,
    random_state,
    restore_random_state,
)
from millrace.training.critic import Critic
from millrace.training.losses.loss import AdaptiveLoss, Loss, has_trait
from millrace.training.metrics import (
    HostSums,
    StepMetrics,
    expert_load,
    mixed_context,
    replayed_rows,
    summarize,
)
from millrace.training.optimizer import Schedule
from millrace.training.policy_model import PolicyModel
from millrace.training.token_batches import PolicyOutput, token_batch
from millrace.training.trainable_model import Gradient

# What torch and safetensors raise for files that are missing, damaged, or of another model.
_FILE_ERRORS = (OSError, EOFError, UnpicklingError, SafetensorError)
_READING_ERRORS = (*_FILE_ERRORS, RuntimeError, ValueError, KeyError)


@dataclass(eq=False)
class Trainer:
    policy: PolicyModel
    _: KW_ONLY
    loss: Loss
    critic: Critic | None = None  # None = batches bring their advantages
    schedule: Schedule
    epochs: int = 1  # passes of a step over its batches
    router_aux_loss: float = 0.0  # coefficient of PolicyModel.router_aux_loss()
    router_bias_rate: float = 0.0  # of PolicyModel.balance_experts()
    exact_kv: str | None = None  # engine.kv in exact mode; None = logprobs may differ

    def __post_init__(self) -> None:
        self.steps_done = 0  # = the Version of the weights
        self.skipped: tuple[int, ...] = ()  # batches of the last step whose updates were skipped
        self.reported: dict[int, np.ndarray] = {}  # of the last step, see HostSums
        self._has_updated = False  # since the step began

    def step(self, *batches: Batch) -> dict[str, float]:
        """Make one version: in each epoch one optimizer update per batch. Returns the metrics of
        all updates, without those that were skipped, unless all were."""
        return step_together([(self, batches)])[0]

    def begin(self, batches: tuple[Batch, ...]) -> "StepInProgress":
        assert batches, "a step needs a batch"
        if not batches[0].microbatches:  # of several policies, this one sampled none of the tokens
            return StepInProgress(trainer=self, batches=(), learning_rate=0.0, num_proximal=0)
        if self.critic is not None:
            batches = self.critic.estimate_advantages(batches)
        batches, num_proximal = self._with_logprobs(batches)
        self._has_updated = False
        return StepInProgress(
            trainer=self,
            batches=batches * self.epochs,
            learning_rate=0.0 if self._is_critic_warmup else self.schedule.at(self.steps_done),
            num_proximal=num_proximal,
        )

    def finish(self, step: "StepInProgress") -> dict[str, float]:
        updates, learning_rate = step.updates, step.learning_rate
        self.skipped = tuple(i for i, update in enumerate(updates) if not update.is_finite)
        if not updates:
            self.reported = {}
            return {"batch/trained_tokens": 0.0}
        self.steps_done += 1
        counted = [update for update in updates if update.is_finite] or updates
        metrics = _merged([_merged(update.outputs) for update in counted]).on_host()
        num_splits = sum(update.num_splits for update in updates)
        found = self.policy.ranks.gather(
            (metrics, num_splits, step.num_proximal, *replayed_rows(step.batches)),
            tuple[HostSums, int, int, int, int],
        )
        sums, splits, proximal, replayed, computed = zip(*found, strict=True)
        summary = summarize(sums)
        if num := int(summary.get("mismatch/differing_logprobs", 0)):
            raise RunFailed(
                f"In step {self.steps_done}, {num} of {int(summary['mismatch/compared_logprobs'])}"
                " on-policy logprobs of the trainer are not those of the engine, bit for bit, as"
                " fidelity.mode = 'exact' promises; run both on equal devices with equal libraries,"
                " or set it to 'fast'."
            )
        self.reported = {number: own for rank in sums for number, own in rank.reported.items()}
        if self.router_bias_rate and counted[0].is_finite and learning_rate:
            load = expert_load(sums)
            self.policy.balance_experts(load, rate=self.router_bias_rate)
        if isinstance(self.loss, AdaptiveLoss) and counted[0].is_finite:
            self.loss = self.loss.adapted(summary)
        if self.critic is not None:
            summary |= self.critic.step_metrics()
        if has_trait(self.loss, "scales_step"):
            summary["step_scale"] = sum(update.step_scale for update in counted) / len(counted)
        if self.policy.replays_routes:
            summary["routing/replayed_share"] = sum(replayed) / sum(computed)
        return {
            **summary,
            "loss": summary["loss"] / len(counted),
            "batch/microbatch_splits": float(sum(splits)),
            "loss_scale": self.policy.loss_scale,
            "batch/proximal_microbatches": float(sum(proximal)),
            "grad_norm": sum(update.norm for update in counted) / len(counted),
            "learning_rate": learning_rate,
            "skipped/updates": float(len(self.skipped)),
        }

    def held_out_loss(self, batch: Batch) -> float:
        """Mean cross-entropy of the trained tokens of a batch, which nothing is learned from."""
        parts = self.policy.with_proximal_logprobs(batch).microbatches
        found = [p.proximal_logprobs for p in parts if p.proximal_logprobs is not None]
        own = sum(float(logprobs.sum(dtype=np.float64)) for logprobs in found)
        (total,) = self.policy.ranks.sum([own])
        return -total / self.policy.ranks.num_per_share / batch.num_trained_tokens

    def limit_rows(self, most: int) -> None:
        """Split microbatches with more rows from now on."""
        for model in filter(None, (self.policy, self.critic)):
            model.row_limit.most = most

    def snapshot(self, *, merged_into: str | None = None) -> TrainerSnapshot:
        """A copy of everything that a resumed run needs; see PolicyModel.writers()."""
        parts: Parts = {}
        writers = self.policy.writers(parts, merged_into=merged_into)
        state: dict[str, Any] = {
            "format": STATE_FORMAT,
            "steps_done": self.steps_done,
            "optimizer": self.policy.optimizer_state(),
            "random": random_state(self.policy.device),
            "loss": self.loss.state() if isinstance(self.loss, AdaptiveLoss) else {},
        }
        parts[OPTIMIZER] = own_parts(sharded_tensors(state["optimizer"]))
        if self.critic is not None:
            state["critic"] = self.critic.state()
            parts[CRITIC] = own_parts(self.critic.weights())
            moments = own_parts(sharded_tensors(state["critic"]["optimizer"]))
            parts[f"{CRITIC}/{OPTIMIZER}"] = moments
        return TrainerSnapshot(state=host_copy(state), writers=tuple(writers), parts=parts)

    def restore(self, folder: Path) -> None:
        """Continue from a snapshot; a model without an adapter was loaded from that folder."""
        self.policy.load_adapter(folder)
        try:
            state = load_state(folder)
            self.policy.load_optimizer_state(state["optimizer"], shards=folder / OPTIMIZER)
            self.steps_done = state["steps_done"]
            if isinstance(self.loss, AdaptiveLoss):
                self.loss = self.loss.with_state(state["loss"])
            if self.critic is not None:
                self.critic.restore(folder / CRITIC, state["critic"])
        except _READING_ERRORS as error:
            raise CheckpointError(
                f"The trainer state in {str(folder)!r} cannot be read ({type(error).__name__});"
                " remove that checkpoint to resume from the one before it."
            ) from error
        restore_random_state(state["random"], self.policy.device)

    def state_bytes(self) -> int:
        """Approximate size of a snapshot, in memory and on the disk."""
        of_critic = 0 if self.critic is None else self.critic.state_bytes()
        return self.policy.state_bytes() + of_critic

    def accumulate(self, batch: Batch) -> tuple[Tensor, StepMetrics]:
        work = self.pending(batch)
        gradient = self.policy.accumulate(work.batch, lambda part: work.loss(part, None))
        return gradient.loss, _merged(gradient.outputs)

    @property
    def _is_critic_warmup(self) -> bool:
        return self.critic is not None and self.steps_done < self.critic.warmup_steps

    def _with_logprobs(self, batches: tuple[Batch, ...]) -> tuple[tuple[Batch, ...], int]:
        """The batches with the proximal and reference logprobs that the loss needs, and how many
        microbatches took a forward pass for the proximal ones."""
        num_proximal = 0
        # In the first update of a step, proximal logprobs are the trainer's own.
        if len(batches) * self.epochs > 1 and has_trait(self.loss, "needs_proximal"):
            batches = tuple(map(self.policy.with_proximal_logprobs, batches))
            parts = [part for batch in batches for part in batch.microbatches]
            num_proximal = sum(len(part.targets) > 0 for part in parts)
        if has_trait(self.loss, "needs_reference"):
            batches = tuple(map(self.policy.with_reference_logprobs, batches))
        return batches, num_proximal

    def pending(self, batch: Batch) -> PolicyBatch:
        """What the gradient of a batch is computed from."""
        assert batch.num_trained_tokens > 0, "a batch has trained tokens"
        if self.router_aux_loss:
            self.policy.set_batch_load(batch)
        if has_trait(self.loss, "subtracts_baseline"):
            batch = self.policy.with_baseline(batch)
        return PolicyBatch(
            self.policy, batch, lambda part, output: self._microbatch_loss(part, batch, output)
        )

    def apply(self, gradient: Gradient, batch: Batch, *, learning_rate: float) -> Gradient:
        # The critic learns first: either both learn from a batch or neither does.
        is_finite = gradient.is_finite and (self.critic is None or self.critic.update(batch))
        scales = is_finite and has_trait(self.loss, "scales_step")
        scale = self._step_scale(gradient) if scales else 1.0
        if is_finite and not self._is_critic_warmup:
            self.policy.apply_gradient(learning_rate=scale * learning_rate)
            self._has_updated = True
        return replace(gradient, is_finite=is_finite, step_scale=scale)

    def _step_scale(self, gradient: Gradient) -> float:
        """The square root of the effective sample size, as a share of the ratios of all ranks."""
        count, ratios, squares = self.policy.ranks.sum(_merged(gradient.outputs).ratio_sums())
        return math.sqrt(ratios**2 / (count * squares))

    def _microbatch_loss(
        self, part: Microbatch, batch: Batch, output: PolicyOutput | None = None
    ) -> tuple[Tensor, StepMetrics]:
        if output is None:
            topk_ids = part.topk_ids if has_trait(self.loss, "needs_topk") else None
            output = self.policy.logprobs(part, topk_ids=topk_ids)
        tokens = token_batch(part, batch, output=output, version=self.steps_done)
        loss, named = self.loss(tokens)
        if self.router_aux_loss:
            penalties = self.policy.router_aux_loss(part)
            loss = loss + self.router_aux_loss * penalties.sum() / batch.num_trained_tokens
            named = {**named, "moe/aux_loss": penalties}
        metrics = StepMetrics()
        load = self.policy.expert_load(part)
        metrics.add(tokens, loss=loss.detach(), named=named, expert_load=load)
        metrics.report(tokens, part.reported)
        if self.exact_kv is not None and not self._has_updated:
            keeps = self.exact_kv == "keep" or part.routes is not None
            metrics.compare_bits(tokens, mixed_context(part) if keeps else None)
        return loss, metrics


@dataclass(kw_only=True, eq=False)
class StepInProgress:
    """A step of one trainer; without batches, it makes no version."""

    trainer: Trainer
    batches: tuple[Batch, ...]  # one update each
    learning_rate: float
    num_proximal: int  # microbatches that took a forward pass for proximal logprobs
    updates: list[Gradient] = field(default_factory=list[Gradient])


def step_together(
    work: Sequence[tuple[Trainer, tuple[Batch, ...]]], *, pass_tokens: int = 0
) -> list[dict[str, float]]:
    """Trainer.step() of several trainers, which compute their gradients in passes of at most
    `pass_tokens` rows together, as far as they share a model."""
    steps = [trainer.begin(batches) for trainer, batches in work]
    for number in range(max(len(step.batches) for step in steps)):
        due = [step for step in steps if number < len(step.batches)]
        pending = [step.trainer.pending(step.batches[number]) for step in due]
        gradients = clipped_gradients(pending, pass_tokens=pass_tokens)
        for step, gradient in zip(due, gradients, strict=True):
            rate, batch = step.learning_rate, step.batches[number]
            step.updates.append(step.trainer.apply(gradient, batch, learning_rate=rate))
    return [step.trainer.finish(step) for step in steps]


def _merged(parts: list[StepMetrics]) -> StepMetrics:
    metrics = StepMetrics()
    for part in parts:
        metrics.extend(part)
    return metrics
