"""The minimum-variance baseline of VCPO, from the gradient of each sequence."""

import numpy as np
import pytest
import torch
from architectures import tiny_model
from batches import random_rollout, trainer_of

from millrace.core.microbatch import Batch
from millrace.core.records import Episode, Group, Rollout, Task
from millrace.training.losses.recipes import build_loss
from millrace.training.packing.packer import pack

ADVANTAGES = ([1.0, -0.5, 0.25], [0.0, 2.0])


def groups() -> list[list[Rollout]]:
    rng = np.random.default_rng(0)
    sizes = ([(9, 3), (9, 14), (9, 6)], [(5, 8), (5, 2)])
    return [
        [random_rollout(rng, prompt=p, sampled=n, begin=np.arange(3, 3 + p)) for p, n in group]
        for group in sizes
    ]


def packed(rollouts: list[list[Rollout]], advantages, *, microbatch_tokens: int = 10_000) -> Batch:
    found = [
        Group(
            number=number,
            task=Task(prompt=""),
            episodes=tuple(Episode(turns=(), rollouts=(one,)) for one in own),
            advantages=np.array(given, np.float32),
        )
        for number, (own, given) in enumerate(zip(rollouts, advantages, strict=True))
    ]
    return pack(found, microbatch_tokens=microbatch_tokens, whole_groups=True)


def trainer(baseline: bool, **settings):
    loss = {"type": "vcpo", "minimum_variance_baseline": baseline}
    return trainer_of(tiny_model("qwen3"), loss=build_loss(loss, max_new_tokens=8), **settings)


def baselines(rollouts: list[list[Rollout]]) -> list[float]:
    """By the definition in the paper, with plain forward passes of transformers."""
    model = tiny_model("qwen3")
    model.set_attn_implementation("eager")
    found = []
    for own, given in zip(rollouts, ADVANTAGES, strict=True):
        weights = []
        for rollout in own:
            tokens = torch.from_numpy(rollout.tokens).long()
            rows = model(input_ids=tokens[None]).logits[0, :-1].log_softmax(-1)
            logprobs = rows.gather(-1, tokens[1:, None])[torch.from_numpy(rollout.mask[1:]), 0]
            model.zero_grad()
            logprobs.sum().backward()
            squared = sum(float(p.grad.double().square().sum()) for p in model.parameters())
            engine = rollout.engine_logprobs[rollout.mask].sum(dtype=np.float64)
            weights.append(np.exp(2 * (float(logprobs.detach().sum()) - engine)) * squared)
        found.append(float(np.average(given, weights=weights)))
    return found


@pytest.mark.parametrize("microbatch_tokens", [10, 10_000])  # a group is never split
def test_gradient_is_that_of_advantages_less_the_baseline(microbatch_tokens: int):
    rollouts = groups()
    own = baselines(rollouts)
    assert all(abs(b - np.mean(a)) > 0.01 for a, b in zip(ADVANTAGES, own, strict=True))
    shifted = [np.array(a) - b for a, b in zip(ADVANTAGES, own, strict=True)]
    ours, theirs = trainer(True), trainer(False)
    batch = packed(rollouts, ADVANTAGES, microbatch_tokens=microbatch_tokens)
    assert len(batch.microbatches) == (2 if microbatch_tokens == 10 else 1)
    loss, _ = ours.accumulate(batch)
    expected, _ = theirs.accumulate(packed(rollouts, shifted))
    assert float(loss) == pytest.approx(float(expected), rel=1e-4)
    for (name, parameter), other in zip(
        ours.policy.module.named_parameters(), theirs.policy.module.parameters(), strict=True
    ):
        torch.testing.assert_close(parameter.grad, other.grad, rtol=1e-3, atol=1e-6, msg=name)


def test_the_baseline_is_the_same_for_shifted_advantages():
    """So it may be computed from advantages instead of rewards."""
    policy = trainer(True).policy
    moved = [np.array(given) + 3 for given in ADVANTAGES]
    (ours,), (expected,) = (
        policy.with_baseline(packed(groups(), given)).microbatches for given in (moved, ADVANTAGES)
    )
    np.testing.assert_allclose(ours.advantages, expected.advantages, atol=1e-5)


def test_float16_gradients_of_sequences_that_overflow_lower_the_loss_scale():
    batch = packed(groups(), ADVANTAGES)
    rough = trainer(True, compute_dtype=torch.float16).policy
    rough._loss_scale.value = first = 2.0**40
    (ours,) = rough.with_baseline(batch).microbatches
    (expected,) = trainer(True).policy.with_baseline(batch).microbatches
    assert 1 < rough.loss_scale < first
    np.testing.assert_allclose(ours.advantages, expected.advantages, rtol=0.05)


def test_loss_scale_grows_with_updates_and_not_with_the_gradients_of_rollouts():
    policy = trainer(True, compute_dtype=torch.float16).policy
    first = policy.loss_scale
    for _ in range(199):
        policy._loss_scale.succeeded()
    policy.with_baseline(packed(groups(), ADVANTAGES))
    assert policy.loss_scale == first
    policy.apply_gradient(learning_rate=0.0)
    assert policy.loss_scale == 2 * first
