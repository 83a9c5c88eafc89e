"""A microbatch as tensors: what a model is given, and what a loss is called with.

T = rows of one microbatch, N = trained tokens of it, R = runs of them, D = hidden size,
K = tokens a teacher told of at each.

Forward passes that only ask what a policy says about a batch, before a step changes it.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from millrace.core.microbatch import Batch, Microbatch
from millrace.models.attention.layout import PackedLayout
from millrace.models.loading import hidden_states
from millrace.training.losses.loss import Runs, TokenBatch, TopK
from millrace.training.packing.splitting import RowLimit

SMALLEST_SHARE = 1e-8  # of all tokens that a teacher did not tell of


def packed_hidden_states(model: PreTrainedModel, microbatch: Microbatch) -> Tensor:  # [T, D]
    """`model` was loaded with PACKED_ATTENTION."""
    return hidden_states(
        model,
        input_ids=as_tensor(microbatch.tokens, np.int64, model.device)[None],
        position_ids=as_tensor(microbatch.positions, np.int64, model.device)[None],
        layout=PackedLayout.of(microbatch.lengths, parents=microbatch.parents, device=model.device),
    )


def token_batch(
    microbatch: Microbatch,
    batch: Batch,
    *,
    logprobs: Tensor,
    entropies: Tensor,
    version: int,
    told: Tensor | None = None,
) -> TokenBatch:
    """`logprobs` and `entropies` [N], and `told` [N, K + 1] of what a teacher told of, are the
    trainer's, which is at `version`."""
    device = logprobs.device
    return TokenBatch(
        trainer_logprobs=logprobs,
        engine_logprobs=as_tensor(microbatch.engine_logprobs, np.float32, device),
        entropies=entropies,
        advantages=as_tensor(microbatch.advantages, np.float32, device),
        staleness=as_tensor(version - microbatch.versions, np.int64, device),
        sequences=_runs(microbatch.rollouts, device),
        turns=_runs(_turns(microbatch), device),
        num_trained_tokens=batch.num_trained_tokens,
        num_sequences=batch.num_sequences,
        proximal_logprobs=_if_any(microbatch.proximal_logprobs, device),
        reference_logprobs=_if_any(microbatch.reference_logprobs, device),
        teacher_logprobs=_if_any(microbatch.teacher_logprobs, device),
        told=None if told is None else _told(microbatch, trainer=told),
        groups=None if microbatch.groups is None else _groups(microbatch.groups, device),
        num_groups=batch.num_groups,
    )


def as_tensor(array: np.ndarray, dtype: Any, device: torch.device) -> Tensor:
    """A copy: arrays from the wire are read-only views of a receive buffer."""
    return torch.from_numpy(array.astype(dtype)).to(device, non_blocking=True)


def _if_any(logprobs: np.ndarray | None, device: torch.device) -> Tensor | None:
    return None if logprobs is None else as_tensor(logprobs, np.float32, device)


def _told(microbatch: Microbatch, *, trainer: Tensor) -> TopK:
    assert microbatch.told_logprobs is not None
    teacher = as_tensor(microbatch.told_logprobs, np.float32, trainer.device)
    # Rounding may leave less than nothing for all others; the least of it is far below what counts.
    others = (-teacher.logsumexp(-1, keepdim=True).expm1()).clamp(min=SMALLEST_SHARE).log()
    return TopK(teacher=torch.cat([teacher, others], 1), trainer=trainer)


def _runs(ids: np.ndarray, device: torch.device) -> Runs:
    """Counted here, not on the device: their number would have to be waited for there."""
    return Runs(
        ids=as_tensor(ids, np.int64, device),
        lengths=as_tensor(np.bincount(ids), np.int64, device),
    )


def _groups(numbers: np.ndarray, device: torch.device) -> Runs:
    return _runs(np.unique(numbers, return_inverse=True)[1], device)


def _turns(microbatch: Microbatch) -> np.ndarray:  # [N] int64
    """Numbers of turns: one ends with its rollout, and where a token was not sampled."""
    rollouts = microbatch.rollouts
    positions = microbatch.positions[microbatch.predictors]
    begins = (np.diff(rollouts) != 0) | (np.diff(positions) != 1)
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(begins)])


@torch.no_grad()
def noted(
    batch: Batch,
    field: Literal["proximal_logprobs", "reference_logprobs"],
    *,
    ask: Callable[[Microbatch], Tensor],
    limit: RowLimit,
) -> Batch:
    """The batch with what `ask` says of the trained tokens [N] in this field of its microbatches,
    which are split where they do not fit into memory."""
    while True:
        parts: list[Microbatch] = []
        for part in limit.fitting(batch)[0]:
            try:
                logprobs = ask(part)
            except torch.OutOfMemoryError:
                limit.lower(part)
                break
            parts.append(dataclasses.replace(part, **{field: logprobs.cpu().numpy()}))
        else:
            return dataclasses.replace(batch, microbatches=tuple(parts))
