import numpy as np
import pytest
import torch
from architectures import VOCAB, tiny_model
from hypothesis import given, settings
from hypothesis import strategies as st

from millrace.core.completions import kept_counts, kept_row
from millrace.core.records import Kept
from millrace.models.kept_rows import KeptRows, packed
from millrace.models.logprobs import final_logits, token_logprobs


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


def test_kept_ids_renormalise_and_an_empty_row_keeps_all_ids():
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
@given(
    rows=st.lists(st.lists(st.integers(0, 20), max_size=4), min_size=1, max_size=12),
    chunk=st.integers(1, 10),
)
def test_split_rows_are_the_rows_of_the_record(rows, chunk):
    offsets = np.cumsum([0, *(len(row) for row in rows)]).astype(np.int64)
    ids = np.array([id for row in rows for id in row], np.int32)
    for array in (ids, offsets):
        array.setflags(write=False)  # as they come from the wire
    kept = KeptRows.of(Kept(ids=ids, offsets=offsets), device=torch.device("cpu"))
    got = [
        part.ids[part.offsets[i] : part.offsets[i + 1]].tolist()
        for part in kept.split(chunk)
        for i in range(len(part.offsets) - 1)
    ]
    assert got == rows


@pytest.mark.parametrize("vocab", [5, 32, 70])
def test_a_row_of_many_kept_ids_may_be_a_bit_mask(vocab: int):
    allowed = torch.rand(6, vocab, generator=torch.Generator().manual_seed(vocab)) < 0.6
    allowed[:, 0], allowed[0, -1], allowed[3] = True, True, True
    rows: list[np.ndarray] = []
    for index, (row, words) in enumerate(zip(allowed, packed(allowed).numpy(), strict=True)):
        ids = row.nonzero().squeeze(1).to(torch.int32).numpy()
        mask = np.concatenate([[-len(ids)], words]).astype(np.int32)
        rows.append(ids[:0] if index == 3 else mask if index % 2 else ids)
    offsets = np.cumsum([0, *map(len, rows)])
    kept = Kept(ids=np.concatenate(rows), offsets=offsets)
    on_device = KeptRows.of(kept, device=torch.device("cpu"))
    assert torch.equal(on_device.allowed(vocab), allowed)
    for chunk in (1, 4):
        assert torch.equal(torch.cat([p.allowed(vocab) for p in on_device.split(chunk)]), allowed)
    expected = [0 if index == 3 else int(row.sum()) for index, row in enumerate(allowed)]
    assert kept_counts(kept).tolist() == expected
    assert kept_row(kept, 1).tolist() == allowed[1].nonzero().squeeze(1).tolist()


@pytest.mark.parametrize("architecture", ["llama", "qwen3", "gemma2", "gemma3"])
def test_final_logits_are_the_models_logits(architecture):
    model = tiny_model(architecture)
    tokens = torch.randint(0, VOCAB, (1, 12))
    with torch.no_grad():
        hidden = model.base_model(input_ids=tokens, use_cache=False).last_hidden_state[0]
        torch.testing.assert_close(final_logits(model, hidden), model(tokens).logits[0])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@torch.no_grad()
def test_logits_of_16_bit_factors_are_not_rounded_with_or_without_autocast(dtype):
    engine = tiny_model("llama").to(dtype)
    hidden = torch.randn(5, 32, generator=torch.Generator().manual_seed(0))
    logits = final_logits(engine, hidden.to(dtype))
    assert logits.dtype == torch.float32
    assert (logits != logits.to(dtype)).any()
    with torch.autocast("cpu", dtype=dtype):
        assert torch.equal(final_logits(engine.float(), hidden), logits)
