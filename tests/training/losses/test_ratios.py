import math

import pytest
import torch
from loss_tokens import gradient, loss_of, tokens_of

from millrace.training.losses.weights import Ratio, log_ratio_at


def log_ratios(level):
    """Two sequences; the first has turns of two tokens and one."""
    tokens = tokens_of([2.0, 8.0, 2.0, 3.0], [1.0] * 4, lengths=[3, 1], turns=[2, 1, 1])
    log_ratio = tokens.trainer_logprobs - tokens.engine_logprobs
    return log_ratio_at(log_ratio, tokens, level=level).exp().tolist()


@pytest.mark.parametrize(
    ("level", "expected"),
    [
        ("token", [2.0, 8.0, 2.0, 3.0]),
        ("turn", [4.0, 4.0, 2.0, 3.0]),  # sqrt(2 * 8)
        ("sequence", [32.0, 32.0, 32.0, 3.0]),
        ("geometric", [32 ** (1 / 3)] * 3 + [3.0]),
    ],
)
def test_ratios_of_tokens_turns_and_sequences(level, expected):
    assert log_ratios(level) == pytest.approx(expected)


def test_the_geometric_ratio_moves_with_every_token_of_its_sequence():
    tokens = tokens_of([1.0, 1.0, 1.0], [2.0, 2.0, -1.0], lengths=[2, 1])
    loss = loss_of("gspo", low=0.2, high=0.2)
    # Each sequence weighs half; its ratio is 1, and a token moves it by 1 / length.
    assert gradient(loss, tokens).tolist() == pytest.approx([-0.5, -0.5, 0.5])


def test_gspo_clips_whole_sequences():
    ratios = [1.0003, 1.0003, 1.0008, 1.0004]  # geometric means 1.0003 and about 1.0006
    tokens = tokens_of(ratios, [1.0] * 4, lengths=[2, 2])
    _, metrics = loss_of("gspo")(tokens)
    assert metrics["clip_ratio"].tolist() == [0, 0, 1, 1]


def anchors(anchor, **columns):
    tokens = tokens_of([4.0] * 4, [1.0] * 4, **columns)
    found = Ratio(anchor=anchor).anchor_logprobs(tokens)
    assert not found.requires_grad
    return (found - tokens.engine_logprobs).exp().tolist()


def test_the_engine_is_its_own_anchor():
    assert anchors("engine") == pytest.approx([1.0] * 4)


def test_in_the_first_update_of_a_step_the_proximal_policy_is_the_current_one():
    assert anchors("proximal") == pytest.approx([4.0] * 4)
    before = torch.full((4,), math.log(2 / 16), dtype=torch.float64)
    assert anchors("proximal", proximal_logprobs=before) == pytest.approx([2.0] * 4)


def test_the_interpolated_anchor_is_nearer_to_the_policy_for_staler_tokens():
    # Shares of the engine: none, all, 1/2, 1/4.
    expected = [4.0, 1.0, 2.0, 4 ** (3 / 4)]
    assert anchors("interpolated", staleness=torch.tensor([0, 1, 2, 4])) == pytest.approx(expected)
