import torch

from millrace.training.optimizer import LossScale


def test_a_scale_that_is_off_stays_at_one():
    scale = LossScale(is_on=False)
    for _ in range(1000):
        scale.succeeded()
    assert scale.value == 1.0
    assert not scale.lower()


def test_overflow_halves_the_scale_until_it_cannot_be_the_reason():
    scale = LossScale(is_on=True)
    first = scale.value
    assert scale.lower()
    assert scale.value == first / 2
    while scale.value > 1:
        assert scale.lower()
    assert not scale.lower()


def test_a_larger_scale_is_tried_after_many_good_steps_in_a_row():
    scale = LossScale(is_on=True)
    first = scale.value
    for _ in range(199):
        scale.succeeded()
    scale.lower()
    for _ in range(199):
        scale.succeeded()
    assert scale.value == first / 2
    scale.succeeded()
    assert scale.value == first
    for _ in range(10_000):
        scale.succeeded()
    assert scale.value == 2.0**24


def test_gradients_are_divided_in_place():
    scale = LossScale(is_on=True)
    gradient = torch.full([3], scale.value)
    scale.unscale([gradient])
    assert gradient.tolist() == [1.0, 1.0, 1.0]
