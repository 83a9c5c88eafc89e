"""What a teacher adds to the loss, by hand and by gradient check."""

import dataclasses
import math

import pytest
import torch
from loss_tokens import loss_of, tokens_of
from torch import Tensor

from millrace.core.errors import ConfigError
from millrace.training.losses.loss import TokenBatch, TopK
from millrace.training.losses.policy_loss import forward_kl, jsd

NAN = math.nan
# Teacher and policy over two topk tokens and all others, at two positions.
TEACHER = [[0.7, 0.2, 0.1], [0.25, 0.25, 0.5]]
POLICY = [[0.5, 0.3, 0.2], [0.25, 0.25, 0.5]]


def double(values) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def topk_of(teacher=TEACHER, policy=POLICY) -> TopK:
    return TopK(teacher=double(teacher).log(), trainer=double(policy).log().requires_grad_())


def taught(ratios, advantages, *, teacher, **columns) -> TokenBatch:
    """Tokens whose teacher probabilities are as given; NaN = not taught."""
    return tokens_of(ratios, advantages, teacher_logprobs=double(teacher).log(), **columns)


def kl(p, q) -> float:
    return sum(a * math.log(a / b) for a, b in zip(p, q, strict=True))


def test_reverse_kl_is_added_to_the_advantages():
    # The engine's and trainer's probability is 1/16; teachers at 1/4, 1/64, and none.
    tokens = taught([1.0, 1.0, 1.0], [1.0, -1.0, 0.5], teacher=[1 / 4, 1 / 64, NAN])
    loss, metrics = loss_of("distil", distil_weight=0.5, reward_weight=1.0)(tokens)
    loss.backward()
    advantages = [1 + 0.5 * math.log(4), -1 - 0.5 * math.log(4), 0.5]
    assert tokens.trainer_logprobs.grad.tolist() == pytest.approx([-a / 3 for a in advantages])
    assert metrics["teacher/kl"].tolist() == pytest.approx([-math.log(4), math.log(4), 0.0])


def test_the_recipe_learns_from_the_teacher_alone():
    tokens = taught([1.0, 1.0], [1.0, -1.0], teacher=[1 / 8, 1 / 8])
    loss, _ = loss_of("distil")(tokens)
    loss.backward()
    assert tokens.trainer_logprobs.grad.tolist() == pytest.approx([-math.log(2) / 2] * 2)


def test_any_recipe_can_be_combined_with_a_teacher():
    plain = tokens_of([1.0, 1.0], [1.0, 1.0])
    mixed = taught([1.0, 1.0], [1.0, 1.0], teacher=[1 / 16, 1 / 16])  # it agrees
    losses = [loss_of("grpo")(plain)[0], loss_of("grpo", distil="reverse_kl")(mixed)[0]]
    assert losses[0].item() == losses[1].item()


def test_the_gradient_of_reverse_kl_is_that_of_the_divergence():
    """Over all tokens that could be drawn, each as often as the policy draws it."""
    logits = double([0.3, -1.0, 0.9, 0.1]).requires_grad_()
    teacher = double([0.1, 0.2, 0.3, 0.4])
    divergence = (logits.softmax(-1) * (logits.log_softmax(-1) - teacher.log())).sum()
    (exact,) = torch.autograd.grad(divergence, logits)
    logprobs = logits.log_softmax(-1)
    estimated = torch.zeros(4, dtype=torch.float64)
    for token in range(4):
        drawn = logprobs[token : token + 1]
        tokens = dataclasses.replace(
            taught([1.0], [0.0], teacher=[teacher[token].item()]),
            trainer_logprobs=drawn,
            engine_logprobs=drawn.detach(),
        )
        (gradient,) = torch.autograd.grad(loss_of("distil")(tokens)[0], logits, retain_graph=True)
        estimated += drawn.detach().exp() * gradient
    torch.testing.assert_close(estimated, exact)


def test_forward_kl_by_hand():
    assert forward_kl(topk_of()).tolist() == pytest.approx([kl(TEACHER[0], POLICY[0]), 0.0])


@pytest.mark.parametrize("beta", [0.1, 0.5, 0.9])
def test_jsd_by_hand(beta):
    p, q = TEACHER[0], POLICY[0]
    m = [beta * a + (1 - beta) * b for a, b in zip(p, q, strict=True)]
    expected = beta * kl(p, m) + (1 - beta) * kl(q, m)
    assert jsd(topk_of(), beta).tolist() == pytest.approx([expected, 0.0])


@pytest.mark.parametrize("distil", ["forward_kl", "jsd"])
def test_divergences_and_rewards_are_mixed_by_their_weights(distil):
    tokens = taught([1.0, 1.0], [1.0, -1.0], teacher=[1 / 4, 1 / 16], topk=topk_of())
    alone = loss_of("clipped")(tokens)[0].item()
    settings = {"distil": distil, "distil_weight": 3.0, "reward_weight": 0.5, "distil_beta": 0.3}
    loss, metrics = loss_of("clipped", **settings)(tokens)
    distances = forward_kl(topk_of()) if distil == "forward_kl" else jsd(topk_of(), 0.3)
    assert loss.item() == pytest.approx(0.5 * alone + 3 * distances.mean().item())
    assert metrics["teacher/divergence"].tolist() == pytest.approx(distances.tolist())


@pytest.mark.parametrize("distil", ["forward_kl", "jsd"])
def test_gradients_of_divergences_are_right_and_zero_without_a_teacher(distil):
    loss = loss_of("distil", distil=distil, distil_beta=0.3)
    teacher = double([*TEACHER, [NAN] * 3]).log()

    def distance(logits: Tensor) -> Tensor:
        topk = TopK(teacher=teacher, trainer=logits.log_softmax(-1))
        tokens = taught([1.0] * 3, [0.0] * 3, teacher=[1 / 4, 1 / 16, NAN], topk=topk)
        return loss(tokens)[0]

    logits = torch.randn(3, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    logits.requires_grad_()
    assert torch.autograd.gradcheck(distance, (logits,))
    (gradient,) = torch.autograd.grad(distance(logits), logits)
    assert gradient[:2].abs().min() > 0
    assert gradient[2].tolist() == [0, 0, 0]


def test_a_policy_equal_to_its_teacher_has_no_gradient():
    for distil in ("forward_kl", "jsd"):
        same = topk_of(policy=TEACHER)
        tokens = taught([1.0, 1.0], [0.0, 0.0], teacher=[1 / 16, 1 / 16], topk=same)
        loss, _ = loss_of("distil", distil=distil)(tokens)
        # Of logprobs that sum up to 1, so without what only changes their sum.
        (gradient,) = torch.autograd.grad(loss, same.trainer)
        tangent = gradient - double(TEACHER) * gradient.sum(-1, keepdim=True)
        assert tangent.abs().max() < 1e-12


def test_a_microbatch_without_a_teacher_adds_no_divergence():
    for distil in ("reverse_kl", "forward_kl"):
        tokens = tokens_of([1.0], [0.0])
        loss, _ = loss_of("distil", distil=distil)(tokens)
        loss.backward()
        assert tokens.trainer_logprobs.grad.tolist() == [0.0]


@pytest.mark.parametrize(
    "settings", [{"distil": "kl"}, {"distil_weight": -1.0}, {"distil_beta": 1.0}]
)
def test_invalid_settings_are_refused(settings):
    with pytest.raises(ConfigError, match=next(iter(settings))):
        loss_of("distil", **settings)
