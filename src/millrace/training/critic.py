"""The critic: values, GAE advantages and returns for PPO.

Promise: the critic values every trained token of a step once, as it is before the step, and no
number depends on how the step is packed. The value of the state before a token is computed at the
row that predicts the token. An update applies a finite gradient or nothing.

The critic is a model of its own with its own optimizer. It lives in the trainer's process, is part
of checkpoints and is never published. Used by the trainer's thread.
N = trained tokens of a microbatch, R = its rollouts.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from millrace.core.microbatch import Batch, Microbatch
from millrace.core.plugins import plugin
from millrace.scoring.advantages import GaeAdvantages, gae
from millrace.training.checkpoints.shards import ShardReader
from millrace.training.checkpoints.snapshot import OPTIMIZER
from millrace.training.optimizer import TrainSettings
from millrace.training.parallel.ranks import Ranks
from millrace.training.token_batches import as_tensor
from millrace.training.trainable_model import TrainableModel

_EPSILON = 1e-4  # keeps normalization from amplifying noise where all advantages are equal


@plugin
class GaeEstimator(GaeAdvantages):
    """Generalized advantage estimation (arXiv 1506.02438) with the values of a critic."""

    def estimate(
        self, part: Microbatch, *, values: np.ndarray, last_values: np.ndarray
    ) -> Microbatch:
        """The microbatch with advantages, values and returns. `values` [N] belong to the states
        before its trained tokens, `last_values` [R] to those after the last token of a rollout."""
        assert part.rewards is not None, "a batch for a critic is packed with critic=True"
        ends = np.cumsum(np.bincount(part.rollouts))[:-1]
        rollouts = zip(
            np.split(part.rewards.astype(np.float64), ends),
            np.split(values.astype(np.float64), ends),
            last_values.tolist(),
            strict=True,
        )
        options = {"discount": self.gamma, "decay": self.gae_lambda}
        advantages = np.concatenate(
            [gae(earned, before, **options, last_value=last) for earned, before, last in rollouts]
        )
        return replace(
            part,
            advantages=advantages.astype(np.float32),
            values=values,
            returns=(advantages + values).astype(np.float32),
        )

    def normalized(self, batches: Sequence[Batch], ranks: Ranks) -> tuple[Batch, ...]:
        """The estimated batches of one step with normalized advantages, if that is on."""
        if not self.normalize:
            return tuple(batches)
        advantages = _of_step(batches, "advantages", ranks)
        mean, deviation = advantages.mean(), advantages.std() + _EPSILON

        def normalize(part: Microbatch) -> Microbatch:
            values = (part.advantages - mean) / deviation
            return replace(part, advantages=values.astype(np.float32))

        return tuple(
            replace(batch, microbatches=tuple(map(normalize, batch.microbatches)))
            for batch in batches
        )


def value_metrics(batches: Sequence[Batch], ranks: Ranks) -> dict[str, float]:
    values, returns = _of_step(batches, "values", ranks), _of_step(batches, "returns", ranks)
    variance, error = float(returns.var()), float((returns - values).var())
    # 1 = values equal returns; 0 = values are no better than one constant. Equal returns have no
    # variance to explain.
    explained = 1 - error / variance if variance > _EPSILON**2 else 0.0
    return {
        "critic/value_mean": float(values.mean()),
        "critic/return_mean": float(returns.mean()),
        "critic/explained_variance": explained,
    }


def _of_step(
    batches: Sequence[Batch], name: str, ranks: Ranks
) -> np.ndarray:  # [trained tokens of all ranks] float64
    parts = [getattr(m, name) for batch in batches for m in batch.microbatches if len(m.targets)]
    own = np.concatenate([np.zeros(0), *parts], dtype=np.float64)
    return np.concatenate(ranks.gather(own, np.ndarray))


class ValueModel(nn.Module):
    """The backbone of a language model with a value head instead of its own. Values are float32,
    whatever the backbone computes in, and 0 until the head is trained."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        backbone = model.base_model
        assert isinstance(backbone, PreTrainedModel)
        self.backbone = backbone
        self.head = nn.Linear(model.config.get_text_config().hidden_size, 1, device=model.device)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)

    def values(self, hidden: Tensor) -> Tensor:  # [T, D] -> [T]
        with torch.autocast(hidden.device.type, enabled=False):
            return self.head(hidden.float()).squeeze(-1)


class Critic(TrainableModel):
    """`model` is float32 and was loaded with PACKED_ATTENTION."""

    module: ValueModel

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        estimator: GaeEstimator,
        learning_rate: float,
        warmup_steps: int = 0,
        value_clip: float | None = None,  # PPO value clip; None disables it
        loss_weight: float = 0.5,
        settings: TrainSettings,
        ranks: Ranks | None = None,
        on_forward: Callable[[], None] = lambda: None,
    ) -> None:
        value_model = ValueModel(model)
        super().__init__(
            value_model, value_model.backbone, settings=settings, ranks=ranks, on_forward=on_forward
        )
        self._estimator = estimator
        self._learning_rate = learning_rate
        self.warmup_steps = warmup_steps  # in which only the critic learns
        self._value_clip = value_clip
        self._loss_weight = loss_weight
        self._value_metrics: dict[str, float] = {}  # of the step's batches
        self._updates: list[dict[str, float]] = []  # metrics of each update of the step

    def estimate_advantages(self, batches: Sequence[Batch]) -> tuple[Batch, ...]:
        """The batches of a step with advantages, values and returns; called before its updates."""
        estimated = [self.annotate(batch, self._estimate) for batch in batches]
        self._value_metrics, self._updates = value_metrics(estimated, self.ranks), []
        return self._estimator.normalized(estimated, self.ranks)

    def update(self, batch: Batch) -> bool:
        """Update once towards the returns; False, and no change, if the gradient is not finite."""
        gradient = self.clipped_gradient(batch, lambda part: self.value_loss(part, batch))
        if not gradient.is_finite:
            return False
        self.apply_gradient(learning_rate=self._learning_rate)
        self.free_gradient()  # the policy needs the memory
        own_share = torch.stack(gradient.outputs).sum().item() if gradient.outputs else 0.0
        value_loss = self.ranks.sum([own_share])[0] / self.ranks.num_per_share
        self._updates.append({"critic/loss": value_loss, "critic/grad_norm": gradient.norm})
        return True

    def step_metrics(self) -> dict[str, float]:
        """Metrics of the step whose advantages were estimated last, after its updates."""
        names = self._updates[0] if self._updates else ()  # all updates may have been skipped
        means = {name: sum(u[name] for u in self._updates) / len(self._updates) for name in names}
        return {**self._value_metrics, **means}

    def values(self, microbatch: Microbatch, rows: np.ndarray) -> Tensor:
        """float32 values of the states that end with the given rows; differentiable."""
        hidden = self.hidden_states(microbatch)
        own = self.ranks.context.local_tokens(rows, num_rows=len(microbatch.tokens))
        chosen = as_tensor(own.rows, np.int64, self.device)
        return own.gather(self.module.values(hidden.index_select(0, chosen)))

    def idle_pass(self, part: Microbatch) -> Tensor:
        return self.values(part, part.predictors).sum()

    def state(self) -> dict[str, Any]:
        return {"optimizer": self.optimizer_state()}

    def restore(self, folder: Path, state: Mapping[str, Any]) -> None:
        """Load weights and optimizer; raises CheckpointError for another model's weights."""
        ShardReader(folder).read(self.weights())
        self.load_optimizer_state(state["optimizer"], shards=folder / OPTIMIZER)

    def _estimate(self, part: Microbatch) -> Microbatch:
        assert part.last_rows is not None, "a batch for a critic is packed with critic=True"
        rows = np.concatenate([part.predictors, part.last_rows.clip(min=0)])
        before, after = np.split(self.values(part, rows).cpu().numpy(), [len(part.predictors)])
        after = np.where(part.last_rows >= 0, after, 0.0)  # a finished episode earns no more
        return self._estimator.estimate(part, values=before, last_values=after)

    def value_loss(self, part: Microbatch, batch: Batch) -> tuple[Tensor, Tensor]:
        """The weighted value loss of a microbatch, and its share of the batch's mean squared error.

        With v the value now, w the value before the step, R the return, c the value clip:
        max((v - R)^2, (w + clip(v - w, -c, c) - R)^2), as in PPO.
        """
        assert part.returns is not None, "estimate_advantages() comes before update()"
        assert part.values is not None
        values = self.values(part, part.predictors)
        returns, before = (
            as_tensor(array, np.float32, values.device) for array in (part.returns, part.values)
        )
        errors = (values - returns).square()
        if self._value_clip is not None:
            clipped = before + (values - before).clamp(-self._value_clip, self._value_clip)
            errors = torch.maximum(errors, (clipped - returns).square())
        error = errors.sum(dtype=torch.float64) / batch.num_trained_tokens
        return error * self._loss_weight, error.detach()
