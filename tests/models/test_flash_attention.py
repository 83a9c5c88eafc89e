"""The merge of several calls and its gradient, with a dense reference kernel on the CPU."""

from itertools import pairwise

import pytest
import torch

from millrace.models.attention.flash import (
    FlashKernel,
    VarlenArgs,
    attend_backward,
    attend_forward,
    calls_of,
    flash_attention,
    flash_attention_backward,
)
from millrace.models.attention.layout import FlatCalls, PackedLayout, ScoreRules
from millrace.models.attention.packed import packed_obstacle

CPU = torch.device("cpu")


class DenseKernel(FlashKernel):
    """What FlashKernel computes, span by span with whole score matrices."""

    def forward(self, q, k, v, args):
        out = torch.empty_like(q)
        lse = q.new_empty(q.shape[1], q.shape[0])
        for rows, seen in spans_of(args):
            scores, values = scores_of(q[rows], k[seen], v[seen], args)
            lse[:, rows] = scores.logsumexp(-1)
            out[rows] = torch.einsum("hqk,khd->qhd", scores.softmax(-1), values)
        return out, lse

    def backward(self, grad, q, k, v, out, lse, *, args):
        dq, dk, dv = (torch.zeros_like(x) for x in (q, k, v))
        for rows, seen in spans_of(args):
            scores, values = scores_of(q[rows], k[seen], v[seen], args)
            p = (scores - lse[:, rows, None]).exp()  # of the merged normalizer
            dp = torch.einsum("qhd,khd->hqk", grad[rows], values)
            ds = p * (dp - (grad[rows] * out[rows]).sum(-1).t()[:, :, None]) * args.scale
            groups = q.shape[1] // k.shape[1]
            keys_repeated = k[seen].repeat_interleave(groups, 1)
            dq[rows] = torch.einsum("hqk,khd->qhd", ds, keys_repeated)
            for target, part in ((dk, (ds, q[rows])), (dv, (p, grad[rows]))):
                per_head = torch.einsum("hqk,qhd->khd", *part)
                target[seen] = per_head.unflatten(1, (-1, groups)).sum(2)
        return dq, dk, dv


def spans_of(args: VarlenArgs):
    bounds = zip(args.queries.bounds.tolist(), args.keys.bounds.tolist(), strict=True)
    for (q0, k0), (q1, k1) in pairwise(bounds):
        yield slice(q0, q1), slice(k0, k1)


def scores_of(q, k, v, args: VarlenArgs):
    groups = q.shape[1] // k.shape[1]
    scores = torch.einsum("qhd,khd->hqk", q, k.repeat_interleave(groups, 1)) * args.scale
    behind = torch.arange(len(q), device=q.device)[:, None] - torch.arange(len(k), device=q.device)
    if args.causal:
        scores = scores.masked_fill(behind < 0, -torch.inf)
    if args.window is not None:
        scores = scores.masked_fill(behind >= args.window, -torch.inf)
    return scores, v.repeat_interleave(groups, 1)


@flash_attention.register_kernel("cpu")
def _(q, k, v, flat, window, scale, sinks):
    calls = calls_of(FlatCalls(*flat), window=window, scale=scale)
    return attend_forward(DenseKernel(), q, k, v, calls, sinks)


@flash_attention_backward.register_kernel("cpu")
def _(grad, q, k, v, out, lse, flat, window, scale):
    calls = calls_of(FlatCalls(*flat), window=window, scale=scale)
    return attend_backward(DenseKernel(), grad, q, k, v, out, lse, calls=calls)


# lengths and parents of segments
LAYOUTS = {
    "no family": ([3, 1, 5], [-1, -1, -1]),
    "one family": ([4, 3, 1, 2], [-1, 0, 0, 0]),
    "families and others": ([4, 2, 3, 1, 1, 2, 5], [-1, -1, 0, 0, 1, 1, -1]),
    "deep": ([2, 1, 1, 1, 2, 1, 1, 2, 1], [-1, -1, 0, 2, 3, 3, 2, 1, -1]),
    "two deep": ([2, 1, 1, 1, 2, 2, 1, 1], [-1, -1, 0, 2, 2, 1, 5, 5]),
}


def inputs_of(num_rows, *, heads=4, kv_heads=2, size=8, dtype=torch.float64, device=CPU):
    torch.manual_seed(0)
    return tuple(
        torch.randn(num_rows, n, size, dtype=dtype, device=device, requires_grad=True)
        for n in (heads, kv_heads, kv_heads)
    )


def seen_by_rows(lengths, parents) -> torch.Tensor:
    """[T, T] bool, from the definition."""
    segment = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
    rows = torch.arange(len(segment))
    seen = (segment[:, None] == segment) & (rows[:, None] >= rows)
    above = torch.tensor(parents)[segment]
    while (above >= 0).any():
        seen |= above[:, None] == segment
        above = torch.where(above >= 0, torch.tensor(parents)[above], -1)
    return seen


def dense(q, k, v, seen, scale, sinks=None):
    groups = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(groups, 1) for x in (k, v))
    scores = (torch.einsum("qhd,khd->hqk", q, k) * scale).masked_fill(~seen, -torch.inf)
    if sinks is not None:
        scores = torch.cat([scores, sinks[:, None, None].expand(-1, len(q), 1)], -1)
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1)[..., : len(k)], v)


@pytest.mark.parametrize(("lengths", "parents"), LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("has_sinks", [False, True], ids=["plain", "sinks"])
def test_merged_calls_are_attention_to_whole_paths(lengths, parents, has_sinks):
    inputs = inputs_of(sum(lengths))
    sinks = torch.randn(4, dtype=torch.float64, requires_grad=True) if has_sinks else None
    layout = PackedLayout(lengths, parents=parents, device=CPU)
    out, _ = flash_attention(*inputs, [*layout.calls], None, 0.3, sinks)
    expected = dense(*inputs, seen_by_rows(lengths, parents), 0.3, sinks)
    torch.testing.assert_close(out, expected)
    grad = torch.randn_like(out)
    leaves = (*inputs, sinks) if has_sinks else inputs
    ours = torch.autograd.grad(out, leaves, grad)
    theirs = torch.autograd.grad(expected, leaves, grad)
    for got, wanted in zip(ours, theirs, strict=True):
        torch.testing.assert_close(got, wanted)


@pytest.mark.parametrize(("lengths", "parents"), LAYOUTS.values(), ids=LAYOUTS)
def test_the_merged_gradient_is_that_of_finite_differences(lengths, parents):
    inputs = inputs_of(sum(lengths), heads=2, kv_heads=1, size=2)
    flat = [*PackedLayout(lengths, parents=parents, device=CPU).calls]
    assert torch.autograd.gradcheck(
        lambda q, k, v: flash_attention(q, k, v, flat, None, 0.5, None)[0], inputs
    )


@pytest.mark.slow
def test_the_operator_passes_opcheck():
    lengths, parents = LAYOUTS["families and others"]
    inputs = inputs_of(sum(lengths))
    flat = [*PackedLayout(lengths, parents=parents, device=CPU).calls]
    torch.library.opcheck(flash_attention, (*inputs, flat, None, 0.5, None))


@pytest.mark.parametrize(
    ("change", "obstacle"),
    [
        ({"dtype": torch.float32}, "computes in torch.float32"),
        ({"size": 12}, "head sizes are 12 and 12"),
        ({"size": 264}, "head sizes are 264"),
        ({"softcap": 30.0}, "softcaps"),
        ({"window": 3}, "window is shorter"),
    ],
)
def test_unsupported_inputs_of_the_kernel_are_named(change, obstacle):
    settings = {"dtype": torch.bfloat16, "size": 8, "softcap": None, "window": None, **change}
    lengths, parents = LAYOUTS["one family"]
    inputs = inputs_of(sum(lengths), size=settings["size"], dtype=settings["dtype"])
    layout = PackedLayout(lengths, parents=parents, device=CPU)
    rules = ScoreRules(0.5, settings["window"], settings["softcap"])
    assert obstacle in packed_obstacle(*inputs, layout, rules)


HEADS = [(4, 4), (8, 2), (6, 1)]
GPU_LAYOUTS = {
    "no family": ([1, 130, 257, 64, 2], [-1] * 5),
    "single rows": ([1, 1, 1], [-1, 0, 0]),
    "families": ([129, 1, 64, 200, 1, 63, 3, 300], [-1, -1, 0, 0, 0, 1, 1, -1]),
    "long": ([1000, 257, 512, 31], [-1, 0, 0, 0]),
    "deep": ([129, 70, 64, 200, 1, 63, 300, 5], [-1, -1, 0, 2, 2, 0, 1, -1]),
    "two deep": ([130, 70, 65, 1, 200, 90, 31, 300], [-1, -1, 0, 2, 2, 1, 5, 5]),
}


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
class TestFlashKernel:
    @pytest.mark.parametrize("has_sinks", [False, True], ids=["plain", "sinks"])
    @pytest.mark.parametrize("size", [64, 80, 128, 256])
    @pytest.mark.parametrize(("heads", "kv_heads"), HEADS)
    @pytest.mark.parametrize(("lengths", "parents"), GPU_LAYOUTS.values(), ids=GPU_LAYOUTS)
    def test_values_and_gradients_are_those_of_a_float64_reference(
        self, lengths, parents, heads, kv_heads, size, has_sinks
    ):
        exact = inputs_of(sum(lengths), heads=heads, kv_heads=kv_heads, size=size)
        exact += (torch.randn(heads, dtype=torch.float64),) if has_sinks else ()
        exact = tuple(x.detach().bfloat16().double().requires_grad_() for x in exact)
        rough = tuple(x.detach().bfloat16().cuda().requires_grad_() for x in exact)
        layout = PackedLayout(lengths, parents=parents, device=torch.device("cuda"))
        sinks = [x[3] if has_sinks else None for x in (rough, exact)]
        out, _ = flash_attention(*rough[:3], [*layout.calls], None, size**-0.5, sinks[0])
        expected = dense(*exact[:3], seen_by_rows(lengths, parents), size**-0.5, sinks[1])
        grad = torch.randn_like(expected)
        ours = torch.autograd.grad(out, rough, grad.to(out))
        theirs = torch.autograd.grad(expected, exact, grad)
        for got, wanted in zip((out, *ours), (expected, *theirs), strict=True):
            error = (got.cpu().double() - wanted).abs().max().item()
            assert error < 2e-2 * wanted.abs().max().item()

    @pytest.mark.parametrize("window", [1, 2, 100])
    def test_windows_are_those_of_the_dense_reference(self, window):
        lengths, parents = GPU_LAYOUTS["no family"]
        exact = inputs_of(sum(lengths), size=64)
        layout = PackedLayout(lengths, parents=parents, device=torch.device("cuda"))
        rough = (x.detach().bfloat16().cuda() for x in exact)
        out, _ = flash_attention(*rough, [*layout.calls], window, 0.125, None)
        on_cpu = PackedLayout(lengths, parents=parents, device=CPU)
        expected, _ = flash_attention(*exact, [*on_cpu.calls], window, 0.125, None)
        assert (out.cpu().double() - expected).abs().max().item() < 3e-2
