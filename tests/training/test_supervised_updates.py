"""Supervised fine-tuning against plain transformers, PEFT and torch: the same rows, one by one."""

import copy
from dataclasses import replace

import numpy as np
import peft
import pytest
import torch
from architectures import ARCHITECTURES, tiny_model
from batches import batch_of, mixed_rollouts, trainer_of

from millrace.config import LoraConfig
from millrace.core.records import Sampling
from millrace.models.lora.trained import TrainedAdapter
from millrace.training.losses.recipes import build_loss

RATE = 3e-5
LOSS = build_loss({"type": "sft"}, max_new_tokens=1)


def rows_of(rng: np.random.Generator):
    """Without what only sampled tokens have: temperatures and kept ids."""
    return [replace(row, sampling=Sampling(), kept=None) for row in mixed_rollouts(rng, 6)]


def plain_loss(model, rows) -> torch.Tensor:
    """Mean of transformers' own cross-entropy over all trained tokens."""
    total, count = torch.zeros(()), 0
    for row in rows:
        tokens = torch.from_numpy(row.tokens).long()
        labels = tokens.masked_fill(~torch.from_numpy(row.mask), -100)
        number = int((labels[1:] != -100).sum())
        total = total + model(tokens[None], labels=labels[None]).loss * number
        count += number
    return total / count


def plain_step(model, optimizer, rows) -> tuple[float, dict[str, torch.Tensor]]:
    optimizer.zero_grad()
    loss = plain_loss(model, rows)
    loss.backward()
    gradients = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return loss.item(), gradients


def check_steps(trainer, plain, *, name_of=lambda name: name) -> None:
    """Three steps of both: loss, every gradient, every updated weight."""
    trained = [p for p in plain.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=RATE, betas=(0.9, 0.95), weight_decay=0.0)
    rng = np.random.default_rng(5)
    first = {n: p.detach().clone() for n, p in trainer.policy.module.named_parameters()}
    for _ in range(3):
        rows = rows_of(rng)
        trainer.accumulate(batch_of(rows, microbatch_tokens=40))
        own = {
            n: p.grad.clone()
            for n, p in trainer.policy.module.named_parameters()
            if p.grad is not None
        }
        held_out = trainer.held_out_loss(batch_of(rows))
        metrics = trainer.step(batch_of(rows, microbatch_tokens=40))
        loss, gradients = plain_step(plain, optimizer, rows)
        assert metrics["loss"] == pytest.approx(loss, abs=1e-6)
        assert held_out == pytest.approx(loss, abs=1e-6)
        assert {name_of(name) for name in gradients} == own.keys()
        for name, gradient in gradients.items():
            assert (own[name_of(name)] - gradient).abs().max() < 1e-6, name
    learned = dict(trainer.policy.module.named_parameters())
    assert max((learned[name] - weight).abs().max().item() for name, weight in first.items()) > RATE
    for name, weight in plain.named_parameters():
        # Rounding may turn the sign of a gradient near zero, and AdamW makes a step of it.
        difference = (learned[name_of(name)] - weight).abs()
        assert difference.max() < RATE, name
        assert difference.mean() < RATE / 100, name


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_updates_of_all_weights_are_those_of_transformers_and_torch(architecture):
    trainer = trainer_of(tiny_model(architecture), loss=LOSS, learning_rate=RATE)
    check_steps(trainer, tiny_model(architecture))


def test_updates_of_an_adapter_are_those_of_peft_and_torch():
    model = tiny_model("qwen3")
    plain = peft.get_peft_model(
        copy.deepcopy(model),
        peft.LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", task_type="CAUSAL_LM"),
    )
    adapter = TrainedAdapter(model, LoraConfig(rank=4, alpha=8.0), model_path="tiny")
    trainer = trainer_of(model, adapter=adapter, loss=LOSS, learning_rate=RATE)
    own = dict(trainer.policy.module.named_parameters())
    with torch.no_grad():
        for name, weight in plain.named_parameters():
            weight.copy_(own[_in_base(name)])  # both start from the same factors
    check_steps(trainer, plain, name_of=_in_base)


def _in_base(name: str) -> str:
    return name.removeprefix("base_model.model.")
