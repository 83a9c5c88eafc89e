"""The policy in training: logprobs of trained tokens, an adapter, and replayed routes.

Used by one thread. N = trained tokens of a microbatch, K = ids that a teacher gives.
"""

import math
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from itertools import chain, repeat
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor
from transformers import PreTrainedModel

from millrace.core.microbatch import Batch, Microbatch, Segments
from millrace.models.attention.context import LocalTokens
from millrace.models.kept_rows import KeptRows
from millrace.models.logprobs import chunked_distributions
from millrace.models.lora.nf4 import Nf4Linear
from millrace.models.lora.trained import TrainedAdapter
from millrace.models.routing import RouteReplay, balance_experts, policy_tensors
from millrace.models.sharding import gathered, inside
from millrace.training.adapters.adapted_model import AdaptedModel
from millrace.training.adapters.policy_adapter import PolicyAdapter
from millrace.training.checkpoints.snapshot import Parts, Write, host_copy, model_writer
from millrace.training.optimizer import TrainSettings
from millrace.training.packing.splitting import by_rollout, kept_rows, placeholder
from millrace.training.parallel.ranks import Ranks
from millrace.training.token_batches import PolicyOutput, as_tensor
from millrace.training.trainable_model import TrainableModel


class PolicyModel(TrainableModel):
    """The policy: all of its weights are trained, or those of an adapter alone."""

    module: Any  # the model; the factors of an adapter, if the model is shared

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
        is_prepared: bool = False,
    ) -> None:
        trained = adapter.trained if isinstance(adapter, PolicyAdapter) else module
        super().__init__(
            trained,
            module,
            settings=settings,
            ranks=ranks,
            on_forward=on_forward,
            is_prepared=is_prepared,
        )
        self._adapter = adapter
        self._replay = replay
        self.replays_routes = replay is not None
        self._logprob_chunk = logprob_chunk

    def warm_up(self) -> None:
        """Let torch.compile build what a step needs, before the first batch arrives."""
        if self._settings.compile_layers and not self._settings.exact:
            part = _example()
            batch = Batch(
                microbatches=(part,), num_sequences=3, num_trained_tokens=len(part.targets)
            )
            self.accumulate(batch, lambda part: (self.logprobs(part).logprobs.sum(), None))
            self.free_gradient()

    def logprobs(
        self, microbatch: Microbatch, *, topk_ids: np.ndarray | None = None
    ) -> PolicyOutput:
        """Logprobs of the trained tokens, in order, in the distributions they were sampled from (by
        temperature, kept ids and expert routes), and of a teacher's `topk_ids` [N, K]."""
        return inside(self._backbone, lambda: self._logprobs(microbatch, topk_ids))

    @property
    def shared(self) -> AdaptedModel | None:
        """The model whose passes it can share with other policies."""
        if isinstance(self._adapter, PolicyAdapter) and self._replay is None:
            return self._adapter.adapted
        return None

    @property
    def applied_adapter(self) -> tuple[Mapping[str, Tensor], float]:
        assert isinstance(self._adapter, PolicyAdapter)
        return self._adapter.applied

    def changing(self, part: Microbatch) -> AbstractContextManager[None]:
        return nullcontext() if self._adapter is None else self._adapter.changing(len(part.tokens))

    def idle_pass(self, part: Microbatch) -> Tensor:
        return self.logprobs(part).logprobs.sum()

    def _logprobs(self, microbatch: Microbatch, topk_ids: np.ndarray | None) -> PolicyOutput:
        device = self.device
        if self._replay is not None:
            routes = microbatch.routes
            own_routes = None if routes is None else self.ranks.context.local_rows(routes)
            self._replay.begin(own_routes, device=device)
        hidden = self._settings.before_head(self.hidden_states(microbatch))
        own, kept = self._local_tokens(microbatch), microbatch.kept
        if kept is not None and own.chosen is not None:
            kept = kept_rows(kept, own.chosen)
        ids = None if topk_ids is None else as_tensor(own.of(topk_ids), np.int64, device)
        with self._settings.numerics(device):
            logprobs, entropies, topk = chunked_distributions(
                self._backbone,
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

    def _local_tokens(self, microbatch: Microbatch) -> LocalTokens:
        rows, num_rows = microbatch.predictors, len(microbatch.tokens)
        return self.ranks.context.local_tokens(rows, num_rows=num_rows)

    def expert_load(self, microbatch: Microbatch) -> Tensor | None:  # [layers, experts]
        """How many trained tokens each expert computed in the last pass, which was over this
        microbatch; None if routes are not replayed."""
        if self._replay is None:
            return None
        own = self._local_tokens(microbatch)
        load = self._replay.expert_load(as_tensor(own.rows, np.int64, self.device))
        return self.ranks.context.sum(load)

    def balance_experts(self, load: np.ndarray, *, rate: float) -> None:
        """Change the biases of the routers by `rate`, against the load [layers, E] in tokens."""
        balance_experts(self.module, load, rate=rate)

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
        own = self._local_tokens(microbatch)
        rows = as_tensor(own.rows, np.int64, self.device)
        return own.gather(self._replay.penalties().index_select(0, rows))

    def with_baseline(self, batch: Batch) -> Batch:
        """The batch with the minimum-variance baseline of each group subtracted from its
        advantages: sum(w^2 g^2 A) / sum(w^2 g^2) over its rollouts, with the ratio w, the norm g of
        the gradient of the rollout's logprob and the mean A of its advantages. Ranks sum gradients,
        so their rollouts take turns, and all ranks take part in the pass of each."""
        own = [by_rollout(part) for part in batch.microbatches]
        counts = self.ranks.gather(sum(map(len, own)), int)
        before = sum(counts[: self.ranks.data_rank])
        idle = placeholder(batch.microbatches[0])
        turns = [*repeat(idle, before), *chain(*own)]
        turns += repeat(idle, sum(counts) - len(turns))
        found = [self._log_weight(replace(batch, microbatches=(part,))) for part in turns]
        parts: list[Microbatch] = []
        for part, rollouts in zip(batch.microbatches, own, strict=True):
            parts.append(_less_baseline(part, np.array(found[before : before + len(rollouts)])))
            before += len(rollouts)
        return replace(batch, microbatches=tuple(parts))

    def _log_weight(self, of_rollout: Batch) -> float:
        """log(w^2 g^2), up to a constant of the batch. Without trained tokens it has no meaning."""

        def loss(part: Microbatch) -> tuple[Tensor, float]:
            logprobs = self.logprobs(part).logprobs
            log_ratio = logprobs.detach().cpu().numpy() - part.engine_logprobs
            # The mean over the batch, as in a loss: float16 has one loss scale for both.
            mean = logprobs.sum() / of_rollout.num_trained_tokens
            return mean, float(log_ratio.sum(dtype=np.float64))

        gradient = self.clipped_gradient(of_rollout, loss)
        return 2 * (sum(gradient.outputs) + math.log(max(gradient.norm, 1e-30)))

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
        return {name: tensor.detach() for name, tensor in policy_tensors(self._backbone).items()}

    def load_adapter(self, folder: Path) -> None:
        """Load the adapter's weights; a model without one was loaded with its weights."""
        if self._adapter is not None:
            self._adapter.load(folder)

    def writers(self, parts: Parts, *, merged_into: str | None = None) -> list[Write]:
        """Functions that write a copy of the weights as a Hugging Face directory, or the adapter as
        a PEFT one; with `merged_into` also the merged model, in a subfolder. Any thread may call
        them. This rank's part of sharded weights is added to the `parts` of the snapshot."""
        if self._adapter is None:
            return [model_writer(self._backbone, self._backbone.state_dict(keep_vars=True), parts)]
        adapter = {name: gathered(weight) for name, weight in self.weights().items()}
        writers: list[Write] = [partial(self._adapter.write, host_copy(adapter))]
        if merged_into is not None:
            merged = self._adapter.merged_weights()
            writers.append(model_writer(self._backbone, merged, parts, subfolder=merged_into))
        return writers

    def write_adapter(self, weights: Mapping[str, Tensor], folder: Path) -> None:
        """Write these weights() of an adapter as a PEFT folder. Any thread may call this."""
        assert self._adapter is not None, "checked when the run starts"
        folder.mkdir(parents=True)
        self._adapter.write(weights, folder)

    def merged_bytes(self) -> int:
        packed = sum(m.num_bytes for m in self._backbone.modules() if isinstance(m, Nf4Linear))
        return packed + sum(p.numel() * p.element_size() for p in self._backbone.parameters())


def _example() -> Microbatch:
    """Two rollouts that share a prompt, and one alone."""
    segments = Segments()
    prompt = segments.add(np.zeros(8, np.int32))
    added = [segments.add(np.zeros(size, np.int32), parent=prompt) for size in (33, 50)]
    added.append(segments.add(np.zeros(47, np.int32)))
    rows = [segments.paths[number][7:-1] for number in added]
    rollouts = np.repeat(np.arange(len(rows), dtype=np.int32), [len(own) for own in rows])
    zeros = np.zeros(len(rollouts), np.float32)
    return Microbatch(
        tokens=np.concatenate(segments.tokens),
        positions=np.concatenate(segments.positions).astype(np.int32),
        lengths=np.array([len(tokens) for tokens in segments.tokens], np.int32),
        parents=np.array(segments.parents, np.int32),
        predictors=np.concatenate(rows).astype(np.int32),
        targets=np.zeros(len(rollouts), np.int32),
        rollouts=rollouts,
        engine_logprobs=zeros,
        versions=np.zeros(len(rollouts), np.int32),
        advantages=zeros,
        temperatures=np.ones(len(rollouts), np.float32),
    )


def _less_baseline(microbatch: Microbatch, log_weights: np.ndarray) -> Microbatch:
    """Subtract the weighted mean of each group; `log_weights` are those of rollouts."""
    assert microbatch.groups is not None, "groups are packed whole"
    advantages = microbatch.advantages.copy()
    for group in np.unique(microbatch.groups):
        is_own = microbatch.groups == group
        rollouts, counts = np.unique(microbatch.rollouts[is_own], return_counts=True)
        weights = np.exp(log_weights[rollouts] - log_weights[rollouts].max())
        tokens = np.repeat(weights / counts, counts)
        advantages[is_own] -= (tokens * advantages[is_own]).sum() / weights.sum()
    return replace(microbatch, advantages=advantages)
