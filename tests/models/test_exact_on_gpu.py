"""Kernels of exact mode: a row gets the same bits in every batch, and the right numbers."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from millrace.models.attention.layout import PackedLayout, ScoreRules
from millrace.models.exact.attention import (
    KeyTables,
    Tiles,
    attend,
    attend_packed,
    store,
)
from millrace.models.exact.mode import ExactMode

pytestmark = pytest.mark.gpu
ROWS = 700
BATCHES = ((3, 4), (0, 33), (100, 356), (0, 600))


def random(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    generator = torch.Generator("cuda").manual_seed(sum(shape))
    return torch.randn(*shape, device="cuda", generator=generator).to(dtype)


FUNCTIONS = {
    "product": lambda x: F.linear(x, random(1536, 576)),
    "odd product": lambda x: F.linear(x[:, :100], random(37, 100)),
    "head": lambda x: torch.mm(x.bfloat16(), random(5000, 576).t(), out_dtype=torch.float32),
    "mean": lambda x: x.mean(-1, keepdim=True),
    "logsumexp": lambda x: x.repeat(1, 90).logsumexp(-1),
    "silu": F.silu,
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_row_has_the_same_bits_in_every_batch(name):
    x, function = random(ROWS, 576, dtype=torch.float32), FUNCTIONS[name]
    with ExactMode(torch.bfloat16):
        expected = function(x)
        for start, stop in BATCHES:
            assert torch.equal(function(x[start:stop]), expected[start:stop])
        with torch.no_grad():
            assert torch.equal(function(x[:9]), expected[:9])
    plain = function(x if x.dtype == expected.dtype else x.to(expected.dtype))
    torch.testing.assert_close(expected, plain, rtol=2e-2, atol=2e-2)


def test_experts_multiply_their_own_rows():
    x, experts = random(300, 64), random(5, 48, 64)
    ends = [40, 40, 171, 290, 300]
    with ExactMode(torch.bfloat16):
        found = F.grouped_mm(
            x, experts.transpose(1, 2), offs=torch.tensor(ends, dtype=torch.int32, device="cuda")
        )
        for expert, (start, end) in enumerate(zip([0, *ends], ends, strict=False)):
            own = F.linear(x[start:end], experts[expert])
            assert torch.equal(found[start:end], own)


@pytest.mark.parametrize(("num_heads", "num_kv", "dim"), [(16, 8, 128), (9, 3, 64), (4, 4, 32)])
@pytest.mark.parametrize("window", [None, 200])
def test_attention_of_decode_steps_and_chunks_has_the_bits_of_a_packed_pass(
    num_heads, num_kv, dim, window
):
    device = torch.device("cuda")
    layout = PackedLayout([30, 900, 11, 333], device=device)
    q, k, v = (random(layout.num_rows, heads, dim) for heads in (num_heads, num_kv, num_kv))
    rules = ScoreRules(scale=dim**-0.5, window=window, softcap=None)
    tiles = Tiles.packed(layout, device)
    packed = attend_packed(q, k, v, tiles, rules, layout=layout)
    rows = slice(30, 930)
    keys, values = (
        x[rows].float().repeat_interleave(num_heads // num_kv, 1).transpose(0, 1) for x in (k, v)
    )
    at = torch.arange(900, device=device)
    behind = at[:, None] - at
    seen = behind >= 0 if window is None else (behind >= 0) & (behind < window)
    plain = F.scaled_dot_product_attention(
        q[rows].float().transpose(0, 1), keys, values, attn_mask=seen
    )
    torch.testing.assert_close(packed[rows].float(), plain.transpose(0, 1), rtol=2e-2, atol=2e-2)
    tables = KeyTables(
        torch.randperm(60, device=device), torch.zeros(1, dtype=torch.int64, device=device), 16
    )
    cache = torch.zeros(960, num_kv, 2 * dim, dtype=torch.bfloat16, device=device)
    slots = tables.slots(torch.zeros_like(tables.offsets), at[None])[0]
    store(cache, torch.where(at < 890, slots, -1), torch.cat([k[rows], v[rows]], -1))
    store(cache, slots[890:], torch.cat([k[rows], v[rows]], -1)[890:])
    cached = cache.split([dim, dim], -1)
    for start, count in ((0, 900), (40, 333)):
        own = Tiles.of(np.array([start]), np.array([count]), tables=tables, device=device)
        part = slice(30 + start, 30 + start + count)
        assert torch.equal(attend(q[part], *cached, own, rules), packed[part])
    lengths = torch.tensor([900, 1, 0, 77, 512], device=device)
    shared = tables.entries.expand(5, -1).contiguous()
    step = Tiles.single((lengths - 1).clamp_min(0), lengths, tables=shared, block=16)
    found = attend(q[29 + lengths], *cached, step, rules)
    assert torch.equal(found[[0, 1, 3, 4]], packed[(29 + lengths)[[0, 1, 3, 4]]])
    assert found[2].abs().max() == 0


def test_gradient_of_attention_is_that_of_a_plain_one():
    device = torch.device("cuda")
    layout = PackedLayout([32, 20, 30, 40, 60], parents=[-1, 0, 1, 1, 0], device=device)
    inputs = [random(layout.num_rows, heads, 64).requires_grad_() for heads in (4, 2, 2)]
    rules = ScoreRules(scale=0.125, window=None, softcap=None)
    out = attend_packed(*inputs, Tiles.packed(layout, device), rules, layout=layout)
    weights = random(*out.shape)
    found = torch.autograd.grad((out * weights).sum(), inputs)
    total = torch.zeros((), device=device)
    copies = torch.ones(layout.num_rows, device=device)
    copies[:52] = 2
    copies[:32] = 3
    for path in (layout.path(n) for n in (2, 3, 4)):
        rows = path.tolist()
        q, k, v = (x[rows].float().transpose(0, 1) for x in inputs)
        k, v = (x.repeat_interleave(2, 0) for x in (k, v))
        plain = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(0, 1)
        total = total + (plain * weights[rows].float() / copies[rows, None, None]).sum()
    for ours, theirs in zip(found, torch.autograd.grad(total, inputs), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=5e-2, atol=5e-2)
