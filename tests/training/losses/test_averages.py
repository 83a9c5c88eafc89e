import pytest
import torch
from loss_tokens import MAX_NEW_TOKENS, loss_of, tokens_of

from millrace.training.losses.loss import aggregate


def test_token_aggregation_weighs_every_token_of_the_batch_the_same():
    tokens = tokens_of([1.0] * 3, [0.0] * 3, num_trained_tokens=10)
    values = torch.tensor([1.0, 2.0, 3.0])
    assert aggregate(values, tokens, by="token").item() == pytest.approx(0.6)


def test_sequence_aggregation_weighs_every_sequence_of_the_batch_the_same():
    tokens = tokens_of([1.0] * 3, [0.0] * 3, lengths=[2, 1], num_sequences=4)
    values = torch.tensor([1.0, 3.0, 10.0])
    assert aggregate(values, tokens, by="sequence").item() == pytest.approx((2.0 + 10.0) / 4)


def test_constant_aggregation_divides_by_a_length_that_no_batch_changes():
    tokens = tokens_of([1.0] * 3, [0.0] * 3, lengths=[2, 1], num_sequences=4)
    values = torch.tensor([1.0, 3.0, 10.0])
    found = aggregate(values, tokens, by="constant", length=5)
    assert found.item() == pytest.approx(14 / (4 * 5))


def test_the_default_length_is_max_new_tokens():
    assert loss_of("dr_grpo").average.length == MAX_NEW_TOKENS
    assert loss_of("dr_grpo", length=3).average.length == 3
