"""The draw of a decode step: fixed shapes in and out, so that a CUDA graph can hold it.

On CUDA the kernels of drawing_kernels.py; elsewhere sampler.py, which is their oracle.
B = rows, V = vocabulary.
"""

from dataclasses import dataclass
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from millrace.inference.embedded.sampler import (
    SamplerOutput,
    SamplingBatch,
    SamplingTensors,
    sample,
)
from millrace.models.logprobs import KeptRows

KEPT_CAPACITY = 4096  # kept ids a row has room for, unless told otherwise


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class StepSample:
    tokens: Tensor  # [B] int64
    logprobs: Tensor  # [B] float32
    kept: Tensor | None  # [B, capacity] int32
    num_kept: Tensor | None  # [B] int32; 0 = nothing was ruled out; may exceed the capacity


def sample_step(
    logits: Tensor, rows: SamplingTensors, *, truncates: bool, capacity: int = KEPT_CAPACITY
) -> StepSample:
    """One token for each row of logits [B, V] float32."""
    if not logits.is_cuda:
        return _plain_sample(logits, rows, truncates=truncates, capacity=capacity)
    from millrace.inference.embedded.decode import sampling_kernels

    tokens, logprobs, kept, num_kept = sampling_kernels.sample(
        logits,
        temperatures=rows.temperatures,
        keys=rows.keys,
        indices=rows.positions,
        truncation=(rows.top_k, rows.top_p, rows.min_p) if truncates else None,
        capacity=capacity,
    )
    return StepSample(tokens=tokens, logprobs=logprobs, kept=kept, num_kept=num_kept)


def sample_batch(logits: Tensor, rows: SamplingBatch) -> SamplerOutput:
    """What sample() returns, by the kernels where they can."""
    if not logits.is_cuda:
        return sample(logits, rows)
    drawn = sample_step(logits.contiguous(), rows, truncates=rows.any_truncates)
    if drawn.kept is None or drawn.num_kept is None:
        return SamplerOutput(tokens=drawn.tokens, logprobs=drawn.logprobs, kept=None)
    if int(drawn.num_kept.max()) > KEPT_CAPACITY:
        return sample(logits, rows)
    places = torch.arange(KEPT_CAPACITY, device=logits.device)
    kept = KeptRows(
        ids=drawn.kept[places < drawn.num_kept[:, None]].long(),
        offsets=F.pad(drawn.num_kept.cumsum(0), (1, 0)),
    )
    return SamplerOutput(tokens=drawn.tokens, logprobs=drawn.logprobs, kept=kept)


def _plain_sample(
    logits: Tensor, rows: SamplingTensors, *, truncates: bool, capacity: int
) -> StepSample:
    drawn = sample(
        logits,
        SamplingBatch(
            temperatures=rows.temperatures,
            top_k=rows.top_k,
            top_p=rows.top_p,
            min_p=rows.min_p,
            keys=rows.keys,
            positions=rows.positions,
            any_greedy=True,
            all_greedy=False,
            any_truncates=truncates,
            num_ordered=logits.shape[1],
        ),
    )
    kept = num_kept = None
    if drawn.kept is not None:
        num_kept = drawn.kept.offsets.diff().int()
        kept = torch.zeros(len(logits), capacity, dtype=torch.int32)
        bounds = drawn.kept.offsets.tolist()
        for row, (start, stop) in enumerate(pairwise(bounds)):
            stop = min(stop, start + capacity)
            kept[row, : stop - start] = drawn.kept.ids[start:stop]
    return StepSample(tokens=drawn.tokens, logprobs=drawn.logprobs, kept=kept, num_kept=num_kept)
