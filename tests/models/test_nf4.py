"""Weights in 4 bits: their values, and the layer that holds them."""

import pytest
import torch
from architectures import tiny_model
from torch import Tensor, nn

from millrace.core.errors import ConfigError
from millrace.models.lora.nf4 import BLOCK, Nf4Linear, dequantize, level_pairs, quantize, rounded
from millrace.models.lora.quantized import quantizable_layers, quantize_base, round_base

CPU = torch.device("cpu")
# Appendix E of the paper.
LEVELS = [
    -1.0,
    -0.6961928009986877,
    -0.5250730514526367,
    -0.39491748809814453,
    -0.28444138169288635,
    -0.18477343022823334,
    -0.09105003625154495,
    0.0,
    0.07958029955625534,
    0.16093020141124725,
    0.24611230194568634,
    0.33791524171829224,
    0.44070982933044434,
    0.5626170039176941,
    0.7229568362236023,
    1.0,
]


def random_weight(*shape: int, seed: int = 0, scale: float = 0.1) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return scale * torch.randn(*shape, generator=generator)


def nearest_levels(weight: Tensor) -> tuple[list[int], list[float]]:
    """The number of the level of each weight, and the largest magnitude of each block."""
    values = weight.bfloat16().double().flatten().tolist()
    numbers, scales = [], []
    for start in range(0, len(values), 64):
        block = values[start : start + 64]
        scales.append(max(abs(value) for value in block))
        for value in block:
            distances = [abs(value / scales[-1] - level) for level in LEVELS]
            numbers.append(distances.index(min(distances)))
    return numbers, scales


def test_each_weight_is_the_nearest_level_times_the_largest_magnitude_of_its_block():
    weight = random_weight(24, 96)
    numbers, scales = nearest_levels(weight)
    codes, found = quantize(weight)
    assert (codes.dtype, codes.shape) == (torch.uint8, (24 * 96 // 2,))
    assert [half for code in codes.tolist() for half in divmod(code, 16)] == numbers
    assert (found.dtype, found.tolist()) == (torch.bfloat16, scales)
    pairs = level_pairs()
    values = dequantize(codes, found, pairs, shape=weight.shape, dtype=torch.float32)
    expected = torch.tensor([LEVELS[n] * scales[i // 64] for i, n in enumerate(numbers)])
    assert torch.equal(values, expected.bfloat16().float().view(24, 96))


def test_errors_are_at_most_half_of_the_widest_gap_between_levels():
    weight = random_weight(64, 64).bfloat16().float()
    error = (rounded(weight) - weight).view(-1, BLOCK).abs().amax(1)
    scales = weight.view(-1, BLOCK).abs().amax(1)
    half = (LEVELS[1] - LEVELS[0]) / 2
    assert (error <= (half + 2**-9) * scales).all()
    assert (error > half / 10 * scales).any()


def test_values_do_not_depend_on_the_data_type_and_are_kept_when_quantized_again():
    weight = random_weight(16, 128)
    assert rounded(weight.bfloat16()).dtype == torch.bfloat16
    assert torch.equal(rounded(weight), rounded(weight.bfloat16()).float())
    assert torch.equal(rounded(rounded(weight)), rounded(weight))


def test_a_block_of_zeros_stays_zero():
    weight = random_weight(2, 64)
    weight[0] = 0
    assert torch.equal(rounded(weight)[0], torch.zeros(64))
    assert torch.equal(rounded(weight)[1], rounded(weight[1:])[0])


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_layer_computes_what_one_with_the_same_values_does(dtype, has_bias):
    """With a data type of 16 bits under autocast, as in the trainer."""
    plain = nn.Linear(48, 32, bias=has_bias).requires_grad_(False)
    with torch.no_grad():
        plain.weight.copy_(rounded(random_weight(32, 48)))
    layer = Nf4Linear(plain, device=CPU)
    outputs, gradients = [], []
    for one in (plain, layer):
        x = random_weight(1, 7, 48, seed=1, scale=1.0).requires_grad_()
        with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
            outputs.append(one(x))
        (outputs[-1].float() ** 2).sum().backward()
        gradients.append(x.grad)
    assert outputs[1].dtype == dtype
    torch.testing.assert_close(outputs[1], outputs[0], rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(gradients[1], gradients[0], rtol=1e-6, atol=1e-6)


def test_neither_weight_nor_input_is_kept_for_the_backward_pass():
    layer = Nf4Linear(nn.Linear(64, 64).requires_grad_(False), device=CPU)
    kept: list[Tensor] = []

    def keep(tensor: Tensor) -> Tensor:
        kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        layer(torch.ones(5, 64, requires_grad=True))
    own = {layer.codes.data_ptr(), layer.scales.data_ptr(), layer.pairs.data_ptr()}
    assert {tensor.data_ptr() for tensor in kept} == own


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3"])
def test_the_linear_layers_of_decoder_layers_are_quantized_and_nothing_else(architecture):
    original, held, same = (tiny_model(architecture) for _ in range(3))
    quantize_base(held, device=CPU)
    round_base(same)
    names = quantizable_layers(original)
    assert len(names) == 2 * 7
    assert all(name.startswith("model.layers.") and name.endswith("_proj") for name in names)
    packed = {name for name, module in held.named_modules() if isinstance(module, Nf4Linear)}
    assert packed == set(names)
    before, after = original.state_dict(), held.state_dict()
    assert before.keys() == after.keys()
    for name, weight in same.state_dict().items():
        assert torch.equal(after[name], weight), name
        is_quantized = name.removesuffix(".weight") in names
        assert torch.equal(weight, before[name]) != is_quantized, name
    tokens = torch.arange(3, 20)[None]
    with torch.no_grad():
        outputs = [model.eval()(input_ids=tokens).logits for model in (held, same, original)]
    torch.testing.assert_close(outputs[0], outputs[1], rtol=0, atol=1e-6)
    assert (outputs[0] - outputs[2]).abs().max() > 1e-2


def test_a_matrix_that_blocks_do_not_divide_stays_as_it_is():
    model = tiny_model("llama")
    model.set_submodule("model.layers.0.mlp.up_proj", nn.Linear(33, 48))
    names = quantizable_layers(model)
    assert "model.layers.0.mlp.up_proj" not in names
    assert "model.layers.1.mlp.up_proj" in names


def test_layers_with_a_recurrent_state_stay_as_they_are():
    names = quantizable_layers(tiny_model("lfm2"))
    assert names
    assert not any(".conv." in name for name in names)


@pytest.mark.parametrize(
    ("architecture", "reason"),
    [
        ("qwen3_moe", r"does not support experts such as 'model\.layers\.0\.mlp\.experts' of Qwen"),
        ("gpt2", r"finds no linear layers in the decoder layers of GPT2LMHeadModel; leave"),
    ],
)
def test_models_with_experts_or_without_linear_layers_are_refused(architecture, reason):
    for change in (quantizable_layers, round_base):
        with pytest.raises(ConfigError, match=reason):
            change(tiny_model(architecture))
