"""Building blocks of exact mode on a CPU: a row gets the same bits in every batch."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from transformers import CONFIG_MAPPING, PreTrainedConfig

from millrace.core.errors import ConfigError
from millrace.models.attention.layout import PackedLayout, ScoreRules
from millrace.models.attention.packed import packed_attention
from millrace.models.exact.attention import KeyTables, Tiles, attend, attend_packed, check_trainable
from millrace.models.exact.mode import ExactMode, check_exact

CPU = torch.device("cpu")
ROWS = 70
BATCHES = ([3], [69, 0], range(5, 22), range(33), range(69, -1, -1))


def weight(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(len(shape) + sum(shape)))


def squared(pairs: torch.Tensor) -> torch.Tensor:
    numbers = torch.view_as_complex(pairs)
    return numbers * numbers


FUNCTIONS = {
    "wide product": lambda x: F.linear(x, weight(37, 700)),
    "product with a vector": lambda x: F.linear(x, weight(1, 700), weight(1)),
    "head": lambda x: torch.mm(x, weight(90, 700).t()),
    "silu": F.silu,
    "tanh gelu": lambda x: F.gelu(x, approximate="tanh"),
    "sigmoid": lambda x: x.sigmoid(),
    "selu": F.selu,
    "power": lambda x: x.abs() ** 1.7,
    "power of a number": lambda x: 1.7**x,
    "complex product": lambda x: torch.view_as_real(squared(x.unflatten(-1, (-1, 2)))),
    "logaddexp": lambda x: torch.logaddexp(x, weight(700)),
    "cumsum": lambda x: x.cumsum(-1),
    "norm": lambda x: x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6),
    "logsumexp": lambda x: x.repeat(1, 60).logsumexp(-1),
}


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_row_has_the_same_bits_in_every_batch(name, threads):
    x, function = weight(ROWS, 700), FUNCTIONS[name]
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        with ExactMode(torch.float32):
            expected = function(x)
        torch.set_num_threads(threads)
        with ExactMode(torch.float32):
            for rows in map(list, BATCHES):
                assert torch.equal(function(x[rows]), expected[rows])
    finally:
        torch.set_num_threads(before)
    torch.testing.assert_close(expected, function(x), rtol=1e-4, atol=1e-4)


def test_experts_have_the_same_bits_beside_other_rows():
    x, experts = weight(40, 32), weight(4, 24, 32)
    with ExactMode(torch.float32):
        whole = F.grouped_mm(x, experts.transpose(1, 2), offs=torch.tensor([9, 9, 30, 40]).int())
        few = F.grouped_mm(
            x[[4, 12, 33, 39]], experts.transpose(1, 2), offs=torch.tensor([1, 1, 2, 4]).int()
        )
    assert torch.equal(few, whole[[4, 12, 33, 39]])
    torch.testing.assert_close(whole[9:30], x[9:30] @ experts[2].t(), rtol=1e-5, atol=1e-4)


LAYOUT = PackedLayout([30, 50, 40, 11, 150], parents=[-1, 0, 1, 1, -1], device=CPU)


@pytest.mark.parametrize("window", [None, 20])
@pytest.mark.parametrize("softcap", [None, 2.0])
def test_attention_of_decode_steps_and_chunks_has_the_bits_of_a_packed_pass(window, softcap):
    """The sequence of segments 0 to 2, whose keys lie in blocks of a cache."""
    q, k, v = (weight(LAYOUT.num_rows, heads, 8) for heads in (6, 2, 2))
    rules = ScoreRules(scale=0.3, window=window, softcap=softcap)
    tiles = Tiles.packed(LAYOUT, CPU)
    packed = attend_packed(q, k, v, tiles, rules, layout=LAYOUT)
    options = {"scaling": 0.3, "sliding_window": window, "softcap": softcap}
    inputs = [x.transpose(0, 1)[None] for x in (q, k, v)]
    plain, _ = packed_attention(torch.nn.Module(), *inputs, None, layout=LAYOUT, **options)
    torch.testing.assert_close(packed, plain[0], rtol=1e-5, atol=1e-6)
    tables = KeyTables(torch.randperm(32), torch.zeros(1, dtype=torch.int64), 4)
    slots = tables.slots(torch.zeros(1, dtype=torch.int64), torch.arange(120)[None])[0]
    keys, values = torch.zeros(2, 128, 2, 8)
    keys[slots], values[slots] = k[:120], v[:120]
    for start, count in ((0, 120), (119, 1), (17, 1), (40, 33)):
        own = Tiles.of(np.array([start]), np.array([count]), tables=tables, device=CPU)
        rows = slice(start, start + count)
        assert torch.equal(attend(q[rows], keys, values, own, rules), packed[rows])


def test_weights_are_rounded_to_the_compute_dtype_and_residuals_are_not():
    embedding = torch.nn.Embedding(9, 16)
    linear = torch.nn.Linear(16, 4)
    with ExactMode(torch.bfloat16):
        hidden = embedding(torch.arange(9))
        output = linear(hidden)
    assert hidden.dtype == torch.float32
    assert torch.equal(hidden, embedding.weight.bfloat16().float())
    assert output.dtype == torch.bfloat16
    output.float().sum().backward()
    assert linear.weight.grad is not None
    assert linear.weight.grad.dtype == torch.float32


def test_function_without_an_exact_version_is_refused_by_name():
    with ExactMode(torch.float32), pytest.raises(ConfigError, match="uses 'einsum'"):
        torch.einsum("ij,kj->ik", weight(3, 4), weight(5, 4))


def config_of(**settings) -> PreTrainedConfig:
    shape = {"num_attention_heads": 8, "hidden_size": 512, "num_hidden_layers": 2}
    return CONFIG_MAPPING[settings.pop("model_type", "llama")](**{**shape, **settings})


@pytest.mark.parametrize(
    ("settings", "part"),
    [
        ({"model_type": "gemma2", "sliding_window": 4096}, "the model softcaps its attention"),
        ({"model_type": "mistral", "sliding_window": 1023}, "the model's window is shorter than"),
        ({"num_attention_heads": 32, "num_key_value_heads": 1}, "more than 16 query heads share"),
        ({"model_type": "deepseek_v3"}, "its head sizes are 192 and 128"),
    ],
)
def test_what_exact_mode_cannot_train_on_a_gpu_is_refused_before_the_weights_are_loaded(
    settings, part
):
    config = config_of(**settings)
    with pytest.raises(ConfigError, match=f"needs the flash kernel on a GPU, .*because {part}"):
        check_trainable(config, torch.device("cuda"), max_context=1024)
    check_trainable(config, CPU, max_context=1024)


def test_exact_mode_trains_models_whose_window_spans_the_sequences_on_a_gpu():
    gpu = torch.device("cuda")
    for config in (
        config_of(),
        config_of(num_attention_heads=16, num_key_value_heads=1),
        config_of(model_type="mistral", sliding_window=1024),
        config_of(model_type="qwen2", sliding_window=8, use_sliding_window=False),
    ):
        check_trainable(config, gpu, max_context=1024)


def test_dtype_without_exact_kernels_is_refused():
    check_exact(CPU, torch.float32)
    with pytest.raises(ConfigError, match="'float32' on 'cpu', not 'bfloat16'"):
        check_exact(CPU, torch.bfloat16)
