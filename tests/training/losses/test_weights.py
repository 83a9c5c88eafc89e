import dataclasses
import math

import pytest
import torch
from loss_tokens import gradient, loss_of, tokens_of

PROXIMAL = {"anchor": "proximal", "low": 0.2, "high": 0.2}


def weights(ratios, *, lengths=None, **settings):
    """Weights of tokens; with the proximal anchor the gradient is the weight."""
    tokens = tokens_of(ratios, [1.0] * len(ratios), lengths=lengths)
    loss = loss_of("dapo", **PROXIMAL, correction_low=0.5, correction_high=2.0, **settings)
    found = -gradient(loss, tokens) * len(ratios)
    _, metrics = loss(tokens)
    assert metrics["mask_ratio"].tolist() == (found == 0).tolist()
    assert metrics["loss_weight/mean"].tolist() == pytest.approx(found.tolist())
    return found.tolist()


@pytest.mark.parametrize(
    ("correction", "expected"),
    [
        ("truncate", [0.5, 0.8, 1.5, 2.0]),
        ("mask", [0.0, 0.8, 1.5, 0.0]),
        ("reject", [0.0, 1.0, 1.0, 0.0]),
    ],
)
def test_corrections_of_tokens(correction, expected):
    assert weights([0.25, 0.8, 1.5, 4.0], correction=correction) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("level", "expected"),
    [
        ("sequence", [1.5, 1.5, 2.0, 2.0]),  # 3 * 0.5 and 1.5 * 1.5
        ("geometric", [1.5**0.5, 1.5**0.5, 1.5, 1.5]),
    ],
)
def test_corrections_of_sequences(level, expected):
    ratios = [3.0, 0.5, 1.5, 1.5]
    found = weights(ratios, lengths=[2, 2], correction="truncate", correction_level=level)
    assert found == pytest.approx(expected)


def test_one_bad_sequence_is_rejected_as_a_whole():
    ratios = [3.0, 0.5, 1.5, 1.5]
    found = weights(ratios, lengths=[2, 2], correction="reject", correction_level="sequence")
    assert found == [1.0, 1.0, 0.0, 0.0]


def test_with_anchor_engine_rejection_uses_the_current_policy():
    tokens = tokens_of([1.1, 3.0], [-1.0, -1.0])
    loss = loss_of("dapo", correction="reject")
    assert gradient(loss, tokens).tolist() == pytest.approx([0.55, 0.0])


def test_decoupled_ppo_is_the_clipped_ratio_to_the_proximal_policy_times_its_capped_correction():
    # Engine 1/16, proximal 1/4 (weight 4, capped at 3), trainer 9/32: ratio 1.125.
    proximal = torch.tensor([math.log(1 / 4)], dtype=torch.float64)
    tokens = tokens_of([4.5], [2.0], proximal_logprobs=proximal)
    loss = loss_of("decoupled_ppo", correction_high=3.0)
    assert loss(tokens)[0].item() == pytest.approx(-3 * 1.125 * 2)
    assert gradient(loss, tokens).item() == pytest.approx(-3 * 1.125 * 2)


def test_a3po_takes_the_proximal_policy_halfway_when_staleness_is_two():
    # Engine 1/16, trainer 1/4: between them 1/8, so ratio 2 (clipped to 1.2) and weight 2.
    tokens = tokens_of([4.0], [1.0], staleness=torch.tensor([2]))
    assert loss_of("a3po")(tokens)[0].item() == pytest.approx(-2 * 1.2)
    tokens = tokens_of([4.0], [-1.0], staleness=torch.tensor([2]))
    assert gradient(loss_of("a3po"), tokens).item() == pytest.approx(2 * 2)


@pytest.mark.parametrize(
    ("half_life", "expected"),
    [(0.0, [1, 1, 0, 0]), (1.0, [1, 1, 1 / 2, 1 / 4]), (2, [1, 1, 2**-0.5, 0.5])],
)
def test_tokens_beyond_the_staleness_limit_are_masked_or_decay(half_life, expected):
    tokens = tokens_of([1.0] * 4, [1.0] * 4, staleness=torch.tensor([0, 2, 3, 4]))
    loss = loss_of(max_token_staleness=2, staleness_half_life=half_life)
    assert (-4 * gradient(loss, tokens)).tolist() == pytest.approx(expected)


def test_bad_off_policy_sequences_are_masked():
    # Mean of -log ratio: about 0.35, 0.35 with a good sign, and less than the limit.
    ratios, advantages = [0.5, 1.0, 0.5, 1.0, 0.9, 0.9], [-1.0, -1.0, 1.0, 1.0, -1.0, -1.0]
    tokens = tokens_of(ratios, advantages, lengths=[2, 2, 2])
    found = gradient(loss_of("dapo", off_policy_limit=0.3), tokens)
    assert (found != 0).tolist() == [False, False, True, True, True, True]


def test_weights_multiply():
    tokens = tokens_of([1.5], [1.0], staleness=torch.tensor([3]))
    loss = loss_of("decoupled_ppo", max_token_staleness=2, staleness_half_life=1)
    assert gradient(loss, tokens).item() == pytest.approx(-1.5 / 2)


def masked_by_second_moment(moves: list[float], *, most: float) -> set[int]:
    """Of one sequence with A > 0: mask the furthest of those that moved up until the mean holds."""
    kept = sorted((move, place) for place, move in enumerate(moves) if move > 0)
    masked = set()
    while kept and sum(move**2 for move, _ in kept) > most * len(kept):
        masked.add(kept.pop()[1])
    return masked


@pytest.mark.parametrize("seed", range(5))
def test_second_moment_masks_what_moved_furthest_in_each_sequence(seed):
    lengths = [1, 9, 30, 4]
    moves = torch.randn(sum(lengths), generator=torch.Generator().manual_seed(seed)) * 0.3
    tokens = tokens_of(moves.double().exp().tolist(), [1.0] * len(moves), lengths=lengths)
    expected, first = set(), 0
    for length in lengths:
        own = moves[first : first + length].tolist()
        expected |= {first + place for place in masked_by_second_moment(own, most=0.04)}
        first += length
    found = gradient(loss_of("m2po"), tokens)
    assert {place for place, slope in enumerate(found.tolist()) if slope == 0} == expected
    assert expected


MOVES = [0.1, 0.4, 0.2, 0.3, -0.5]  # squares 0.01, 0.16, 0.04, 0.09, 0.25; the last moved back


@pytest.mark.parametrize(
    ("rule", "most", "masked"),
    [
        ("sequence", 0.035, {1, 2, 3}),  # means 0.01 | 0.085; 0.04 | 0.065
        ("m2po", 0.035, {1, 3}),  # (0.01 + 3 * 0.04) / 4 = 0.0325 | (0.05 + 2 * 0.09) / 4 = 0.0575
        ("m2po", 0.03, {1, 2, 3}),  # (0.01 * 4) / 4 | 0.0325
        ("areal", 0.03, {1, 3, 4}),  # means 0.01, 0.025 | 0.0467
        ("areal", 0.005, {1, 2, 3, 4}),  # never all
    ],
)
def test_rules_of_the_second_moment_count_different_tokens(rule, most, masked):
    tokens = tokens_of([math.exp(move) for move in MOVES], [1.0] * 5, lengths=[2, 3])
    loss = loss_of("m2po", second_moment=most, second_moment_rule=rule)
    found = gradient(loss, tokens)
    assert {place for place, slope in enumerate(found.tolist()) if slope == 0} == masked


def test_second_moment_of_areal_compares_the_proximal_policy_with_the_engine():
    tokens = tokens_of([1.0, 9.0, 5.0], [1.0] * 3)
    tokens = dataclasses.replace(tokens, proximal_logprobs=tokens.engine_logprobs)
    for rule, num_masked in (("areal", 0), ("m2po", 2)):
        loss = loss_of("m2po", anchor="proximal", second_moment_rule=rule)
        assert (gradient(loss, tokens) == 0).sum() == num_masked


def test_second_moment_ignores_tokens_that_moved_back():
    tokens = tokens_of([5.0, 0.2, 1.0], [-1.0, 1.0, 1.0])
    assert (gradient(loss_of("m2po"), tokens) != 0).all()
