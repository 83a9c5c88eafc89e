"""Packed sequences in the self-test of models/support.py, as the trainer and teachers compute
them."""

import functools
from collections.abc import Sequence
from contextlib import nullcontext

import numpy as np
import torch
from transformers import PreTrainedModel

from millrace.core.microbatch import Segments, common_prefix
from millrace.models.attention.layout import PackedLayout
from millrace.models.attention.packed import PACKED_ATTENTION
from millrace.models.exact.attention import Tiles
from millrace.models.exact.mode import ExactMode
from millrace.models.loading import hidden_states
from millrace.models.logprobs import final_logits
from millrace.models.support import AttentionPath, ScoredTokens


def _score(
    model: PreTrainedModel, sequences: Sequence[np.ndarray], *, exact: bool = False
) -> list[ScoredTokens]:
    """All sequences in one pass; the first two share a prompt."""
    shared = common_prefix(*sequences[:2])
    segments = Segments([sequences[0][:shared]])
    rows = [segments.add(tokens, parent=0, shared=shared) for tokens in sequences[:2]]
    rows += [segments.add(tokens, parent=-1, shared=0) for tokens in sequences[2:]]
    lengths = [len(tokens) for tokens in segments.tokens]
    layout = PackedLayout(lengths, parents=segments.parents, device=model.device)
    with ExactMode(torch.float32) if exact else nullcontext():
        hidden = hidden_states(
            model,
            input_ids=torch.from_numpy(np.concatenate(segments.tokens))[None],
            position_ids=torch.from_numpy(np.concatenate(segments.positions))[None],
            layout=layout,
            tiles=Tiles.packed(layout, model.device) if exact else None,
        )
        logprobs = final_logits(model, hidden).log_softmax(-1).numpy()
    return [
        ScoredTokens(tokens=tokens, logprobs=logprobs[own[:-1], tokens[1:]])
        for own, tokens in zip(rows, sequences, strict=True)
    ]


EXACT_PACKED = AttentionPath(
    name=PACKED_ATTENTION, user="trainer", score=functools.partial(_score, exact=True)
)
PACKED = AttentionPath(name=PACKED_ATTENTION, user="trainer", score=_score)
