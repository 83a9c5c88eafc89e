"""The trained tokens of a microbatch as tensors, as a loss is called with them.

N = trained tokens of a microbatch, R = segments of them, K = ids per token that a teacher gives
logprobs for.
"""

from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from millrace.core.microbatch import Batch, Microbatch
from millrace.training.losses.loss import TokenBatch, TokenSegments, TopK

MIN_OTHER_PROBABILITY = 1e-8  # of all ids besides the teacher's top k


class PolicyOutput(NamedTuple):
    """What the policy says about the trained tokens of a microbatch; differentiable."""

    logprobs: Tensor  # [N] float32
    entropies: Tensor  # [N] float32
    topk: Tensor | None  # [N, K + 1] float32 logprobs of the given ids and of all others together


def token_batch(
    microbatch: Microbatch, batch: Batch, *, output: PolicyOutput, version: int
) -> TokenBatch:
    """The input of a loss; `output` is that of the policy, which is at `version`."""
    logprobs, entropies, topk = output
    device = logprobs.device
    return TokenBatch(
        trainer_logprobs=logprobs,
        engine_logprobs=as_tensor(microbatch.engine_logprobs, np.float32, device),
        entropies=entropies,
        advantages=as_tensor(microbatch.advantages, np.float32, device),
        staleness=as_tensor(version - microbatch.versions, np.int64, device),
        sequences=_segments(microbatch.rollouts, device),
        turns=_segments(_turns(microbatch), device),
        num_trained_tokens=batch.num_trained_tokens,
        num_sequences=batch.num_sequences,
        proximal_logprobs=_optional(microbatch.proximal_logprobs, device),
        scores=_optional(microbatch.scores, device),
        reference_logprobs=_optional(microbatch.reference_logprobs, device),
        teacher_logprobs=_optional(microbatch.teacher_logprobs, device),
        topk=None if topk is None else _topk(microbatch, trainer=topk),
        groups=None
        if microbatch.groups is None
        else _segments(np.unique(microbatch.groups, return_inverse=True)[1], device),
        num_groups=batch.num_groups,
    )


def as_tensor(array: np.ndarray, dtype: Any, device: torch.device) -> Tensor:
    """A copy: arrays from the wire are read-only views of a receive buffer."""
    return torch.from_numpy(array.astype(dtype)).to(device, non_blocking=True)


def _optional(logprobs: np.ndarray | None, device: torch.device) -> Tensor | None:
    return None if logprobs is None else as_tensor(logprobs, np.float32, device)


def _topk(microbatch: Microbatch, *, trainer: Tensor) -> TopK:
    assert microbatch.topk_logprobs is not None
    teacher = as_tensor(microbatch.topk_logprobs, np.float32, trainer.device)
    # Rounding can make the rest negative.
    others = (-teacher.logsumexp(-1, keepdim=True).expm1()).clamp(min=MIN_OTHER_PROBABILITY).log()
    return TopK(teacher=torch.cat([teacher, others], 1), trainer=trainer)


def _segments(ids: np.ndarray, device: torch.device) -> TokenSegments:
    """Lengths are counted on the host: on the device their number would force a wait."""
    return TokenSegments(
        ids=as_tensor(ids, np.int64, device), lengths=as_tensor(np.bincount(ids), np.int64, device)
    )


def _turns(microbatch: Microbatch) -> np.ndarray:  # [N] int64
    """The turn of each trained token; it ends with the rollout and before an unsampled token."""
    rollouts = microbatch.rollouts
    positions = microbatch.positions[microbatch.predictors]
    begins = (np.diff(rollouts) != 0) | (np.diff(positions) != 1)
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(begins)])
