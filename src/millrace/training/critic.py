"""From rewards and values to advantages and returns, for the critic.

Promise: what is normalised is normalised over all trained tokens of a step, however it is packed.
N = trained tokens of a microbatch, R = its rollouts.

The critic: expects returns, so that actions are judged by what they add to the expected.

Promise: every trained token of a step is judged once, by the critic as it was before the step, and
no number depends on how the step is packed. A value belongs to a state: that of the state before a
token is computed at the row that predicts the token. An update applies a finite gradient, or raises
and leaves the weights as they were.

It is a model of its own, with an optimizer of its own, and lives in the trainer's process only: it
is part of checkpoints and never published. Used by the trainer's thread.
N = trained tokens of a microbatch, R = its rollouts.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel

from millrace.core.microbatch import Batch, Microbatch
from millrace.core.returns import gae
from millrace.models.head import ValueModel
from millrace.training.layers import arrange_layers
from millrace.training.optimizer import LossScale, build_optimizer
from millrace.training.packing.splitting import RowLimit
from millrace.training.settings import TrainSettings
from millrace.training.token_batches import as_tensor, packed_hidden_states

_EPSILON = 1e-4  # a smaller deviation is taken for noise, and not blown up


@dataclass(frozen=True, kw_only=True, slots=True)
class Estimation:
    """Generalized advantage estimation."""

    discount: float = 1.0
    decay: float = 1.0
    normalize: bool = True  # advantages, over a step

    def estimate(
        self, part: Microbatch, *, values: np.ndarray, last_values: np.ndarray
    ) -> Microbatch:
        """The microbatch with advantages and returns, given the values before its trained tokens
        [N] and after the last one of each rollout [R]."""
        assert part.rewards is not None, "batches for a critic are packed for one"
        ends = np.cumsum(np.bincount(part.rollouts))[:-1]
        rollouts = zip(
            np.split(part.rewards.astype(np.float64), ends),
            np.split(values.astype(np.float64), ends),
            last_values.tolist(),
            strict=True,
        )
        found = [
            gae(rewards, expected, discount=self.discount, decay=self.decay, last_value=last)
            for rewards, expected, last in rollouts
        ]
        advantages = np.concatenate(found)
        return replace(
            part,
            advantages=advantages.astype(np.float32),
            values=values,
            returns=(advantages + values).astype(np.float32),
        )

    def settle(self, batches: Sequence[Batch]) -> tuple[Batch, ...]:
        """The batches of a step, all of them estimated: normalised, if they shall be."""
        if not self.normalize:
            return tuple(batches)
        advantages = _of_step(batches, "advantages")
        mean, deviation = advantages.mean(), advantages.std() + _EPSILON

        def normalized(part: Microbatch) -> Microbatch:
            values = (part.advantages - mean) / deviation
            return replace(part, advantages=values.astype(np.float32))

        return tuple(
            replace(batch, microbatches=tuple(map(normalized, batch.microbatches)))
            for batch in batches
        )


def judgement_metrics(batches: Sequence[Batch]) -> dict[str, float]:
    """Of the batches of a step, all of them estimated."""
    values, returns = _of_step(batches, "values"), _of_step(batches, "returns")
    # 1 = the critic knew; 0 = it knew no better than one number for all. Where all returns are
    # equal there is nothing to explain.
    spread = float(returns.var())
    is_spread = spread > _EPSILON**2
    return {
        "critic/value_mean": float(values.mean()),
        "critic/return_mean": float(returns.mean()),
        "critic/explained_variance": 1 - float((returns - values).var()) / spread
        if is_spread
        else 0.0,
    }


def _of_step(batches: Sequence[Batch], name: str) -> np.ndarray:  # [trained tokens] float64
    parts = [getattr(m, name) for batch in batches for m in batch.microbatches]
    return np.concatenate(parts, dtype=np.float64)


WEIGHTS_FILE = "critic.safetensors"  # no model of transformers, so not called one


class Critic:
    """`model` is float32 and was loaded with PACKED_ATTENTION."""

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        estimation: Estimation,
        learning_rate: float,
        warmup_steps: int = 0,  # in which the policy does not learn
        value_clip: float | None = None,
        loss_weight: float = 0.5,
        technique: TrainSettings,
        on_pass: Callable[[], None] = lambda: None,
    ) -> None:
        """`on_pass` is called before each forward pass: a step gets on."""
        self.model = ValueModel(model)
        assert all(parameter.dtype == torch.float32 for parameter in self.model.parameters())
        self._estimation = estimation
        self._learning_rate = learning_rate
        self._warmup_steps = warmup_steps
        self._value_clip = value_clip
        self._loss_weight = loss_weight
        self._technique = technique
        self._on_pass = on_pass
        self._scale = LossScale(is_on=technique.compute_dtype is torch.float16)
        self._limit = RowLimit()
        self._optimizer = build_optimizer(self.model, technique)
        self._judgement: dict[str, float] = {}  # metrics of the step's batches
        self._updates: list[dict[str, float]] = []  # and of each update of it
        arrange_layers(self.model.backbone, technique)

    def learns_alone(self, step: int) -> bool:
        """Whether the policy shall wait in this step; `step` counts from 0."""
        return step < self._warmup_steps

    def judge(self, batches: Sequence[Batch]) -> tuple[Batch, ...]:
        """The batches of a step with advantages, values and returns; comes before any update."""
        judged = [self._judged(batch) for batch in batches]
        self._judgement, self._updates = judgement_metrics(judged), []
        return self._estimation.settle(judged)

    def learn(self, batch: Batch) -> bool:
        """One optimizer update towards the returns of a judged batch; False = its gradient is not
        finite, and nothing was applied."""
        while True:
            error = self.accumulate(batch)
            norm = torch.nn.utils.clip_grad_norm_(
                self.model.parameters(), max_norm=self._technique.max_grad_norm
            )
            value_loss, grad_norm = torch.stack([error, norm.double()]).tolist()
            overflowed = math.isfinite(value_loss) and not math.isfinite(grad_norm)
            if not (overflowed and self._scale.lower()):
                break
        if not (math.isfinite(value_loss) and math.isfinite(grad_norm)):
            return False
        self._scale.succeeded()
        for group in self._optimizer.param_groups:
            group["lr"] = self._learning_rate
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)  # the policy needs the memory
        self._updates.append({"critic/loss": value_loss, "critic/grad_norm": grad_norm})
        return True

    def step_metrics(self) -> dict[str, float]:
        """Of the step whose batches were judged last, after its updates."""
        names = self._updates[0] if self._updates else ()  # all may have been skipped
        means = {name: sum(u[name] for u in self._updates) / len(self._updates) for name in names}
        return {**self._judgement, **means}

    def accumulate(self, batch: Batch) -> Tensor:
        """The gradient of a judged batch; returns its mean squared error, float64."""
        while True:
            self._optimizer.zero_grad(set_to_none=True)
            total = torch.zeros((), dtype=torch.float64, device=self.model.head.weight.device)
            for part in self._limit.fitting(batch)[0]:
                try:
                    error = self._squared_error(part) / batch.num_trained_tokens
                    (error * (self._loss_weight * self._scale.value)).backward()
                except torch.OutOfMemoryError:
                    self._limit.lower(part)
                    break
                total += error.detach()
            else:
                gradients = [p.grad for p in self.model.parameters() if p.grad is not None]
                self._scale.unscale(gradients)
                return total

    def values(self, microbatch: Microbatch, rows: np.ndarray) -> Tensor:
        """Of the states that end with the given rows, float32; differentiable."""
        self._on_pass()
        backbone = self.model.backbone
        with self._technique.autocast(backbone.device):
            hidden = packed_hidden_states(backbone, microbatch)
        chosen = as_tensor(rows, np.int64, backbone.device)
        return self.model.values(hidden.index_select(0, chosen))

    def named_weights(self) -> dict[str, Tensor]:
        return {name: p.detach().contiguous() for name, p in self.model.named_parameters()}

    def state(self) -> dict[str, Any]:
        return {"optimizer": self._optimizer.state_dict()}

    def restore(self, folder: Path, state: Mapping[str, Any]) -> None:
        """Go on where named_weights() and state() were asked; raises KeyError or RuntimeError if
        they were those of another model."""
        weights = load_file(folder / WEIGHTS_FILE)
        with torch.no_grad():
            for name, parameter in self.model.named_parameters():
                parameter.copy_(weights[name])
        self._optimizer.load_state_dict(state["optimizer"])

    def state_bytes(self) -> int:
        """About what a checkpoint holds: the weights, and the optimizer's two moments of each."""
        return 3 * sum(p.numel() * p.element_size() for p in self.model.parameters())

    def _squared_error(self, part: Microbatch) -> Tensor:
        """Summed over its tokens. A value that moved by more than value_clip in this step does not
        gain by moving further."""
        assert part.returns is not None, "judge() comes before learn()"
        assert part.values is not None
        values = self.values(part, part.predictors)
        returns, before = (
            as_tensor(array, np.float32, values.device) for array in (part.returns, part.values)
        )
        errors = (values - returns).square()
        if self._value_clip is not None:
            bounded = before + (values - before).clamp(-self._value_clip, self._value_clip)
            errors = torch.maximum(errors, (bounded - returns).square())
        return errors.sum(dtype=torch.float64)

    @torch.no_grad()
    def _judged(self, batch: Batch) -> Batch:
        while True:
            parts: list[Microbatch] = []
            for part in self._limit.fitting(batch)[0]:
                assert part.last_rows is not None, "batches for a critic are packed for one"
                rows = np.concatenate([part.predictors, part.last_rows.clip(min=0)])
                try:
                    values = self.values(part, rows).cpu().numpy()
                except torch.OutOfMemoryError:
                    self._limit.lower(part)
                    break
                before, after = np.split(values, [len(part.predictors)])
                after = np.where(part.last_rows >= 0, after, 0.0)  # what has ended earns no more
                parts.append(self._estimation.estimate(part, values=before, last_values=after))
            else:
                return dataclasses.replace(batch, microbatches=tuple(parts))


def write_critic(weights: dict[str, Tensor], folder: Path) -> None:
    """What restore() reads; state() is for the caller to keep."""
    folder.mkdir(exist_ok=True)
    save_file(weights, folder / WEIGHTS_FILE)
