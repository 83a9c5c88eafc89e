import copy

import pytest
import torch
from architectures import VOCAB, tiny_model
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from millrace.models.kept_rows import KeptRows
from millrace.models.logprobs import chunked_distributions, final_logits, token_logprobs


def chunked_token_logprobs(model, hidden, targets, **settings):
    """Logprobs and entropies of the targets alone."""
    return chunked_distributions(model, hidden, targets, **settings)[:2]


def kept_rows(*rows: list[int]) -> KeptRows:
    sizes = torch.tensor([0, *(len(row) for row in rows)])
    ids = torch.tensor([id for row in rows for id in row])
    return KeptRows(ids=ids, offsets=sizes.cumsum(0))


class LargestTensor(TorchDispatchMode):
    """Notes the most elements any tensor had that an operation returned."""

    def __init__(self):
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple | list) else [result]:
            if isinstance(tensor, torch.Tensor):
                self.elements = max(self.elements, tensor.numel())
        return result


def chunk_case(model, num_rows: int):
    torch.manual_seed(1)
    hidden = torch.randn(num_rows, model.config.hidden_size, requires_grad=True)
    targets = torch.randint(0, VOCAB, (num_rows,))
    temperatures = torch.rand(num_rows) + 0.5
    kept = kept_rows(
        *[[] if i % 3 else [int(t), (int(t) + 5) % VOCAB] for i, t in enumerate(targets)]
    )
    return hidden, {"targets": targets, "temperatures": temperatures, "kept": kept}


class WiderHead(nn.Linear):
    """A head with something of its own beside weight and bias, as adapters have."""

    def forward(self, hidden):
        return super().forward(hidden) + 0.1 * hidden[:, :1]


def model_with(kind: str):
    """Models whose heads differ: plain, tied, softcapped, scaled, biased, not plain."""
    model = copy.deepcopy(tiny_model({"tied": "qwen3", "softcapped": "gemma2"}.get(kind, "llama")))
    if kind == "scaled":
        model.config.logits_scaling, model.config.logit_scale = 3.0, 0.5
    if kind in ("biased", "not plain"):
        make = nn.Linear if kind == "biased" else WiderHead
        head = make(model.config.hidden_size, VOCAB)
        model.set_output_embeddings(head)
    return model


KINDS = ("plain", "tied", "softcapped", "scaled", "biased", "not plain")


@pytest.mark.parametrize("entropies_too", [False, True])
@pytest.mark.parametrize("with_kept", [False, True])
@pytest.mark.parametrize("chunk", [1000, 40, 7])
@pytest.mark.parametrize("kind", KINDS)
def test_values_and_gradients_are_those_of_the_plain_functions(
    kind, chunk, with_kept, entropies_too
):
    model = model_with(kind)
    outcomes = []
    for fused in (False, True):
        hidden, case = chunk_case(model, 40)
        case["kept"] = case["kept"] if with_kept else None
        model.zero_grad()
        if fused:
            logprobs, entropies = chunked_token_logprobs(model, hidden, **case, chunk=chunk)
        else:
            logprobs, entropies = token_logprobs(final_logits(model, hidden), **case)
        loss = logprobs.sin().sum()
        if entropies_too:
            loss = loss + entropies.square().sum()
        loss.backward()
        head = model.get_output_embeddings()
        bias = [] if head.bias is None else [head.bias.grad]
        outcomes.append((logprobs, entropies, hidden.grad, head.weight.grad, *bias))
    for ours, expected in zip(*reversed(outcomes), strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-5)


def topk_case(model, num_rows: int):
    """Three ids per position; at some positions the sampled one is among them."""
    hidden, case = chunk_case(model, num_rows)
    topk_ids = (case["targets"][:, None] + torch.tensor([[1, 7, 0]])) % VOCAB
    topk_ids[::2, 2] = (topk_ids[::2, 2] + 9) % VOCAB
    return hidden, {**case, "kept": None, "topk_ids": topk_ids}


@pytest.mark.parametrize("drawn_too", [False, True])
@pytest.mark.parametrize("chunk", [1000, 7])
@pytest.mark.parametrize("kind", KINDS)
def test_logprobs_and_gradients_of_topk_ids_are_those_of_plain_functions(kind, chunk, drawn_too):
    model = model_with(kind)
    outcomes = []
    for fused in (False, True):
        hidden, case = topk_case(model, 40)
        topk_ids = case.pop("topk_ids")
        model.zero_grad()
        if fused:
            found = chunked_distributions(model, hidden, **case, topk_ids=topk_ids, chunk=chunk)
            logprobs, entropies, of_topk = found
        else:
            logits = final_logits(model, hidden)
            logprobs, entropies = token_logprobs(logits, **case)
            plain = (logits / case["temperatures"][:, None]).log_softmax(-1)
            rest = plain.scatter(1, topk_ids, -torch.inf).logsumexp(-1, keepdim=True)
            of_topk = torch.cat([plain.gather(1, topk_ids), rest], 1)
        loss = (of_topk.sin() * torch.arange(1, 5)).sum()
        if drawn_too:
            loss = loss + logprobs.sin().sum() + entropies.square().sum()
        loss.backward()
        head = model.get_output_embeddings()
        bias = [] if head.bias is None else [head.bias.grad]
        outcomes.append((of_topk, hidden.grad, head.weight.grad, *bias))
    for ours, expected in zip(*reversed(outcomes), strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-5)


def test_logits_of_more_than_one_chunk_never_exist_for_topk_ids():
    model = tiny_model("gemma2")
    hidden, case = topk_case(model, 200)
    with LargestTensor() as seen:
        _, _, of_topk = chunked_distributions(model, hidden, **case, chunk=16)
        assert of_topk is not None
        of_topk.sum().backward()
    others = max(hidden.numel(), model.get_output_embeddings().weight.numel())
    assert seen.elements <= max(16 * VOCAB, others)


def test_a_frozen_head_gets_no_gradient_and_passes_one_on():
    model = model_with("biased")
    for parameter in model.get_output_embeddings().parameters():
        parameter.requires_grad_(False)
    hidden, case = chunk_case(model, 40)
    logprobs, _ = chunked_token_logprobs(model, hidden, **case, chunk=7)
    logprobs.sum().backward()
    assert hidden.grad.abs().sum() > 0
    assert all(p.grad is None for p in model.get_output_embeddings().parameters())


@pytest.mark.parametrize("chunk", [1000, 7])
def test_bfloat16_products_give_float32_logits_and_gradients(chunk):
    model = model_with("plain")
    hidden, case = chunk_case(model, 40)
    exact, _ = chunked_token_logprobs(model, hidden, **case, chunk=chunk)
    (exact_grad,) = torch.autograd.grad(exact.sum(), model.lm_head.weight)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        rough, _ = chunked_token_logprobs(model, hidden, **case, chunk=chunk)
    rough.sum().backward()  # as in a step, outside of autocast
    assert rough.dtype == model.lm_head.weight.grad.dtype == torch.float32
    assert 1e-6 < (rough - exact).abs().max() < 0.1
    error = (model.lm_head.weight.grad - exact_grad).abs().max() / exact_grad.abs().max()
    assert 1e-6 < error < 0.02


def test_logits_of_more_than_one_chunk_never_exist_forward_or_backward():
    model = tiny_model("gemma2")
    hidden, case = chunk_case(model, 200)
    largest = {}
    for chunk in (16, 200):
        with LargestTensor() as seen:
            logprobs, entropies = chunked_token_logprobs(model, hidden, **case, chunk=chunk)
            (logprobs + entropies).sum().backward()
        largest[chunk] = seen.elements
    others = max(hidden.numel(), model.get_output_embeddings().weight.numel())
    assert largest[16] <= max(16 * VOCAB, others) < 200 * VOCAB
    assert largest[200] == 200 * VOCAB  # the measurement does see logits


def test_memory_kept_for_the_backward_pass_does_not_hold_logits():
    model = tiny_model("llama")
    hidden, case = chunk_case(model, 200)
    saved = []

    def note(tensor):
        if not isinstance(tensor, nn.Parameter):
            saved.append(tensor.shape)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        chunked_token_logprobs(model, hidden, **case, chunk=16)
        assert saved
        assert all(VOCAB not in shape for shape in saved)
        chunked_token_logprobs(model, hidden, **case, chunk=200)
    assert (200, VOCAB) in saved  # a single chunk is kept, and the measurement sees it


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("chunk", [1000, 7])
@pytest.mark.parametrize("kind", KINDS)
def test_half_precision_on_the_gpu_is_near_the_cpu_and_rounds_no_logits(kind, chunk, compiled):
    model = model_with(kind)
    hidden, case = chunk_case(model, 40)
    logprobs, entropies = chunked_token_logprobs(model, hidden, **case, chunk=chunk)
    (logprobs.sum() + entropies.sum()).backward()
    on_gpu = copy.deepcopy(model).cuda()
    on_gpu.zero_grad()
    moved = hidden.detach().cuda().requires_grad_()
    case = {
        "targets": case["targets"].cuda(),
        "temperatures": case["temperatures"].cuda(),
        "kept": KeptRows(ids=case["kept"].ids.cuda(), offsets=case["kept"].offsets.cuda()),
    }
    with torch.autocast("cuda", dtype=torch.bfloat16):
        ours = chunked_token_logprobs(on_gpu, moved, **case, chunk=chunk, compiled=compiled)
    (ours[0].sum() + ours[1].sum()).backward()
    heads = (m.get_output_embeddings().weight.grad for m in (on_gpu, model))
    for got, wanted in (
        (ours[0], logprobs),
        (ours[1], entropies),
        (moved.grad, hidden.grad),
        tuple(heads),
    ):
        error = (got.cpu() - wanted).abs().max().item()
        assert error < 0.03 * wanted.abs().max().item()
