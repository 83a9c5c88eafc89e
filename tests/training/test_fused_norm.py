import pytest
import torch
from architectures import ARCHITECTURES, tiny_model
from torch import nn
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.olmo2.modeling_olmo2 import Olmo2RMSNorm
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from millrace.models.exact.mode import find_norms
from millrace.training.layers import _half_norm, _Norm, _rounds_first, fuse_norms


def gradients_of(model, tokens):
    model.zero_grad()
    model(tokens).logits.square().sum().backward()
    return {name: p.grad.clone() for name, p in model.named_parameters()}


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_every_norm_of_a_model_is_fused_and_nothing_changes(architecture):
    model, plain = tiny_model(architecture), tiny_model(architecture)
    for parameters in zip(model.named_parameters(), plain.parameters(), strict=True):
        (name, ours), theirs = parameters
        if "norm" in name:
            with torch.no_grad():
                theirs.add_(torch.randn_like(theirs) * 0.3)
                ours.copy_(theirs)
    num_norms = sum("RMSNorm" in type(module).__name__ for module in model.modules())
    assert fuse_norms(model) == num_norms > 0
    tokens = torch.randint(0, 64, (2, 9))
    torch.testing.assert_close(model(tokens).logits, plain(tokens).logits, rtol=1e-4, atol=1e-5)
    expected = gradients_of(plain, tokens)
    for name, gradient in gradients_of(model, tokens).items():
        scale = expected[name].abs().max().item()
        torch.testing.assert_close(gradient, expected[name], rtol=1e-4, atol=1e-5 * scale, msg=name)


def test_the_gradient_is_that_of_finite_differences():
    torch.manual_seed(0)
    x = torch.randn(2, 3, 5, dtype=torch.float64, requires_grad=True)
    gain = torch.randn(5, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x, gain: _Norm.apply(x, gain, 0.1), (x, gain))


class Almost(nn.Module):
    """A norm by its looks only."""

    def __init__(self, compute):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8))
        self.eps = 1e-6
        self.compute = compute

    def forward(self, x):
        return self.compute(self, x)


@pytest.mark.parametrize(
    "compute",
    [
        lambda self, x: nn.functional.layer_norm(x, (8,), self.weight, eps=self.eps),
        lambda self, x: x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-3) * self.weight,
        lambda self, x: nn.functional.rms_norm(x, (8,), 2 * self.weight, eps=self.eps),
    ],
    ids=["mean subtracted", "another epsilon", "another gain"],
)
def test_modules_that_are_no_rms_norm_are_unchanged(compute):
    assert fuse_norms(Almost(compute)) == 0


def test_other_dtypes_use_the_original_forward():
    model, plain = tiny_model("llama").bfloat16(), tiny_model("llama").bfloat16()
    fuse_norms(model.float())
    model.bfloat16()
    tokens = torch.randint(0, 64, (2, 9))
    assert torch.equal(model(tokens).logits, plain(tokens).logits)


def test_norms_in_16_bits_are_fused_only_if_they_round_in_the_same_places():
    assert _rounds_first(LlamaRMSNorm(32, eps=1e-6), 1e-6)
    assert _rounds_first(Qwen3RMSNorm(32, eps=1e-5).bfloat16(), 1e-5)
    assert not _rounds_first(Olmo2RMSNorm(32, eps=1e-6), 1e-6)  # once, after the gain


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_a_norm_in_16_bits_has_the_gradient_of_the_model_s_own(device):
    norm = next(iter(find_norms(tiny_model("qwen3")))).module.bfloat16().to(device)
    with torch.no_grad():
        norm.weight.add_(torch.randn_like(norm.weight) * 0.3)
    x = torch.randn(64, len(norm.weight), device=device).bfloat16().requires_grad_()
    slope = torch.randn_like(x)
    own, fused = norm(x), _half_norm(x, norm.weight, norm.variance_epsilon)
    assert (own == fused).float().mean() > 0.98
    (expected,), (found,) = (torch.autograd.grad(y, x, slope) for y in (own, fused))
    torch.testing.assert_close(found, expected, rtol=0.05, atol=0.05)
