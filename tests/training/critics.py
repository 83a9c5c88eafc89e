"""Critics of tiny models, batches for them, and a reference in plain transformers code."""

from collections.abc import Sequence

import numpy as np
import torch
from architectures import tiny_model
from batches import take_train_settings

from millrace.core.microbatch import Batch
from millrace.core.records import Episode, Group, Rollout, Score, Task, Turn
from millrace.models.attention.packed import PACKED_ATTENTION
from millrace.training.critic import Critic, GaeEstimator
from millrace.training.packing.packer import pack

HEAD_SEED = 3


def critic_batch(
    rollouts: Sequence[Rollout],
    *,
    scores: Sequence[float] | None = None,
    cut: Sequence[bool] | None = None,
    microbatch_tokens: int = 10_000,
) -> Batch:
    """Packed for a critic. Every third rollout is truncated by default."""
    scores = [0.5 * (i % 4) - 0.3 for i in range(len(rollouts))] if scores is None else scores
    cut = were_cut(len(rollouts)) if cut is None else cut
    turns = [Turn(prompt="", completion="", finish="length" if c else "stop") for c in cut]
    group = Group(
        number=0,
        task=Task(prompt=""),
        episodes=tuple(
            Episode(turns=(turn,), rollouts=(rollout,))
            for turn, rollout in zip(turns, rollouts, strict=True)
        ),
        scores=tuple(Score(total=float(score), parts={}) for score in scores),
    )
    return pack([group], microbatch_tokens=microbatch_tokens, critic=True)


def were_cut(num: int) -> list[bool]:
    return [i % 3 == 1 for i in range(num)]


def critic_of(
    architecture: str = "qwen3", *, seed: int = 1, device: str = "cpu", **settings
) -> Critic:
    """A critic with random head weights."""
    model = tiny_model(architecture, seed=seed).to(device)
    model.set_attn_implementation(PACKED_ATTENTION)
    estimator = settings.pop("estimator", GaeEstimator(gamma=0.9, gae_lambda=0.8))
    critic = Critic(
        model,
        estimator=estimator,
        settings=take_train_settings(settings),
        **{"learning_rate": 1e-2, **settings},
    )
    _randomize(critic.module.head)
    return critic


def plain_critic(architecture: str = "qwen3", *, seed: int = 1):
    """The same, of transformers' own parts: a backbone and a head."""
    backbone = tiny_model(architecture, seed=seed).base_model
    backbone.set_attn_implementation("eager")
    head = torch.nn.Linear(backbone.config.hidden_size, 1)
    _randomize(head)
    return backbone, head


def plain_values(backbone, head, rollout: Rollout) -> torch.Tensor:  # [L]
    """Of the state that each token completes, by a forward pass of this sequence alone."""
    tokens = torch.from_numpy(rollout.tokens).long()
    return head(backbone(tokens[None]).last_hidden_state[0]).squeeze(-1)


def plain_estimates(
    values: np.ndarray,
    rollout: Rollout,
    *,
    score: float,
    was_cut: bool,
    discount: float,
    decay: float,
) -> tuple[list[float], list[float]]:
    """Advantages and values before each sampled token of a rollout, one token after the other."""
    sampled = np.flatnonzero(rollout.mask).tolist()
    before = [float(values[t - 1]) for t in sampled]
    advantages: list[float] = []
    following = float(values[sampled[-1]]) if was_cut else 0.0
    later = 0.0
    for i in reversed(range(len(sampled))):
        reward = score if i == len(sampled) - 1 else 0.0
        if rollout.rewards is not None:
            reward += float(rollout.rewards[sampled[i]])
        later = reward + discount * following - before[i] + discount * decay * later
        advantages.insert(0, later)
        following = before[i]
    return advantages, before


def _randomize(head: torch.nn.Linear) -> None:
    generator = torch.Generator().manual_seed(HEAD_SEED)
    with torch.no_grad():
        head.weight.copy_(0.2 * torch.randn(head.weight.shape, generator=generator))
        head.bias.fill_(0.1)
