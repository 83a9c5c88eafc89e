"""The trainer against plain transformers and torch: sequences one by one, torch's own AdamW."""

import numpy as np
import pytest
import torch
from architectures import ARCHITECTURES, tiny_model
from batches import batch_of, mixed_rollouts, reference_logprobs, trainer_of

from millrace.training.losses.recipes import build_loss

LEARNING_RATE = 1e-4


def plain_step(model, optimizer, rollouts, advantages) -> float:
    """PPO's clip, a mean over all tokens; returns the loss."""
    objectives = []
    for rollout, advantage in zip(rollouts, advantages, strict=True):
        logprobs, _ = reference_logprobs(model, rollout)
        ratio = (logprobs - torch.from_numpy(rollout.engine_logprobs[rollout.mask])).exp()
        objectives.append(torch.min(ratio * advantage, ratio.clamp(0.8, 1.28) * advantage))
    loss = -torch.cat(objectives).mean()
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return loss.item()


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_updates_are_those_of_plain_transformers_and_torch(architecture):
    rng = np.random.default_rng(3)
    loss_of = build_loss({"type": "dapo"}, max_new_tokens=20)
    trainer = trainer_of(tiny_model(architecture), loss=loss_of, learning_rate=LEARNING_RATE)
    plain = tiny_model(architecture)
    optimizer = torch.optim.AdamW(
        plain.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.0
    )
    for _ in range(3):
        rollouts = mixed_rollouts(rng, 6)
        advantages = rng.normal(size=6).astype(np.float32)
        metrics = trainer.step(batch_of(rollouts, advantages=advantages))
        loss = plain_step(plain, optimizer, rollouts, advantages.tolist())
        assert metrics["loss"] == pytest.approx(loss, abs=1e-6)
    moved = dict(tiny_model(architecture).named_parameters())
    for name, weight in plain.named_parameters():
        learned = trainer.policy.weights()[name]
        assert (learned - weight).abs().max() < 1e-6, name
        assert (learned - moved[name]).abs().max() > LEARNING_RATE, name
