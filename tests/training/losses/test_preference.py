"""Pairs: the loss by hand, and on its way through packing, splitting and training."""

import dataclasses
import math

import numpy as np
import pytest
import torch
from fakes import make_rollout
from loss_tokens import as_function, gradient, loss_of, segments_of, tokens_of

from millrace.core.errors import ConfigError
from millrace.core.records import Episode, Group, Score, Task
from millrace.scoring.advantages import BestWorstAdvantages, with_advantages
from millrace.training.packing.packer import pack
from millrace.training.packing.splitting import halves
from millrace.training.token_batches import PolicyOutput, token_batch


def pair_of(ratios, advantages, *, groups, num_groups):
    tokens = tokens_of(ratios, advantages)
    return dataclasses.replace(tokens, groups=segments_of(groups), num_groups=num_groups)


def test_a_pair_by_hand():
    # Margin of the first group: log 2 + log 2 - log 2; the second has no pair.
    tokens = pair_of([2.0, 2.0, 2.0, 5.0], [1, 1, -1, 0], groups=[3, 1], num_groups=2)
    loss = loss_of("online_dpo", beta=0.5)
    found, metrics = loss(tokens)
    sigmoid = 1 / (1 + math.exp(-0.5 * math.log(2)))
    assert found.item() == pytest.approx(-math.log(sigmoid) / 2)
    pull = 0.5 * (1 - sigmoid) / 2
    assert gradient(loss, tokens).tolist() == pytest.approx([-pull, -pull, pull, 0.0])
    assert metrics["preference/accuracy"].tolist() == [1, 1, 1, 0]
    assert metrics["preference/margin"].tolist() == pytest.approx([math.log(2)] * 3 + [0.0])


def test_the_margin_may_be_taken_against_a_reference_model():
    tokens = pair_of([2.0, 2.0], [1.0, -1.0], groups=[2], num_groups=1)
    same = tokens.trainer_logprobs.detach()
    tokens = dataclasses.replace(tokens, reference_logprobs=same)
    found, _ = loss_of("online_dpo", reference="reference")(tokens)
    assert found.item() == pytest.approx(math.log(2))


def test_the_gradient_is_that_of_the_value_and_far_margins_stay_finite():
    tokens = pair_of([2.0, 0.5, 3.0, 0.7], [1, -1, -1, 1], groups=[2, 2], num_groups=2)
    value = as_function(loss_of("online_dpo"), tokens)
    entropies = tokens.entropies.requires_grad_()
    assert torch.autograd.gradcheck(
        lambda logprobs: value(logprobs, entropies), (tokens.trainer_logprobs,)
    )
    tokens.trainer_logprobs.data.fill_(-4000.0)
    tokens.trainer_logprobs.data[1::2] = 0.0
    assert loss_of("online_dpo", beta=10.0)(tokens)[0].isfinite()
    assert gradient(loss_of("online_dpo", beta=10.0), tokens).isfinite().all()


def test_invalid_settings_are_refused():
    with pytest.raises(ConfigError, match=r"'loss\.beta' = 0: input should be greater than 0"):
        loss_of("online_dpo", beta=0)
    with pytest.raises(ConfigError, match="did you mean 'beta'"):
        loss_of("online_dpo", betta=1.0)


def scored(number: int, *totals: float) -> Group:
    rollouts = [
        make_rollout(seed=10 * number + i, sampled_tokens=3 + i) for i in range(len(totals))
    ]
    group = Group(
        number=number,
        task=Task(prompt=""),
        episodes=tuple(Episode(turns=(), rollouts=(rollout,)) for rollout in rollouts),
        scores=tuple(Score(total=total, parts={}) for total in totals),
    )
    return with_advantages(group, BestWorstAdvantages()(group))


def loss_and_slopes(batch, microbatches):
    """Of logprobs that depend on the token alone, so that they are the same in every split."""
    loss = loss_of("online_dpo", beta=2.0)
    total, slopes = 0.0, {}
    for microbatch in microbatches:
        logprobs = torch.from_numpy(1.5 * microbatch.engine_logprobs).requires_grad_()
        nothing = torch.zeros_like(logprobs)
        output = PolicyOutput(logprobs, nothing, None)
        tokens = token_batch(microbatch, batch, output=output, version=0)
        value, _ = loss(tokens)
        value.backward()
        total += value.item()
        found = zip(microbatch.engine_logprobs.tolist(), logprobs.grad.tolist(), strict=True)
        slopes.update(found)
    return total, slopes


def test_pairs_stay_together_however_a_batch_is_packed_or_split():
    groups = [scored(i, 0.0, i + 1.0, 0.5, -1.0) for i in range(4)] + [scored(4, 1.0, 1.0)]
    whole = pack(groups, microbatch_tokens=1000, pairs=True)
    assert (whole.num_groups, whole.num_sequences) == (4, 8)
    assert whole.num_trained_tokens == 4 * (4 + 6)  # the best has 4 tokens, the worst 6
    expected = loss_and_slopes(whole, whole.microbatches)
    small = pack(groups, microbatch_tokens=20, pairs=True)
    assert len(small.microbatches) == 4
    both = [half for m in whole.microbatches for half in halves(m)]
    assert [len(np.unique(half.groups)) for half in both] == [2, 2]
    for batch, microbatches in ((small, small.microbatches), (whole, both)):
        total, slopes = loss_and_slopes(batch, microbatches)
        assert total == pytest.approx(expected[0], rel=1e-5)
        assert slopes == pytest.approx(expected[1], rel=1e-5)


def test_a_pair_is_never_split():
    batch = pack([scored(0, 0.0, 1.0)], microbatch_tokens=1000, pairs=True)
    assert halves(batch.microbatches[0]) is None


def test_a_step_without_any_pair_has_no_gradient():
    batch = pack([scored(0, 1.0, 1.0), scored(1, 2.0, 2.0)], microbatch_tokens=100, pairs=True)
    total, slopes = loss_and_slopes(batch, batch.microbatches)
    assert total == 0.0
    assert set(slopes.values()) == {0.0}
