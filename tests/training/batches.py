"""Batches for trainers of tiny models: random tokens, temperatures, kept ids, advantages."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from architectures import VOCAB

from millrace.core.microbatch import Batch, Microbatch
from millrace.core.records import Episode, Group, Kept, Rollout, Sampling, Task
from millrace.models.attention.packed import PACKED_ATTENTION
from millrace.models.support import use_own_classes
from millrace.training.losses.policy_loss import PolicyLoss
from millrace.training.optimizer import Schedule, TrainSettings
from millrace.training.packing.packer import pack
from millrace.training.policy_model import PolicyModel
from millrace.training.trainer import Trainer


def random_rollout(
    rng: np.random.Generator,
    *,
    prompt: int = 4,
    sampled: int = 6,
    temperature: float = 1.0,
    num_kept: int = 0,
    vocab: int = VOCAB,
    begin: Sequence[int] | np.ndarray = (),
) -> Rollout:
    """Its first tokens are `begin`. num_kept ids besides the token itself survive at each sampled
    position; 0 = no truncation."""
    length = prompt + sampled
    tokens = rng.integers(3, vocab, length).astype(np.int32)
    tokens[: len(begin)] = begin
    mask = np.arange(length) >= prompt
    kept = None
    if num_kept:
        rows = [
            np.unique(np.append(rng.integers(0, vocab, num_kept), token)) if sampled_here else []
            for token, sampled_here in zip(tokens, mask, strict=True)
        ]
        kept = Kept(
            ids=np.concatenate(rows).astype(np.int32),
            offsets=np.cumsum([0, *(len(row) for row in rows)]).astype(np.int64),
        )
    return Rollout(
        tokens=tokens,
        mask=mask,
        engine_logprobs=np.where(mask, -3 + rng.random(length), 0).astype(np.float32),
        versions=np.where(mask, 0, -1).astype(np.int32),
        sampling=Sampling(temperature=temperature, top_k=num_kept),
        kept=kept,
    )


def mixed_rollouts(rng: np.random.Generator, num: int = 8) -> list[Rollout]:
    """Of many lengths, at several temperatures, some truncated."""
    return [
        random_rollout(
            rng,
            prompt=int(rng.integers(1, 9)),
            sampled=int(rng.integers(1, 20)),
            temperature=[1.0, 0.7, 1.3][i % 3],
            num_kept=[0, 5][i % 2],
        )
        for i in range(num)
    ]


def sharing_rollouts(
    rng: np.random.Generator, *, prompt: int = 9, num: int = 6, sampled: int = 8
) -> list[Rollout]:
    """As a group samples them: one prompt, some completions equal, some equal at first."""
    likely = rng.integers(3, VOCAB, prompt + sampled)
    rollouts = []
    for i in range(num):
        length = prompt + int(rng.integers(1, sampled + 1))
        rollouts.append(
            random_rollout(
                rng,
                prompt=prompt,
                sampled=length - prompt,
                temperature=[1.0, 0.7, 1.3][i % 3],
                num_kept=[0, 5][i % 2],
                begin=likely[: [prompt, min(prompt + 5, length), length][i % 3]],
            )
        )
    return rollouts


def batch_of(
    rollouts: list[Rollout],
    *,
    advantages=None,
    microbatch_tokens: int = 10_000,
    num_ranks: int = 1,
) -> Batch:
    if advantages is None:
        advantages = [1.0 if i % 2 else -0.5 for i in range(len(rollouts))]
    group = Group(
        number=0,
        task=Task(prompt=""),
        episodes=tuple(Episode(turns=(), rollouts=(rollout,)) for rollout in rollouts),
        advantages=np.array(advantages, np.float32),
    )
    return pack([group], microbatch_tokens=microbatch_tokens, num_ranks=num_ranks)


def trainer_of(model, *, loss=None, learning_rate: float = 1e-2, **settings) -> Trainer:
    model.set_attn_implementation(PACKED_ATTENTION)
    use_own_classes(model)
    policy_settings = {
        name: settings.pop(name)
        for name in ("adapter", "replay", "logprob_chunk", "on_forward", "is_prepared")
        if name in settings
    }
    return Trainer(
        PolicyModel(model, settings=take_train_settings(settings), **policy_settings),
        loss=loss or PolicyLoss(),
        schedule=Schedule(learning_rate=learning_rate, total_steps=100),
        **settings,
    )


def take_train_settings(settings: dict[str, Any]) -> TrainSettings:
    """The TrainSettings among `settings`, which are removed from there."""
    names = [field.name for field in dataclasses.fields(TrainSettings) if field.name in settings]
    return TrainSettings(**{name: settings.pop(name) for name in names})


def in_order_of(rollouts: list[Rollout], microbatch: Microbatch) -> list[Rollout]:
    """The rollouts as the microbatch numbers them; no two have the same engine logprobs."""
    by_logprobs = {r.engine_logprobs[r.mask].tobytes(): r for r in rollouts}
    assert len(by_logprobs) == len(rollouts)
    numbers = range(microbatch.rollouts.max() + 1)
    return [
        by_logprobs[microbatch.engine_logprobs[microbatch.rollouts == n].tobytes()] for n in numbers
    ]


def reference_logprobs(model, rollout: Rollout) -> tuple[torch.Tensor, torch.Tensor]:
    """Logprobs and entropies of the sampled tokens by a plain forward of this sequence alone."""
    tokens = torch.from_numpy(rollout.tokens).long()
    logits = model(tokens[None]).logits[0].float()
    logprobs, entropies = [], []
    for t in np.flatnonzero(rollout.mask):
        row = logits[t - 1] / rollout.sampling.temperature
        if rollout.kept is not None:
            begin, end = rollout.kept.offsets[t : t + 2]
            ids = torch.from_numpy(rollout.kept.ids[begin:end]).long()
            row = torch.full_like(row, -torch.inf).index_put((ids,), row[ids])
        distribution = torch.log_softmax(row, -1)
        finite = distribution[distribution > -torch.inf]
        logprobs.append(distribution[tokens[t]])
        entropies.append(-(finite.exp() * finite).sum())
    return torch.stack(logprobs), torch.stack(entropies)
