"""Prefill-only scoring: logprobs of tokens that are already given.

Promise: the scores equal those of plain transformers on the same tokens, in float32. One forward
pass serves all requests, so each answer comes from one version. A prefix that all requests of a
group share is computed once. Logits exist for one chunk of positions at a time.

Scoring caches no KV: requests lie end to end as in the trainer, with the trainer's attention and
head. One thread calls everything here.

T = rows of a pass, n = scored positions, V = vocabulary, K = top tokens reported.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from millrace.core.completions import join_kept
from millrace.core.microbatch import MIN_SHARED_TOKENS, Segments, common_prefix
from millrace.core.records import Kept, ScoreRequest, TokenLogprobs
from millrace.models.attention.layout import PackedLayout
from millrace.models.kept_rows import KeptRows
from millrace.models.loading import hidden_states
from millrace.models.logprobs import final_logits


@dataclass(frozen=True, eq=False)
class ScoringEngine:
    model: PreTrainedModel  # loaded with PACKED_ATTENTION or PAGED_ATTENTION
    logprob_chunk: int = 1024
    # Number of ids that may be top tokens: padding may make this vocabulary larger than that of
    # the policy.
    num_known: int | None = None

    @torch.no_grad()
    def score(
        self, groups: Sequence[Sequence[ScoreRequest]], *, version: int | None
    ) -> list[list[TokenLogprobs]]:
        """Score all groups in one forward pass; `version` is the version that the model holds."""
        segments, predictors = pack(groups)
        requests = [request for group in groups for request in group]
        device = self.model.device
        tokens = np.concatenate(segments.tokens).astype(np.int64)
        lengths = [len(tokens) for tokens in segments.tokens]
        hidden = hidden_states(
            self.model,
            input_ids=torch.from_numpy(tokens).to(device)[None],
            position_ids=torch.from_numpy(np.concatenate(segments.positions)).to(device)[None],
            layout=PackedLayout(lengths, parents=segments.parents, device=device),
        ).to(self.model.dtype)  # or the head would be cast to the residual stream's float32
        logprobs, ids, top, entropies = self._score_rows(hidden, predictors, requests)
        ends = np.cumsum([len(request.positions) for request in requests])
        places = [slice(end - len(r.positions), end) for r, end in zip(requests, ends, strict=True)]
        results = (
            TokenLogprobs(
                logprobs=logprobs[own],
                top_ids=ids[own, : request.top_k],
                top_logprobs=top[own, : request.top_k],
                version=version,
                entropies=entropies[own] if request.wants_entropies else None,
            )
            for request, own in zip(requests, places, strict=True)
        )
        return [[next(results) for _ in group] for group in groups]

    def _score_rows(
        self, hidden: Tensor, predictors: np.ndarray, requests: Sequence[ScoreRequest]
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """What chunk_scores() returns, for all positions of all requests."""
        device, num_top = hidden.device, max(request.top_k for request in requests)
        targets = np.concatenate([p.tokens[p.positions] for p in requests]).astype(np.int64)
        counts = [len(request.positions) for request in requests]
        temperatures = np.repeat([request.temperature for request in requests], counts)
        columns = (predictors, targets, temperatures.astype(np.float32))
        kept, num = _join_kept(requests), self.logprob_chunk
        split = (torch.from_numpy(column).to(device).split(num) for column in columns)
        allowed = None if kept is None else KeptRows.of(kept, device=device).split(num)
        parts = [
            chunk_scores(
                final_logits(self.model, hidden[rows]),
                *chunk,
                kept=None if allowed is None else allowed[i],
                num_top=num_top,
                num_known=self.num_known,
                wants_entropies=any(request.wants_entropies for request in requests),
            )
            for i, (rows, *chunk) in enumerate(zip(*split, strict=True))
        ]
        columns = (torch.cat(part).cpu().numpy() for part in zip(*parts, strict=True))
        logprobs, ids, top, entropies = columns
        return logprobs, ids.astype(np.int32), top, entropies


def chunk_scores(
    logits: Tensor,  # [n, V]
    targets: Tensor,  # [n]
    temperatures: Tensor,  # [n]
    *,
    kept: KeptRows | None,
    num_top: int,
    num_known: int | None = None,
    wants_entropies: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Logprobs of targets [n], ids and logprobs of top tokens [n, K], entropies [n] if wanted."""
    scaled = logits / temperatures[:, None]
    if kept is not None:
        scaled = scaled.masked_fill(~kept.allowed(logits.shape[-1]), -torch.inf)
    normalizers = scaled.logsumexp(-1, keepdim=True)
    known = scaled[:, :num_known]
    top = known.topk(min(num_top, known.shape[-1]), dim=-1)
    logprobs = scaled.gather(-1, targets[:, None]) - normalizers
    entropies = logits.new_empty(0)
    if wants_entropies:
        # entr(p) = -p log p is 0 for tokens that were ruled out.
        entropies = torch.special.entr((scaled - normalizers).exp()).sum(-1)
    return logprobs.squeeze(-1), top.indices, top.values - normalizers, entropies


def num_rows(group: Sequence[ScoreRequest]) -> int:
    """Rows that a forward pass computes for requests scored together."""
    shared = _shared_tokens(group)
    return shared + sum(len(request.inputs) - shared for request in group)


def pack(groups: Sequence[Sequence[ScoreRequest]]) -> tuple[Segments, np.ndarray]:
    """Requests end to end, in the layout of the trainer's microbatches, and the row that predicts
    each position [n], in the order of the requests."""
    shared = [_shared_tokens(group) for group in groups]
    segments = Segments()
    prefixes = {
        g: segments.add(group[0].inputs[: shared[g]]) for g, group in enumerate(groups) if shared[g]
    }
    predictors: list[list[np.ndarray]] = [[] for _ in groups]
    for g in sorted(range(len(groups)), key=lambda g: shared[g] == 0):
        for request in groups[g]:
            added = segments.add(request.inputs[shared[g] :], parent=prefixes.get(g, -1))
            predictors[g].append(segments.paths[added][request.positions - 1])
    return segments, np.concatenate([rows for of_group in predictors for rows in of_group])


def _shared_tokens(group: Sequence[ScoreRequest]) -> int:
    """Length of the prefix that all requests share; each keeps at least one token of its own."""
    if len(group) == 1:
        return 0
    shortest = min(len(request.inputs) for request in group)
    shared = min(common_prefix(group[0].inputs, request.inputs) for request in group[1:])
    shared = min(shared, shortest - 1)
    return shared if shared >= MIN_SHARED_TOKENS else 0


def _join_kept(requests: Sequence[ScoreRequest]) -> Kept | None:
    if all(request.kept is None for request in requests):
        return None
    none = np.zeros(1 + max(len(r.positions) for r in requests), np.int64)  # offsets of no ids
    no_ids = np.empty(0, dtype=np.int32)
    all_ids = (Kept(ids=no_ids, offsets=none[: len(r.positions) + 1]) for r in requests)
    return join_kept([r.kept or own for r, own in zip(requests, all_ids, strict=True)])
