"""The engine in scoring mode: prefill only. It reads what others wrote and says how likely it was.

Promise: what plain transformers says about the same tokens, in float32. A passage is read in one
forward pass, so by one version; what the passages of a group begin with is read once. Logits of one
chunk of positions exist at a time.

There is nothing to decode and so no KV to keep: passages lie end to end as in the trainer, whose
attention and head this uses. An engine that decodes reads in this way, too, between two passes.
Used by one thread.

T = rows of a pass, n = judged tokens, V = vocabulary, K = top tokens told.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from millrace.core.records import Kept
from millrace.core.score_requests import ScoreRequest, TokenLogprobs
from millrace.models.attention.layout import PackedLayout
from millrace.models.loading import hidden_states
from millrace.models.logprobs import KeptRows, final_logits

MIN_SHARED_TOKENS = 4  # as in the trainer: sharing less costs more than it saves


class ScoringEngine:
    def __init__(
        self, model: PreTrainedModel, *, logprob_chunk: int = 1024, num_known: int | None = None
    ) -> None:
        """`model` was loaded with PACKED_ATTENTION, or PAGED_ATTENTION. Top tokens are of the first
        `num_known`: a policy with the same tokenizer may have fewer rows of padding behind it."""
        self._model = model
        self._chunk = logprob_chunk
        self._num_known = num_known

    @torch.no_grad()
    def read(
        self, groups: Sequence[Sequence[ScoreRequest]], *, version: int | None
    ) -> list[list[TokenLogprobs]]:
        """One forward pass over all of them; `version` is what the model holds."""
        laid = lay_out(groups)
        passages = [passage for group in groups for passage in group]
        device = self._model.device
        hidden = hidden_states(
            self._model,
            input_ids=torch.from_numpy(laid.tokens).to(device)[None],
            position_ids=torch.from_numpy(laid.positions).to(device)[None],
            layout=PackedLayout.of(laid.lengths, parents=laid.parents, device=device),
        )
        judged = self._judge(hidden, laid.predictors, passages)
        ends = np.cumsum([len(passage.positions) for passage in passages])
        told: list[TokenLogprobs] = []
        for passage, end in zip(passages, ends, strict=True):
            mine, top = slice(end - len(passage.positions), end), slice(passage.top_k)
            told.append(
                TokenLogprobs(
                    logprobs=judged.logprobs[mine],
                    top_ids=judged.top_ids[mine, top],
                    top_logprobs=judged.top_logprobs[mine, top],
                    version=version,
                    entropies=judged.entropies[mine] if passage.wants_entropies else None,
                )
            )
        in_order = iter(told)
        return [[next(in_order) for _ in group] for group in groups]

    def _judge(
        self, hidden: Tensor, predictors: np.ndarray, passages: Sequence[ScoreRequest]
    ) -> "_Judged":
        """What is said of all judged tokens."""
        device, num_top = hidden.device, max(passage.top_k for passage in passages)
        targets = np.concatenate([p.tokens[p.positions] for p in passages]).astype(np.int64)
        counts = [len(passage.positions) for passage in passages]
        temperatures = np.repeat([passage.temperature for passage in passages], counts)
        columns = (predictors, targets, temperatures.astype(np.float32))
        chunks = zip(
            *(torch.from_numpy(column).to(device).split(self._chunk) for column in columns),
            strict=True,
        )
        kept = _join_kept(passages)
        allowed = None if kept is None else KeptRows.of(kept, device=device).split(self._chunk)
        told = [
            _describe(
                final_logits(self._model, hidden[rows]),
                *chunk,
                kept=None if allowed is None else allowed[i],
                num_top=num_top,
                num_known=self._num_known,
                wants_entropies=any(passage.wants_entropies for passage in passages),
            )
            for i, (rows, *chunk) in enumerate(chunks)
        ]
        logprobs, ids, top, entropies = (
            torch.cat(part).cpu().numpy() for part in zip(*told, strict=True)
        )
        return _Judged(logprobs, ids.astype(np.int32), top, entropies)


class _Judged(NamedTuple):
    logprobs: np.ndarray  # [n]
    top_ids: np.ndarray  # [n, K]
    top_logprobs: np.ndarray  # [n, K]
    entropies: np.ndarray  # [n]; [0] = nobody wants them


def _describe(
    logits: Tensor,  # [n, V]
    targets: Tensor,  # [n]
    temperatures: Tensor,  # [n]
    *,
    kept: KeptRows | None,
    num_top: int,
    num_known: int | None,
    wants_entropies: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Logprobs of the targets [n], ids and logprobs of the likeliest tokens [n, K], entropies [n]
    if they are wanted."""
    scaled = logits / temperatures[:, None]
    if kept is not None:
        scaled = scaled.masked_fill(~kept.allowed(logits.shape[-1]), -torch.inf)
    normalizers = scaled.logsumexp(-1, keepdim=True)
    top = scaled[:, :num_known].topk(num_top, dim=-1)
    logprobs = scaled.gather(-1, targets[:, None]) - normalizers
    entropies = logits.new_empty(0)
    if wants_entropies:
        # entr(p) = -p log p is 0 where nothing is left of a token.
        entropies = torch.special.entr((scaled - normalizers).exp()).sum(-1)
    return logprobs.squeeze(-1), top.indices, top.values - normalizers, entropies


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Laid:
    """Passages end to end, as the trainer's microbatches lie (core/microbatch.py)."""

    tokens: np.ndarray  # [T] int64
    positions: np.ndarray  # [T] int64
    lengths: np.ndarray  # [segments] int64
    parents: np.ndarray  # [segments] int64; -1 = none
    predictors: np.ndarray  # [n] int64; the row that predicts each judged token, in their order


def num_rows(group: Sequence[ScoreRequest]) -> int:
    """That are computed for passages which are read together."""
    shared = _shared_tokens(group)
    return shared + sum(len(passage.read) - shared for passage in group)


def lay_out(groups: Sequence[Sequence[ScoreRequest]]) -> Laid:
    """What a group shares comes first, then what follows it in each, then groups that share
    nothing."""
    shared = [_shared_tokens(group) for group in groups]
    segments = [group[0].read[:s] for group, s in zip(groups, shared, strict=True) if s]
    begins = np.concatenate([[0], np.cumsum([len(segment) for segment in segments])])
    offsets = [np.arange(len(segment)) for segment in segments]
    parents = [-1] * len(segments)
    num_laid = int(begins[-1])
    predictors: dict[tuple[int, int], np.ndarray] = {}
    parent_of = np.cumsum([s > 0 for s in shared]) - 1  # where there is one
    for g in sorted(range(len(groups)), key=lambda g: shared[g] == 0):
        for p, passage in enumerate(groups[g]):
            own = passage.read[shared[g] :]
            rows = np.arange(len(passage.read)) + (num_laid - shared[g])
            if shared[g]:
                rows[: shared[g]] = np.arange(shared[g]) + begins[parent_of[g]]
            predictors[g, p] = rows[passage.positions - 1]
            segments.append(own)
            offsets.append(np.arange(shared[g], len(passage.read)))
            parents.append(int(parent_of[g]) if shared[g] else -1)
            num_laid += len(own)
    return Laid(
        tokens=np.concatenate(segments).astype(np.int64),
        positions=np.concatenate(offsets),
        lengths=np.array([len(segment) for segment in segments]),
        parents=np.array(parents),
        predictors=np.concatenate([predictors[key] for key in sorted(predictors)]),
    )


def _shared_tokens(group: Sequence[ScoreRequest]) -> int:
    """What all of them begin with; at least one token of each is left for itself."""
    if len(group) == 1:
        return 0
    first = group[0].read
    shortest = min(len(passage.read) for passage in group)
    shared = min(_common(first[:shortest], passage.read[:shortest]) for passage in group[1:])
    shared = min(shared, shortest - 1)
    return shared if shared >= MIN_SHARED_TOKENS else 0


def _common(a: np.ndarray, b: np.ndarray) -> int:
    differs = a != b
    return int(differs.argmax()) if differs.any() else len(a)


def _join_kept(passages: Sequence[ScoreRequest]) -> Kept | None:
    if all(passage.kept is None for passage in passages):
        return None
    ids, sizes = [], []
    for passage in passages:
        if passage.kept is None:
            sizes.append(np.zeros(len(passage.positions), np.int64))
        else:
            ids.append(passage.kept.ids)
            sizes.append(np.diff(passage.kept.offsets))
    offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(np.concatenate(sizes))])
    return Kept(ids=np.concatenate(ids), offsets=offsets)
