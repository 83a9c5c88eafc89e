import math

import pytest
import torch
from loss_tokens import as_function, gradient, loss_of, random_tokens, tokens_of

from millrace.training.losses.surrogates import SURROGATES

# ratio, advantage -> objective, its gradient with respect to the logprob, share clipped.
# Inside the bounds d(rA)/d logprob = rA.
CLIP = [
    (1.0, 1.0, 1.0, 1.0, 0),
    (1.1, 2.0, 2.2, 2.2, 0),
    (1.5, 1.0, 1.3, 0.0, 1),  # already likely enough
    (0.5, 1.0, 0.5, 0.5, 0),  # a good token that became unlikely is pulled back
    (1.1, -1.0, -1.1, -1.1, 0),
    (0.5, -1.0, -0.8, 0.0, 1),  # already unlikely enough
    (1.8, -1.0, -1.8, -1.8, 0),  # a bad token that became likely is pushed down
    (5.0, 1.0, 1.3, 0.0, 1),
    (1.0, 0.0, 0.0, 0.0, 0),
]


def check(loss, ratio, advantage, value, slope, clipped):
    tokens = tokens_of([ratio], [advantage])
    found, metrics = loss(tokens)
    assert found.item() == pytest.approx(-value)
    assert gradient(loss, tokens).item() == pytest.approx(-slope, abs=1e-12)
    assert metrics["clip_ratio"].tolist() == [clipped]
    return metrics


@pytest.mark.parametrize("bounds", [{"dual": 3.0}, {"max_ratio": 2.0}, {}])
@pytest.mark.parametrize("case", CLIP)
def test_a_clipped_token_within_further_bounds(case, bounds):
    check(loss_of("dapo", high=0.3, **bounds), *case)


def test_beyond_the_dual_clip_a_bad_token_has_no_gradient():
    loss = loss_of("ppo", high=0.3, dual=3.0)
    check(loss, 2.9, -1.0, -2.9, -2.9, 0)
    check(loss, 5.0, -2.0, -6.0, 0.0, 1)


def test_beyond_max_ratio_a_bad_token_has_that_weight():
    metrics = check(loss_of(high=0.3), 5.0, -3.0, -6.0, -6.0, 0)
    assert metrics["truncation_ratio"].tolist() == [1]


def test_reinforce_weighs_the_logprob_by_a_bounded_ratio():
    logprob = math.log(3 / 16)  # the engine's probability is 1/16
    check(loss_of("cispo"), 3.0, 2.0, 3 * 2 * logprob, 6.0, 0)
    check(loss_of("tis"), 3.0, 2.0, 2 * 2 * logprob, 4.0, 1)
    check(loss_of("tis", floor=0.5), 0.25, -1.0, 0.5 * -1 * math.log(1 / 64), -0.5, 1)
    check(loss_of("icepop"), 3.0, 2.0, 3 * 2 * logprob, 6.0, 0)
    check(loss_of("icepop"), 6.0, 2.0, 0.0, 0.0, 1)
    check(loss_of("icepop"), 0.25, 2.0, 0.0, 0.0, 1)


def test_topr_gives_full_weight_to_good_tokens_and_a_capped_ratio_to_bad_ones():
    check(loss_of("topr"), 0.5, 2.0, 2 * math.log(1 / 32), 2.0, 0)
    check(loss_of("topr"), 2.0, 2.0, 2 * math.log(1 / 8), 2.0, 0)
    check(loss_of("topr"), 0.5, -2.0, 0.5 * -2 * math.log(1 / 32), -1.0, 0)
    check(loss_of("topr"), 2.0, -2.0, -2 * math.log(1 / 8), -2.0, 1)


def test_topr_by_score_gives_full_weight_to_episodes_that_scored_above_0():
    tokens = tokens_of(
        [2.0, 0.5, 2.0, 0.5], [-1.0, 3.0, -2.0, 3.0], scores=torch.tensor([0.5, 0.5, 0.0, -1.0])
    )
    found = gradient(loss_of("topr", ratio="token", good_by="score"), tokens)
    assert (-4 * found).tolist() == pytest.approx([-1.0, 3.0, -2.0, 1.5])  # weights 1, 1, cap, r
    by_advantage = gradient(loss_of("topr", ratio="token", cap=4.0), tokens)
    assert (-4 * by_advantage).tolist() == pytest.approx([-2.0, 3.0, -4.0, 3.0])


def test_kimi_penalises_the_squared_log_ratio():
    tau, log_ratio = 0.1, math.log(2)
    value = 3 * math.log(1 / 8) - tau / 2 * log_ratio**2
    check(loss_of("kimi", tau=tau), 2.0, 3.0, value, 3 - tau * log_ratio, 0)


def test_sapo_gates_by_a_sigmoid_with_a_temperature_per_sign():
    for advantage, t in ((2.0, 1.0), (-2.0, 1.05)):
        gate = 1 / (1 + math.exp(-t * 0.5))  # at ratio 1.5
        slope = 4 * gate * (1 - gate) * 1.5 * advantage
        check(loss_of("sapo"), 1.5, advantage, 4 / t * gate * advantage, slope, 0)


def test_prime_rl_masks_tokens_whose_probability_already_moved_too_far():
    tau = 1e-3

    def case(ratio, advantage, *, kept):
        log_ratio = math.log(ratio)
        gain = ratio * advantage if kept else 0.0
        value, slope = gain - tau * log_ratio**2, gain - 2 * tau * log_ratio
        check(loss_of("prime_rl"), ratio, advantage, value, slope, 0 if kept else 1)

    case(4.0, 1.0, kept=True)  # from 1/16 to 1/4: 0.1875 more
    case(5.0, 1.0, kept=False)  # 0.25 more
    case(5.0, -1.0, kept=True)  # the other way than it is pushed
    tokens = tokens_of([0.5], [-1.0], engine_logprobs=torch.tensor([math.log(0.5)]).double())
    _, metrics = loss_of("prime_rl")(tokens)  # from 1/2 to 1/32
    assert metrics["clip_ratio"].tolist() == [1]


@pytest.mark.parametrize("surrogate", ["clip", "kimi", "sapo", "prime_rl"])
@pytest.mark.parametrize("level", ["token", "turn", "sequence", "geometric"])
def test_gradient_of_surrogates_without_constant_weights_is_that_of_their_value(surrogate, level):
    tokens = random_tokens([3, 5, 4], seed=3)
    value = as_function(loss_of("ppo", surrogate=surrogate, ratio=level), tokens)
    assert torch.autograd.gradcheck(value, (tokens.trainer_logprobs, tokens.entropies))


def test_vespo_fades_on_both_sides_of_the_present_policy():
    for advantage, power, decay in ((2.0, 2.0, 3.0), (-2.0, 3.0, 2.0)):
        for ratio in (0.3, 1.0, 1.6):
            weight = ratio**power * math.exp(decay * (1 - ratio))
            value = weight * advantage * math.log(ratio / 16)
            check(loss_of("vespo"), ratio, advantage, value, weight * advantage, 0)


def test_clip_range_follows_the_entropy_of_a_token():
    entropies = torch.tensor([0.5, 0.5, 2.0], dtype=torch.float64)  # half, half, twice the mean
    tokens = tokens_of([1.15, 1.05, 1.3], [1.0] * 3, entropies=entropies)
    loss = loss_of("dapo", high=0.2, entropy_exponent=1.0)
    assert loss(tokens)[1]["clip_ratio"].tolist() == [1, 0, 0]  # beyond 1.1; below 1.1 and 1.4
    assert loss_of("dapo", high=0.2)(tokens)[1]["clip_ratio"].tolist() == [0, 0, 1]


@pytest.mark.parametrize("level", ["token", "sequence", "geometric"])
def test_constant_weights_have_the_gradient_of_the_weighted_logprob(level):
    tokens = random_tokens([3, 5, 4], seed=4)
    log_ratio = (tokens.trainer_logprobs - tokens.engine_logprobs).detach()
    whole = {
        "token": log_ratio,
        "sequence": tokens.sequences.sum(log_ratio),
        "geometric": tokens.sequences.mean(log_ratio),
    }[level]
    weights = {
        "cispo": whole.exp().clamp(max=1.1),
        "topr": torch.where(tokens.advantages > 0, 1.0, whole.exp().clamp(max=1.1)),
    }
    for name, weight in weights.items():
        expected = -weight * tokens.advantages / 12
        found = gradient(loss_of(name, ratio=level, cap=1.1), tokens)
        torch.testing.assert_close(found, expected)


def test_ratios_beyond_floating_point_give_finite_loss_and_gradient():
    far = torch.tensor([-2000.0, -2000.0, 0.0, 0.0], dtype=torch.float64)
    for surrogate in SURROGATES:
        tokens = tokens_of([1.0] * 4, [1.0, -1.0, 1.0, -1.0], engine_logprobs=far)
        tokens.trainer_logprobs.data.copy_(far.flip(0))
        for level in ("token", "sequence"):
            loss = loss_of("ppo", surrogate=surrogate, ratio=level)
            assert loss(tokens)[0].isfinite()
            assert gradient(loss, tokens).isfinite().all()
