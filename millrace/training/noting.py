"""Forward passes that only ask what a policy says about a batch, before a step changes it."""

import dataclasses
from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

from millrace.core.microbatch import Batch, Microbatch
from millrace.training.splitting import RowLimit


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
