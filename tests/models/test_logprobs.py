import numpy as np
import pytest
import torch
from architectures import VOCAB, tiny_model
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from millrace.core.records import Kept
from millrace.models.logprobs import (
    KeptRows,
    chunked_token_logprobs,
    final_logits,
    token_logprobs,
)


def kept_rows(*rows: list[int]) -> KeptRows:
    sizes = torch.tensor([0, *(len(row) for row in rows)])
    ids = torch.tensor([id for row in rows for id in row])
    return KeptRows(ids=ids, offsets=sizes.cumsum(0))


def test_logprob_and_entropy_of_a_hand_computed_case():
    # Probabilities 1/2, 1/4, 1/4 at temperature 1.
    logits = torch.tensor([[2.0, 1.0, 1.0]]) * np.log(2)
    logprobs, entropies = token_logprobs(
        logits, torch.tensor([0]), temperatures=torch.ones(1), kept=None
    )
    assert logprobs.item() == pytest.approx(np.log(0.5))
    assert entropies.item() == pytest.approx(1.5 * np.log(2))


def test_temperature_sharpens_before_normalising():
    # At temperature 1/2 the weights 2 and 1 become 4 and 1.
    logits = torch.tensor([[1.0, 0.0]]) * np.log(2)
    logprobs, _ = token_logprobs(
        logits, torch.tensor([1]), temperatures=torch.tensor([0.5]), kept=None
    )
    assert logprobs.item() == pytest.approx(np.log(1 / 5))


def test_kept_ids_renormalise_and_an_empty_row_rules_nothing_out():
    logits = torch.log(torch.tensor([[1.0, 2.0, 3.0, 4.0]])).repeat(2, 1)
    logprobs, entropies = token_logprobs(
        logits, torch.tensor([1, 1]), temperatures=torch.ones(2), kept=kept_rows([1, 3], [])
    )
    assert logprobs.exp().tolist() == pytest.approx([2 / 6, 2 / 10])
    expected = -(1 / 3 * np.log(1 / 3) + 2 / 3 * np.log(2 / 3))
    assert entropies[0].item() == pytest.approx(expected)


def test_a_single_kept_id_has_logprob_and_entropy_zero():
    logprobs, entropies = token_logprobs(
        torch.randn(1, 5), torch.tensor([3]), temperatures=torch.ones(1), kept=kept_rows([3])
    )
    assert logprobs.item() == 0.0
    assert entropies.item() == pytest.approx(0.0, abs=1e-6)


@pytest.mark.parametrize("with_kept", [False, True])
def test_gradients_are_those_of_the_formula(with_kept):
    torch.manual_seed(0)
    logits = torch.randn(3, 6, dtype=torch.float64, requires_grad=True)
    temperatures = torch.tensor([0.5, 1.0, 2.0], dtype=torch.float64)
    kept = kept_rows([0, 2, 5], [], [1]) if with_kept else None

    def both(logits):
        return token_logprobs(logits, torch.tensor([2, 4, 1]), temperatures=temperatures, kept=kept)

    assert torch.autograd.gradcheck(both, (logits,))


def test_extreme_logits_stay_finite_with_finite_gradients():
    logits = torch.tensor([[1e4, -1e4, 0.0, 5e3]], requires_grad=True)
    logprobs, entropies = token_logprobs(
        logits, torch.tensor([2]), temperatures=torch.tensor([0.1]), kept=kept_rows([2, 3])
    )
    (logprobs + entropies).sum().backward()
    assert torch.isfinite(logprobs).all()
    assert torch.isfinite(entropies).all()
    assert torch.isfinite(logits.grad).all()


@settings(max_examples=50, deadline=None)
@given(data=st.data(), num_rows=st.integers(1, 9), chunk=st.integers(1, 10))
def test_selected_and_split_rows_are_the_rows_of_the_record(data, num_rows, chunk):
    rows = data.draw(st.lists(st.lists(st.integers(0, 20), max_size=4), min_size=1, max_size=12))
    offsets = np.cumsum([0, *(len(row) for row in rows)]).astype(np.int64)
    ids = np.array([id for row in rows for id in row], np.int32)
    kept = Kept(ids=ids, offsets=offsets)
    wanted = np.array([data.draw(st.integers(0, len(rows) - 1)) for _ in range(num_rows)])
    selected = KeptRows.select(kept, rows=wanted, device=torch.device("cpu"))
    got = [
        part.ids[part.offsets[i] : part.offsets[i + 1]].tolist()
        for part in selected.split(chunk)
        for i in range(len(part.offsets) - 1)
    ]
    assert got == [rows[i] for i in wanted]


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


@pytest.mark.parametrize("architecture", ["llama", "gemma2"])
def test_chunks_give_the_values_and_gradients_of_one_piece(architecture):
    model = tiny_model(architecture)
    outcomes = []
    for chunk in (1000, 7):
        hidden, case = chunk_case(model, 40)
        model.zero_grad()
        logprobs, entropies = chunked_token_logprobs(model, hidden, **case, chunk=chunk)
        (logprobs.sum() + 0.1 * entropies.square().sum()).backward()
        head = model.get_output_embeddings().weight.grad
        outcomes.append((logprobs, entropies, hidden.grad, head))
    for whole, chunked in zip(*outcomes, strict=True):
        torch.testing.assert_close(chunked, whole, rtol=1e-5, atol=1e-5)


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
        saved.append(tensor.shape)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        chunked_token_logprobs(model, hidden, **case, chunk=16)
    assert all(VOCAB not in shape for shape in saved)


@pytest.mark.parametrize("architecture", ["llama", "qwen3", "gemma2", "gemma3"])
def test_final_logits_are_the_models_logits(architecture):
    model = tiny_model(architecture)
    tokens = torch.randint(0, VOCAB, (1, 12))
    with torch.no_grad():
        hidden = model.base_model(input_ids=tokens, use_cache=False).last_hidden_state[0]
        torch.testing.assert_close(final_logits(model, hidden), model(tokens).logits[0])
