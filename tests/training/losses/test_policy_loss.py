"""What holds for every recipe, whatever the tokens."""

import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from loss_tokens import gradient, loss_of, random_tokens, split

from millrace.training.losses.loss import TokenBatch
from millrace.training.losses.recipes import RECIPES

LENGTHS = st.lists(st.integers(1, 6), min_size=2, max_size=5)
SEEDS = st.integers(0, 10_000)
NAMES = st.sampled_from(sorted(RECIPES))
REWARDED = st.sampled_from(sorted(RECIPES.keys() - {"distil"}))  # by the scores, not by a teacher
# A recipe changed in one part each.
CHANGES = st.sampled_from(
    [
        {},
        {"ratio": "turn"},
        {"ratio": "geometric"},
        {"anchor": "proximal"},
        {"anchor": "interpolated"},
        {"anchor": "proximal", "correction": "mask", "correction_level": "geometric"},
        {"correction": "reject", "correction_high": 1.2},
        {"aggregation": "sequence"},
        {"aggregation": "constant"},
        {"max_token_staleness": 1},
        {"off_policy_limit": 0.05},
        {"kl": 0.1, "kl_weighted": True, "kl_aggregation": "token"},
        {"entropy_bonus": 0.01},
    ]
)


def on_policy(tokens: TokenBatch) -> TokenBatch:
    """The same tokens with all logprobs equal to those of the engine."""
    return dataclasses.replace(
        tokens,
        trainer_logprobs=tokens.engine_logprobs.clone().requires_grad_(),
        proximal_logprobs=tokens.engine_logprobs,
    )


@settings(max_examples=60)
@given(REWARDED, st.sampled_from(["token", "sequence"]), LENGTHS, SEEDS)
def test_on_policy_every_recipe_has_the_policy_gradient(name, aggregation, lengths, seed):
    tokens = on_policy(random_tokens(lengths, seed=seed))
    loss = loss_of(name, ratio="token", aggregation=aggregation)
    weight = 1 / sum(lengths)
    if aggregation == "sequence":
        weight = 1 / (tokens.sequences.lengths[tokens.sequences.ids] * len(lengths))
    torch.testing.assert_close(gradient(loss, tokens), -weight * tokens.advantages)
    assert not loss(tokens)[1]["clip_ratio"].any()


@settings(max_examples=100)
@given(NAMES, CHANGES, LENGTHS, SEEDS, st.data())
def test_a_batch_has_one_loss_and_gradient_however_it_is_split(name, change, lengths, seed, data):
    tokens = random_tokens(lengths, seed=seed)
    loss = loss_of(name, **change)
    value, metrics = loss(tokens)
    whole = torch.autograd.grad(value, tokens.trainer_logprobs)[0]
    parts = split(tokens, first=data.draw(st.integers(1, len(lengths) - 1)))
    outcomes = [loss(part) for part in parts]
    total = outcomes[0][0] + outcomes[1][0]
    torch.testing.assert_close(total, value)
    torch.testing.assert_close(torch.autograd.grad(total, tokens.trainer_logprobs)[0], whole)
    for metric, values in metrics.items():
        of_parts = torch.cat([named[metric] for _, named in outcomes])
        torch.testing.assert_close(of_parts, values)


@settings(max_examples=60)
@given(NAMES, LENGTHS, SEEDS)
def test_masked_tokens_have_no_gradient_and_the_others_keep_theirs(name, lengths, seed):
    tokens = random_tokens(lengths, seed=seed)
    loss = loss_of(name, ratio="token", max_token_staleness=1)
    found = gradient(loss, tokens)
    is_stale = tokens.staleness > 1
    assert loss(tokens)[1]["mask_ratio"].bool()[is_stale].all()
    assert not found[is_stale].any()
    unmasked = gradient(loss_of(name, ratio="token"), tokens)
    torch.testing.assert_close(found[~is_stale], unmasked[~is_stale])


def test_the_default_loss_by_hand():
    """min(r A, clip(r) A) by token, with weights truncated at 2."""
    tokens = random_tokens([4, 7, 2], seed=5, spread=1.0)
    ratio = (tokens.trainer_logprobs - tokens.engine_logprobs).exp()
    weight = ratio.detach().clamp(max=2.0)
    surrogate = weight * (tokens.trainer_logprobs - tokens.trainer_logprobs.detach()).exp()
    clipped = ratio.clamp(0.8, 1.28)
    objective = torch.minimum(surrogate * tokens.advantages, clipped * tokens.advantages)
    expected = -objective.sum() / 13
    (slope,) = torch.autograd.grad(expected, tokens.trainer_logprobs)
    for loss in (loss_of(), loss_of("clipped")):
        torch.testing.assert_close(loss(tokens)[0], expected)
        torch.testing.assert_close(gradient(loss, tokens), slope)


@pytest.mark.parametrize("name", RECIPES)
def test_a_loss_does_not_change_its_input(name):
    tokens = random_tokens([3, 2], seed=6)
    before = [tokens.trainer_logprobs.clone(), tokens.advantages.clone()]
    loss_of(name)(tokens)
    assert torch.equal(tokens.trainer_logprobs, before[0])
    assert torch.equal(tokens.advantages, before[1])
