"""A model in training, between the trainer and transformers.

TrainableModel owns what the ranks of a sharded model do together: passes, decisions about memory
and finite gradients, the loss scale, clipping, the optimizer and the weights by name. PolicyModel
(policy_model.py) adds logprobs, an adapter and replayed routes; Critic adds a value head. The
Trainer decides what is learned and touches no module.

Promise: an out-of-memory error splits a microbatch and leaves the gradient of the batch unchanged.
Trained weights and optimizer state are float32; bfloat16, or float16 with a scaled loss, is used
for computing only. The module stays in eval mode, because dropout would make the trainer's
distribution differ from the engine's.

Used by one thread. T = rows of a microbatch, N = its trained tokens, D = hidden size.
"""

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from millrace.core.errors import OutOfMemory
from millrace.core.microbatch import Batch, Microbatch
from millrace.models.attention.layout import PackedLayout
from millrace.models.exact.attention import Tiles
from millrace.models.loading import hidden_states
from millrace.models.sharding import zero_unused_gradients
from millrace.training.checkpoints.shards import load_named_state, named_state
from millrace.training.layers import prepare_layers
from millrace.training.optimizer import LossScale, TrainSettings, build_optimizer
from millrace.training.packing.splitting import RowLimit, placeholder
from millrace.training.parallel.ranks import Ranks, clip, scale, squared_norm, sum_unsharded
from millrace.training.token_batches import as_tensor

# The loss of one microbatch, and whatever the caller wants to keep of that forward pass.
LossFunction = Callable[[Microbatch], tuple[Tensor, Any]]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Gradient:
    """The gradient of one batch, which lies in the parameters until it is applied or freed."""

    loss: Tensor  # [] float64
    outputs: list[Any]  # what the loss function returned besides the loss, for each microbatch
    num_splits: int  # microbatches that were split to fit into memory
    norm: float = math.nan  # before clipping; set by clipped_gradient()
    is_finite: bool = False  # whether it may be applied; likewise
    step_scale: float = 1.0  # of the learning rate that it was applied with


class TrainableModel:
    """A module whose backbone was loaded with PACKED_ATTENTION, and its optimizer."""

    def __init__(
        self,
        module: nn.Module,
        backbone: PreTrainedModel,
        *,
        settings: TrainSettings,
        ranks: Ranks | None = None,  # None = one
        on_forward: Callable[[], None] = lambda: None,
        is_prepared: bool = False,
    ) -> None:
        """`on_forward` is called before each forward pass, as a sign of progress. `is_prepared`:
        another model has prepared the layers of the backbone that they share."""
        assert all(p.dtype == torch.float32 for p in module.parameters() if p.requires_grad)
        self.module = module
        self.ranks = ranks or Ranks()
        self._backbone = backbone
        self._settings = settings
        self._on_forward = on_forward
        self._optimizer = build_optimizer(module, settings)
        self._loss_scale = LossScale(is_on=settings.compute_dtype is torch.float16)
        self.row_limit = RowLimit()
        if not is_prepared:
            prepare_layers(backbone, settings)

    @property
    def device(self) -> torch.device:
        return self._backbone.device

    @property
    def loss_scale(self) -> float:
        return self._loss_scale.value

    def changing(self, part: Microbatch) -> AbstractContextManager[None]:
        """A context for a pass over this microbatch, and for its backward pass."""
        return nullcontext()

    def hidden_states(self, microbatch: Microbatch) -> Tensor:  # [rows of this rank, D]
        """The backbone's last hidden states; differentiable."""
        self._on_forward()
        device, context = self.device, self.ranks.context
        layout = PackedLayout(microbatch.lengths, parents=microbatch.parents, device=device)
        own = (context.local_rows(x) for x in (microbatch.tokens, microbatch.positions))
        tokens, positions = (as_tensor(x, np.int64, device)[None] for x in own)
        with self._settings.numerics(device):
            return hidden_states(
                self._backbone,
                input_ids=tokens,
                position_ids=positions,
                layout=layout,
                tiles=Tiles.packed(layout, device) if self._settings.exact else None,
                context=context if context.size > 1 else None,
            )

    @torch.no_grad()
    def annotate(self, batch: Batch, compute: Callable[[Microbatch], Microbatch]) -> Batch:
        """Replace each microbatch by compute() of it, without a gradient; large ones are split."""

        def run(part: Microbatch) -> Microbatch:
            if not len(part.targets):
                self.idle_pass(part)
                return part
            with self.changing(part):
                return compute(part)

        parts, _ = self._in_parts(batch, run)
        return replace(batch, microbatches=tuple(parts))

    def accumulate(self, batch: Batch, loss: LossFunction) -> Gradient:
        """Compute the gradient of a batch, summed over its microbatches and over all ranks."""

        def backward(part: Microbatch) -> tuple[Tensor, Any] | None:
            if not len(part.targets):
                self.idle_pass(part).backward()
                return None
            with self.changing(part):
                value, output = loss(part)
                (value * self._loss_scale.value).backward()
            return value.detach(), output

        results, num_splits = self._in_parts(batch, backward, before=self.free_gradient)
        results = [result for result in results if result is not None]
        if not self.ranks.is_alone:
            zero_unused_gradients(self.module)
            sum_unsharded(self._gradients(), self.ranks)
        return self.accumulated(results, num_splits=num_splits)

    def accumulated(self, results: Sequence[tuple[Tensor, Any]], *, num_splits: int) -> Gradient:
        """The gradient after the backward passes of losses, which returned these results."""
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        for value, _ in results:
            total += value
        self._loss_scale.unscale(self._gradients())
        return Gradient(loss=total, outputs=[o for _, o in results], num_splits=num_splits)

    def clipped_gradient(
        self, batch: Batch, loss: LossFunction, *, first: Gradient | None = None
    ) -> Gradient:
        """Compute and clip the gradient of a batch, or clip the `first` one, which was computed
        before. If float16 overflows, it is computed again with a smaller loss scale; if that does
        not help, the scale is left as it was."""
        first_scale = self._loss_scale.value
        while True:
            gradient, first = first or self.accumulate(batch, loss), None
            total, grad_norm = self._clip(gradient.loss)
            overflowed = math.isfinite(total) and not math.isfinite(grad_norm)
            if not (overflowed and self._loss_scale.lower()):
                break
        is_finite = math.isfinite(total) and math.isfinite(grad_norm)
        if not is_finite:
            self._loss_scale.value = first_scale
        return replace(gradient, norm=grad_norm, is_finite=is_finite)

    def _clip(self, loss: Tensor) -> tuple[float, float]:
        """Clip the gradient; returns the loss and the norm over all ranks."""
        max_norm = self._settings.max_grad_norm
        gradients = self._gradients()
        if self.ranks.sizes.num_ranks == 1:
            norm = clip(gradients, max_norm=max_norm)
            # One wait for the device.
            total, grad_norm = torch.stack([loss, norm.double()]).tolist()
            return total, grad_norm
        squared = squared_norm(gradients, num_ranks=self.ranks.sizes.num_ranks)
        total, squared_sum = self.ranks.sum(torch.stack([loss, squared]).tolist())
        grad_norm = math.sqrt(squared_sum)
        scale(gradients, min(1.0, max_norm / (grad_norm + 1e-6)))
        return total / self.ranks.num_per_share, grad_norm

    def _gradients(self) -> list[Tensor]:
        return [p.grad for p in self.module.parameters() if p.grad is not None]

    def idle_pass(self, part: Microbatch) -> Tensor:
        """A forward pass without trained tokens, for a rank that has fewer microbatches than the
        others: the same collectives, and a loss of 0."""
        raise NotImplementedError

    def apply_gradient(self, *, learning_rate: float) -> None:
        for group in self._optimizer.param_groups:
            group["lr"] = learning_rate
        self._optimizer.step()
        self._loss_scale.succeeded()

    def free_gradient(self) -> None:
        self._optimizer.zero_grad(set_to_none=True)

    def weights(self) -> dict[str, Tensor]:
        """Every parameter once, by name; tied parameters under the first of their names."""
        return {name: parameter.detach() for name, parameter in self.module.named_parameters()}

    def optimizer_state(self) -> dict[str, Any]:
        return named_state(self._optimizer, self.module)

    def load_optimizer_state(self, state: dict[str, Any], *, shards: Path) -> None:
        load_named_state(self._optimizer, self.module, state, shards=shards)

    def state_bytes(self) -> int:
        """Approximate size of a checkpoint: the weights and the optimizer's two moments of each."""
        return 3 * sum(w.numel() * w.element_size() for w in self.weights().values())

    def _in_parts(
        self,
        batch: Batch,
        run: Callable[[Microbatch], Any],
        *,
        before: Callable[[], None] = lambda: None,
    ) -> tuple[list[Any], int]:
        """The results of `run` for the microbatches of a batch, and the number of splits. A
        microbatch that does not fit into memory may leave half of its gradient behind. So the batch
        is started again, with a call of `before`, and all microbatches of that size are split. Of
        several ranks, which run equally many, all have to start again: OutOfMemory is raised."""
        while True:
            parts, num_splits = self.row_limit.fitting(batch)
            if self.ranks.is_alone:
                parts = [part for part in parts if len(part.targets)]
            else:
                parts += [placeholder(parts[0])] * (self.ranks.most(len(parts)) - len(parts))
            before()
            results: list[Any] = []
            for part in parts:
                found = unless_out_of_memory(lambda part=part: [run(part)])
                if not found:
                    break
                results += found
            else:
                return results, num_splits
            size = "without trained tokens"  # which is not the reason
            if len(part.targets):
                size = f"of {len(part.tokens)} tokens"
                self.row_limit.lower(part)
            if not self.ranks.is_alone:  # the others wait for it in the middle of a pass
                rank = f"the trainer's rank {self.ranks.rank}"
                raise OutOfMemory(f"A microbatch {size} does not fit into the memory of {rank}.")


def unless_out_of_memory(run: Callable[[], list[Any]]) -> list[Any]:
    """What `run` returns; empty if it does not fit into memory. A separate function, so that a
    failed graph is freed before the next try."""
    try:
        return run()
    except torch.OutOfMemoryError:
        return []
