"""Token batches for losses, given as ratios or drawn at random; float64, so that gradients can be
checked."""

import dataclasses
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from millrace.training.losses.loss import Loss, TokenBatch, TokenSegments
from millrace.training.losses.recipes import build_loss

MAX_NEW_TOKENS = 7


def loss_of(type: str = "clipped", **settings: Any) -> Any:
    return build_loss({"type": type, **settings}, max_new_tokens=MAX_NEW_TOKENS)


def segments_of(lengths: Sequence[int]) -> TokenSegments:
    ids = [i for i, length in enumerate(lengths) for _ in range(length)]
    return TokenSegments(ids=torch.tensor(ids), lengths=torch.tensor(lengths))


def tokens_of(
    ratios: Sequence[float],
    advantages: Sequence[float],
    *,
    lengths: Sequence[int] | None = None,
    turns: Sequence[int] | None = None,
    **columns: Any,
) -> TokenBatch:
    """Tokens whose trainer/engine probability ratios are as given; the engine's are 1/16."""
    engine = torch.full((len(ratios),), math.log(1 / 16), dtype=torch.float64)
    sequences = segments_of(lengths or [len(ratios)])
    given = {
        "trainer_logprobs": (engine + torch.tensor(ratios, dtype=torch.float64).log()),
        "engine_logprobs": engine,
        "entropies": torch.zeros_like(engine),
        "advantages": torch.tensor(advantages, dtype=torch.float64),
        "staleness": torch.zeros(len(ratios), dtype=torch.int64),
        "num_trained_tokens": len(ratios),
        "num_sequences": len(sequences.lengths),
        **columns,
    }
    given["trainer_logprobs"].requires_grad_()
    turn_segments = sequences if turns is None else segments_of(turns)
    return TokenBatch(sequences=sequences, turns=turn_segments, **given)


def random_tokens(lengths: Sequence[int], *, seed: int, spread: float = 0.3) -> TokenBatch:
    """One advantage a sequence; every column is there."""
    generator = torch.Generator().manual_seed(seed)
    size = sum(lengths)

    def normal(num: int, scale: float = 1.0) -> Tensor:
        return scale * torch.randn(num, generator=generator, dtype=torch.float64)

    engine = -1 - normal(size).abs()
    sequences = segments_of(lengths)
    return TokenBatch(
        trainer_logprobs=(engine + normal(size, spread)).clamp(max=-1e-3).requires_grad_(),
        engine_logprobs=engine,
        entropies=normal(size).abs().requires_grad_(),
        advantages=normal(len(lengths))[sequences.ids],
        staleness=torch.randint(0, 5, (size,), generator=generator),
        sequences=sequences,
        turns=segments_of([part for n in lengths for part in (n // 2, n - n // 2) if part]),
        num_trained_tokens=size,
        num_sequences=len(lengths),
        proximal_logprobs=engine + normal(size, spread),
        reference_logprobs=engine + normal(size, spread),
        teacher_logprobs=engine + normal(size, spread),
    )


def split(tokens: TokenBatch, *, first: int) -> tuple[TokenBatch, TokenBatch]:
    """Two microbatches of the same batch: the first sequences, and the others. Their logprobs are
    views of the whole's, which gets the gradients of both."""
    lengths, turns = tokens.sequences.lengths.tolist(), tokens.turns.lengths.tolist()
    cut = sum(lengths[:first])
    turn_ends = list(itertools.accumulate(turns))
    turns_first = turn_ends.index(cut) + 1 if cut else 0
    parts = []
    for rows, own, own_turns in (
        (slice(0, cut), lengths[:first], turns[:turns_first]),
        (slice(cut, None), lengths[first:], turns[turns_first:]),
    ):
        columns = {
            field.name: getattr(tokens, field.name)[rows]
            for field in dataclasses.fields(tokens)
            if isinstance(getattr(tokens, field.name), Tensor)
        }
        parts.append(
            dataclasses.replace(
                tokens, sequences=segments_of(own), turns=segments_of(own_turns), **columns
            )
        )
    return parts[0], parts[1]


def gradient(loss: Loss, tokens: TokenBatch) -> Tensor:
    """Of the loss by the trainer's logprobs [N]."""
    (found,) = torch.autograd.grad(loss(tokens)[0], tokens.trainer_logprobs)
    return found


def as_function(loss: Callable[[TokenBatch], Any], tokens: TokenBatch) -> Callable[..., Tensor]:
    """The loss by trainer logprobs and entropies, for gradcheck."""

    def value(logprobs: Tensor, entropies: Tensor) -> Tensor:
        columns = {"trainer_logprobs": logprobs, "entropies": entropies}
        return loss(dataclasses.replace(tokens, **columns))[0]

    return value
