import math

import pytest
import torch

from millrace.core.errors import ConfigError
from millrace.core.plugins import build_plugin
from millrace.training.losses import LOSSES, ClippedLoss, TokenBatch, aggregate


def token_batch(ratios, advantages, *, sequence_ids=None, tokens=None, sequences=1) -> TokenBatch:
    """Tokens whose trainer/engine probability ratios are as given; the engine's are 1/2."""
    ratios = torch.tensor(ratios)
    engine = torch.full_like(ratios, math.log(0.5))
    return TokenBatch(
        trainer_logprobs=(engine + ratios.log()).requires_grad_(),
        engine_logprobs=engine,
        entropies=torch.zeros_like(ratios),
        advantages=torch.tensor(advantages),
        staleness=torch.zeros(len(ratios), dtype=torch.int64),
        sequence_ids=torch.tensor(sequence_ids or [0] * len(ratios)),
        num_trained_tokens=tokens or len(ratios),
        num_sequences=sequences,
    )


# ratio, advantage -> objective, its gradient with respect to the logprob, clipped, truncated.
# With low = 0.2, high = 0.3, max_ratio = 2; inside the bounds d(rA)/d logprob = rA.
CASES = [
    (1.0, 1.0, 1.0, 1.0, 0, 0),
    (1.1, 2.0, 2.2, 2.2, 0, 0),
    (1.5, 1.0, 1.3, 0.0, 1, 0),  # already likely enough
    (0.5, 1.0, 0.5, 0.5, 0, 0),  # a good token that became unlikely is pulled back
    (1.1, -1.0, -1.1, -1.1, 0, 0),
    (0.5, -1.0, -0.8, 0.0, 1, 0),  # already unlikely enough
    (1.8, -1.0, -1.8, -1.8, 0, 0),  # a bad token that became likely is pushed down
    (5.0, -1.0, -2.0, -2.0, 0, 1),  # ... with weight max_ratio at most
    (5.0, -3.0, -6.0, -6.0, 0, 1),
    (5.0, 1.0, 1.3, 0.0, 1, 0),
    (1.0, 0.0, 0.0, 0.0, 0, 0),
]


@pytest.mark.parametrize(("ratio", "advantage", "value", "gradient", "clipped", "truncated"), CASES)
def test_clipped_loss_of_one_token(ratio, advantage, value, gradient, clipped, truncated):
    tokens = token_batch([ratio], [advantage])
    loss, metrics = ClippedLoss(low=0.2, high=0.3, max_ratio=2.0)(tokens)
    loss.backward()
    assert loss.item() == pytest.approx(-value, rel=1e-5)
    assert tokens.trainer_logprobs.grad.item() == pytest.approx(-gradient, rel=1e-5)
    assert metrics["clipped_share"].tolist() == [clipped]
    assert metrics["truncated_share"].tolist() == [truncated]


def test_ratios_beyond_floating_point_give_finite_loss_and_gradient():
    tokens = token_batch([1.0, 1.0], [1.0, -1.0])
    far = TokenBatch(
        trainer_logprobs=torch.tensor([0.0, 0.0], requires_grad=True),
        engine_logprobs=torch.tensor([-200.0, -200.0]),
        entropies=tokens.entropies,
        advantages=tokens.advantages,
        staleness=tokens.staleness,
        sequence_ids=tokens.sequence_ids,
        num_trained_tokens=2,
        num_sequences=1,
    )
    loss, _ = ClippedLoss()(far)
    loss.backward()
    assert loss.item() == pytest.approx(-(1.28 - 2.0) / 2)
    assert far.trainer_logprobs.grad.tolist() == pytest.approx([0.0, 1.0])


def test_token_aggregation_weighs_every_token_of_the_batch_the_same():
    values = torch.tensor([1.0, 2.0, 3.0])
    tokens = token_batch([1.0] * 3, [0.0] * 3, tokens=10)
    assert aggregate(values, tokens, by="token").item() == pytest.approx(0.6)


def test_sequence_aggregation_weighs_every_sequence_of_the_batch_the_same():
    values = torch.tensor([1.0, 3.0, 10.0])
    tokens = token_batch([1.0] * 3, [0.0] * 3, sequence_ids=[0, 0, 2], sequences=4)
    assert aggregate(values, tokens, by="sequence").item() == pytest.approx((2.0 + 10.0) / 4)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"low": 1.2}, "low = 1.2 must lie between 0 and 1"),
        ({"high": 0.0}, "high = 0.0 must be above 0"),
        ({"max_ratio": 1.1}, "max_ratio = 1.1 must be at least 1 \\+ high"),
        ({"aggregation": "word"}, "aggregation = 'word' must be"),
        ({"hihg": 0.3}, "Unknown setting 'loss.hihg' of 'clipped'; did you mean 'high'"),
    ],
)
def test_settings_that_make_no_sense_are_refused(settings, words):
    with pytest.raises(ConfigError, match=words):
        build_plugin(
            {"type": "clipped", **settings}, builtins=LOSSES, default="clipped", section="loss"
        )


def test_a_loss_of_the_users_own_is_found_by_reference():
    loss = build_plugin(
        {"type": "millrace.training.losses:ClippedLoss", "low": 0.1},
        builtins={},
        default="clipped",
        section="loss",
    )
    assert loss == ClippedLoss(low=0.1)
