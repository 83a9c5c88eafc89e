"""Gradients of several policies whose adapters share one model, computed in shared passes.

Promise: each policy gets the gradient that it would get alone. A pass has at most `pass_tokens`
rows, unless a single microbatch has more. Policies compute alone if a shared pass does not fit into
memory, if one of their gradients is not finite, and if routes are replayed. Used by one thread.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from millrace.core.microbatch import Batch, Microbatch
from millrace.training.packing.splitting import MAX_GROUPS, joined
from millrace.training.policy_model import PolicyModel
from millrace.training.token_batches import PolicyOutput
from millrace.training.trainable_model import Gradient, unless_out_of_memory


@dataclass(frozen=True, slots=True, eq=False)
class PolicyBatch:
    policy: PolicyModel
    batch: Batch
    loss: Callable[[Microbatch, PolicyOutput | None], tuple[Tensor, Any]]  # None = not computed yet

    def gradient(self, first: Gradient | None = None) -> Gradient:
        """See PolicyModel.clipped_gradient()."""
        return self.policy.clipped_gradient(
            self.batch, lambda part: self.loss(part, None), first=first
        )


def clipped_gradients(work: Sequence[PolicyBatch], *, pass_tokens: int) -> list[Gradient]:
    """The gradient of each batch, clipped; no two batches have the same policy."""
    if len(work) > 1 and all(one.policy.shared is not None for one in work):
        together = unless_out_of_memory(lambda: _accumulated(work, pass_tokens))
        found = [one.gradient(first) for one, first in zip(work, together, strict=False)]
        if found and all(gradient.is_finite for gradient in found):
            return found
    return [one.gradient() for one in work]


def _accumulated(work: Sequence[PolicyBatch], pass_tokens: int) -> list[Gradient]:
    fitting = [one.policy.row_limit.fitting(one.batch) for one in work]
    results: list[list[tuple[Tensor, Any]]] = [[] for _ in work]
    for one in work:
        one.policy.free_gradient()
    for members in _passes([parts for parts, _ in fitting], work, pass_tokens):
        for number, result in zip(members, _backward(members, work), strict=True):
            results[number].append(result)
    return [
        one.policy.accumulated(own, num_splits=num_splits)
        for one, own, (_, num_splits) in zip(work, results, fitting, strict=True)
    ]


def _passes(
    parts: Sequence[Sequence[Microbatch]], work: Sequence[PolicyBatch], pass_tokens: int
) -> list[dict[int, Microbatch]]:
    """The microbatches of each pass, by the number of their policy."""
    shared = work[0].policy.shared
    assert shared is not None
    most = max(1, shared.max_adapters // MAX_GROUPS)
    passes: list[dict[int, Microbatch]] = []
    for number, own in enumerate(parts):
        for part in own:
            with_room = (
                each
                for each in passes
                if number not in each
                and len(each) < most
                and sum(len(p.tokens) for p in (*each.values(), part)) <= pass_tokens
            )
            chosen = next(with_room, None)
            if chosen is None:
                passes.append(chosen := {})
            chosen[number] = part
    return passes


def _backward(
    members: dict[int, Microbatch], work: Sequence[PolicyBatch]
) -> list[tuple[Tensor, Any]]:
    """Compute one pass, and the loss and output of each microbatch in it."""
    whole, groups = joined([*members.values()])
    policies = [work[number].policy for number in members]
    shared = policies[0].shared
    assert shared is not None
    adapters = [policies[place].applied_adapter for place, _ in groups]
    with shared.applied(adapters, [num_rows for _, num_rows in groups]):
        output = policies[0].logprobs(whole)
        sizes = [len(part.targets) for part in members.values()]
        splits = zip(output.logprobs.split(sizes), output.entropies.split(sizes), strict=True)
        results = [
            work[number].loss(part, PolicyOutput(*own, None))
            for (number, part), own in zip(members.items(), splits, strict=True)
        ]
        scales = [policy.loss_scale for policy in policies]
        scaled = [loss * scale for (loss, _), scale in zip(results, scales, strict=True)]
        torch.stack(scaled).sum().backward()
    return [(loss.detach(), kept) for loss, kept in results]
