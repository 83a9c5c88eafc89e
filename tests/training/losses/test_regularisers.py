import math

import pytest
import torch
from loss_tokens import as_function, gradient, loss_of, random_tokens, tokens_of

from millrace.core.errors import RunFailed
from millrace.training.losses.loss import aggregate

REFERENCE = torch.tensor([math.log(1 / 8)], dtype=torch.float64)


@pytest.mark.parametrize(
    ("estimator", "value", "slope"),
    [
        # Trainer 1/4, reference 1/8: d = log(1/2).
        ("k1", math.log(2), 1.0),
        ("k2", math.log(2) ** 2 / 2, math.log(2)),
        ("k3", 1 / 2 - 1 + math.log(2), 1 - 1 / 2),
    ],
)
def test_the_divergence_from_the_reference(estimator, value, slope):
    tokens = tokens_of([4.0], [0.0], reference_logprobs=REFERENCE)
    loss = loss_of("dapo", kl=0.1, kl_estimator=estimator)
    found, metrics = loss(tokens)
    assert found.item() == pytest.approx(0.1 * value)
    assert metrics["kl"].item() == pytest.approx(value)
    assert gradient(loss, tokens).item() == pytest.approx(0.1 * slope)


def test_a_weighted_divergence_is_multiplied_by_the_ratio():
    tokens = tokens_of([4.0], [0.0], reference_logprobs=REFERENCE)
    loss = loss_of("dapo", kl=1.0, kl_estimator="k1", kl_weighted=True)
    assert loss(tokens)[0].item() == pytest.approx(4 * math.log(2))
    assert gradient(loss, tokens).item() == pytest.approx(4 * math.log(2) + 4)


def test_without_reference_logprobs_the_error_says_what_is_missing():
    with pytest.raises(RunFailed, match=r"no reference logprobs; add a \[\[scorers\]\]"):
        loss_of(kl=0.1)(tokens_of([1.0], [1.0]))


def test_the_entropy_bonus_is_a_mean_over_tokens_whatever_the_policy_term_is():
    entropies = torch.tensor([1.0, 2.0, 6.0], dtype=torch.float64)
    tokens = tokens_of([1.0] * 3, [0.0] * 3, lengths=[2, 1], entropies=entropies)
    assert loss_of("grpo", entropy_bonus=0.5)(tokens)[0].item() == pytest.approx(-0.5 * 3)
    by_sequence = loss_of("grpo", entropy_bonus=0.5, entropy_aggregation="policy")
    assert by_sequence(tokens)[0].item() == pytest.approx(-0.5 * (1.5 + 6) / 2)


def test_components_keep_their_own_denominators():
    tokens = random_tokens([2, 5], seed=1)
    parts = loss_of("dr_grpo", kl=0.3, kl_aggregation="sequence")
    policy = loss_of("dr_grpo")(tokens)[0]
    divergence = parts.kl.per_token(tokens, log_ratio=tokens.trainer_logprobs)
    expected = policy + 0.3 * aggregate(divergence, tokens, by="sequence")
    torch.testing.assert_close(parts(tokens)[0], expected)


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
@pytest.mark.parametrize("weighted", [True, False])
def test_the_gradient_of_regularisers_is_that_of_their_value(estimator, weighted):
    tokens = random_tokens([3, 4], seed=2)
    loss = loss_of("grpo", kl=0.2, kl_estimator=estimator, kl_weighted=weighted, entropy_bonus=0.1)
    value = as_function(loss, tokens)
    assert torch.autograd.gradcheck(value, (tokens.trainer_logprobs, tokens.entropies))


def test_an_adaptive_bonus_grows_while_entropy_is_low_and_shrinks_when_it_is_not():
    settings = {"entropy_bonus_step": 0.01, "entropy_bonus_max": 0.02}
    loss = loss_of(entropy_target=0.5, **settings)
    seen = []
    for entropy in (0.4, 0.3, 0.2, 0.6, 0.6, 0.6):
        loss = loss.adapted({"entropy": entropy})
        seen.append(loss.entropy.entropy_bonus)
    assert seen == pytest.approx([0.01, 0.02, 0.02, 0.01, 0.0, 0.0])
    kept = loss.adapted({"entropy": 0.1}).state()
    assert loss_of(entropy_target=0.5, **settings).with_state(kept).state() == kept


def test_a_fixed_bonus_does_not_adapt_and_has_no_state():
    loss = loss_of(entropy_bonus=0.1)
    assert loss.adapted({"entropy": 0.0}) == loss
    assert loss.state() == {}
    assert loss.with_state({"entropy_bonus": 9.0}) == loss
