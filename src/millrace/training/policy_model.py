"""A model in training, between the trainer and transformers.

TrainableModel owns what the ranks of a sharded model do together: passes, decisions about memory
and finite gradients, the loss scale, clipping, the optimizer and the weights by name. PolicyModel
adds logprobs, an adapter and replayed routes; Critic adds a value head. The Trainer decides what is
learned and touches no module.

Promise: an out-of-memory error splits a microbatch and leaves the gradient of the batch unchanged.
Trained weights and optimizer state are float32; bfloat16, or float16 with a scaled loss, is used
for computing only. The module stays in eval mode, because dropout would make the trainer's
distribution differ from the engine's.

Used by one thread. T = rows of a microbatch, N = its trained tokens, D = hidden size.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from millrace.core.errors import OutOfMemory
from millrace.core.microbatch import Batch, Microbatch
from millrace.models.attention.context import OwnTokens
from millrace.models.attention.layout import PackedLayout
from millrace.models.exact.attention import Tiles
from millrace.models.kept_rows import KeptRows
from millrace.models.loading import hidden_states
from millrace.models.logprobs import chunked_distributions
from millrace.models.lora.trained import TrainedAdapter
from millrace.models.routing import RouteReplay, policy_tensors
from millrace.models.sharding import gathered, inside, zero_unused_gradients
from millrace.training.checkpoints.shards import load_named_state, named_state
from millrace.training.checkpoints.snapshot import Parts, Write, host_copy, model_writer
from millrace.training.layers import prepare_layers
from millrace.training.optimizer import LossScale, TrainSettings, build_optimizer
from millrace.training.packing.splitting import RowLimit, kept_rows, placeholder
from millrace.training.parallel.ranks import Ranks, clip, scale, squared_norm, sum_unsharded
from millrace.training.token_batches import PolicyOutput, as_tensor

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
    ) -> None:
        """`on_forward` is called before each forward pass, as a sign of progress."""
        assert all(p.dtype == torch.float32 for p in module.parameters() if p.requires_grad)
        self.module = module
        self.ranks = ranks or Ranks()
        self._backbone = backbone
        self._settings = settings
        self._on_forward = on_forward
        self._optimizer = build_optimizer(module, settings)
        self._loss_scale = LossScale(is_on=settings.compute_dtype is torch.float16)
        self.row_limit = RowLimit()
        prepare_layers(backbone, settings)

    @property
    def device(self) -> torch.device:
        return self._backbone.device

    @property
    def loss_scale(self) -> float:
        return self._loss_scale.value

    def hidden_states(self, microbatch: Microbatch) -> Tensor:  # [rows of this rank, D]
        """The backbone's last hidden states; differentiable."""
        self._on_forward()
        device, context = self.device, self.ranks.context
        layout = PackedLayout(microbatch.lengths, parents=microbatch.parents, device=device)
        own = (context.own_rows(x) for x in (microbatch.tokens, microbatch.positions))
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
            return compute(part) if len(part.targets) else part

        parts, _ = self._in_parts(batch, run)
        return replace(batch, microbatches=tuple(parts))

    def accumulate(self, batch: Batch, loss: LossFunction) -> Gradient:
        """Compute the gradient of a batch, summed over its microbatches and over all ranks."""

        def backward(part: Microbatch) -> tuple[Tensor, Any] | None:
            if not len(part.targets):
                self.idle_pass(part).backward()
                return None
            value, output = loss(part)
            (value * self._loss_scale.value).backward()
            return value.detach(), output

        results, num_splits = self._in_parts(batch, backward, before=self.free_gradient)
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        results = [result for result in results if result is not None]
        for value, _ in results:
            total += value
        if not self.ranks.is_alone:
            zero_unused_gradients(self.module)
            sum_unsharded(self._gradients(), self.ranks)
        self._loss_scale.unscale(self._gradients())
        return Gradient(loss=total, outputs=[o for _, o in results], num_splits=num_splits)

    def clipped_gradient(self, batch: Batch, loss: LossFunction) -> Gradient:
        """Compute and clip the gradient of a batch. If float16 overflows, it is computed again with
        a smaller loss scale; if that does not help, the scale is left as it was."""
        first_scale = self._loss_scale.value
        while True:
            gradient = self.accumulate(batch, loss)
            total, grad_norm = self._clip(gradient.loss)
            overflowed = math.isfinite(total) and not math.isfinite(grad_norm)
            if not (overflowed and self._loss_scale.lower()):
                break
        is_finite = math.isfinite(total) and math.isfinite(grad_norm)
        if is_finite:
            self._loss_scale.succeeded()
        else:
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
        """Run one optimizer step with the gradient that was computed last."""
        for group in self._optimizer.param_groups:
            group["lr"] = learning_rate
        self._optimizer.step()

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
                if not _unless_out_of_memory(run, part, results):
                    break
            else:
                return results, num_splits
            size = "without trained tokens"  # which is not the reason
            if len(part.targets):
                size = f"of {len(part.tokens)} tokens"
                self.row_limit.lower(part)
            if not self.ranks.is_alone:  # the others wait for it in the middle of a pass
                rank = f"the trainer's rank {self.ranks.rank}"
                raise OutOfMemory(f"A microbatch {size} does not fit into the memory of {rank}.")


def _unless_out_of_memory(
    run: Callable[[Microbatch], Any], part: Microbatch, results: list[Any]
) -> bool:
    """Append the result of `run`; False if it does not fit into memory. A separate function, so
    that a failed graph is freed before the next try."""
    try:
        results.append(run(part))
    except torch.OutOfMemoryError:
        return False
    return True


class PolicyModel(TrainableModel):
    """The policy: all of its weights are trained, or those of an adapter alone."""

    module: PreTrainedModel

    def __init__(
        self,
        module: PreTrainedModel,
        *,
        settings: TrainSettings,
        adapter: TrainedAdapter | None = None,  # in the module; None = all weights are trained
        replay: RouteReplay | None = None,  # of the module's routers; None = they choose themselves
        logprob_chunk: int = 1024,  # trained tokens whose logits exist at one time
        ranks: Ranks | None = None,
        on_forward: Callable[[], None] = lambda: None,
    ) -> None:
        super().__init__(module, module, settings=settings, ranks=ranks, on_forward=on_forward)
        self._adapter = adapter
        self._replay = replay
        self.replays_routes = replay is not None
        self._logprob_chunk = logprob_chunk

    def logprobs(
        self, microbatch: Microbatch, *, topk_ids: np.ndarray | None = None
    ) -> PolicyOutput:
        """Logprobs of the trained tokens, in order, in the distributions they were sampled from (by
        temperature, kept ids and expert routes), and of a teacher's `topk_ids` [N, K]."""
        return inside(self.module, lambda: self._logprobs(microbatch, topk_ids))

    def idle_pass(self, part: Microbatch) -> Tensor:
        return self.logprobs(part).logprobs.sum()

    def _logprobs(self, microbatch: Microbatch, topk_ids: np.ndarray | None) -> PolicyOutput:
        device = self.device
        if self._replay is not None:
            routes = microbatch.routes
            own_routes = None if routes is None else self.ranks.context.own_rows(routes)
            self._replay.begin(own_routes, device=device)
        hidden = self._settings.before_head(self.hidden_states(microbatch))
        own, kept = self._own_tokens(microbatch), microbatch.kept
        if kept is not None and own.chosen is not None:
            kept = kept_rows(kept, own.chosen)
        ids = None if topk_ids is None else as_tensor(own.of(topk_ids), np.int64, device)
        with self._settings.numerics(device):
            logprobs, entropies, topk = chunked_distributions(
                self.module,
                hidden.index_select(0, as_tensor(own.rows, np.int64, device)),
                as_tensor(own.of(microbatch.targets), np.int64, device),
                topk_ids=ids,
                temperatures=as_tensor(own.of(microbatch.temperatures), np.float32, device),
                kept=None if kept is None else KeptRows.of(kept, device=device),
                chunk=self._logprob_chunk,
                compiled=self._settings.compile_layers and not self._settings.exact,
            )
        topk = None if topk is None else own.gather(topk)
        return PolicyOutput(own.gather(logprobs), own.gather(entropies), topk)

    def _own_tokens(self, microbatch: Microbatch) -> OwnTokens:
        """Trained tokens that this rank computes."""
        rows, num_rows = microbatch.predictors, len(microbatch.tokens)
        return self.ranks.context.own_tokens(rows, num_rows=num_rows)

    def expert_load(self, microbatch: Microbatch) -> Tensor | None:  # [layers, experts]
        """How many trained tokens each expert computed in the last pass, which was over this
        microbatch; None if routes are not replayed."""
        if self._replay is None:
            return None
        own = self._own_tokens(microbatch)
        load = self._replay.expert_load(as_tensor(own.rows, np.int64, self.device))
        return self.ranks.context.sum(load)

    def set_batch_load(self, batch: Batch) -> None:
        """Set the load that router_aux_loss() of the microbatches of this batch uses."""
        assert self._replay is not None, "checked when the run starts"
        load = self._replay.recorded_load(
            [p.routes[p.predictors] for p in batch.microbatches if p.routes is not None]
        )
        summed = np.reshape(self.ranks.sum(load.ravel().tolist()), load.shape)
        self._replay.penalize(summed, device=self.device)

    def router_aux_loss(self, microbatch: Microbatch) -> Tensor:  # [N]; differentiable
        """RouteReplay.penalties() of each trained token in the last pass, which was over this
        microbatch, with the shares f of the whole batch. So the mean over the trained tokens of a
        batch is that of Switch Transformers and does not depend on microbatches. transformers'
        load_balancing_loss_func is the same for one layer; of several it averages f and p before it
        multiplies them, so that layers may be unbalanced in opposite ways."""
        assert self._replay is not None, "checked when the run starts"
        own = self._own_tokens(microbatch)
        rows = as_tensor(own.rows, np.int64, self.device)
        return own.gather(self._replay.penalties().index_select(0, rows))

    def with_proximal_logprobs(self, batch: Batch) -> Batch:
        """The batch with the logprobs of the policy as it is now, before the step changes it."""
        return self.annotate(
            batch, lambda part: replace(part, proximal_logprobs=self._host_logprobs(part))
        )

    def with_reference_logprobs(self, batch: Batch) -> Batch:
        """The batch with the logprobs of the base model beneath the adapter. A batch that already
        has those of another reference model, and any batch without an adapter, is unchanged."""
        has_reference = all(part.reference_logprobs is not None for part in batch.microbatches)
        if self._adapter is None or has_reference:
            return batch

        def compute(part: Microbatch) -> Microbatch:
            # The reference chooses its own routes: its own distribution is wanted.
            logprobs = self._host_logprobs(replace(part, routes=None))
            return replace(part, reference_logprobs=logprobs)

        with self._adapter.disabled():
            return self.annotate(batch, compute)

    def _host_logprobs(self, part: Microbatch) -> np.ndarray:  # [N] float32
        return self.logprobs(part).logprobs.cpu().numpy()

    def weights(self) -> dict[str, Tensor]:
        """The tensors that a version consists of: the adapter's, or all of the model's."""
        if self._adapter is not None:
            return self._adapter.named_weights()
        return {name: tensor.detach() for name, tensor in policy_tensors(self.module).items()}

    def load_adapter(self, folder: Path) -> None:
        """Load the adapter's weights; a model without one was loaded with its weights."""
        if self._adapter is not None:
            self._adapter.load(folder)

    def writers(self, parts: Parts, *, merged_into: str | None = None) -> list[Write]:
        """Functions that write a copy of the weights as a Hugging Face directory, or the adapter as
        a PEFT one; with `merged_into` also the merged model, in a subfolder. Any thread may call
        them. This rank's part of sharded weights is added to the `parts` of the snapshot."""
        if self._adapter is None:
            return [model_writer(self.module, self.module.state_dict(keep_vars=True), parts)]
        adapter = {name: gathered(weight) for name, weight in self.weights().items()}
        writers: list[Write] = [partial(self._adapter.write, host_copy(adapter))]
        if merged_into is not None:
            merged = self._adapter.merged_weights()
            writers.append(model_writer(self.module, merged, parts, subfolder=merged_into))
        return writers

    def merged_bytes(self) -> int:
        """Approximate size of the model with its adapter merged."""
        return sum(p.numel() * p.element_size() for p in self.module.parameters())
