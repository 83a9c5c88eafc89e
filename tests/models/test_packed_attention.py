import numpy as np
import pytest
import torch
from architectures import ARCHITECTURES, VOCAB, tiny_model
from hypothesis import given, settings
from hypothesis import strategies as st

from millrace.models.loading import hidden_states
from millrace.models.packed_attention import PACKED_ATTENTION, PackedLayout, _attend

CPU = torch.device("cpu")
LENGTHS = [5, 19, 1, 12, 20, 3, 19]


def packed_hidden(model, sequences: list[torch.Tensor]) -> torch.Tensor:
    lengths = [len(sequence) for sequence in sequences]
    return hidden_states(
        model,
        input_ids=torch.cat(sequences)[None],
        position_ids=torch.cat([torch.arange(n) for n in lengths])[None],
        layout=PackedLayout.of(lengths, device=CPU),
    )


def sequences_of(lengths: list[int], *, seed: int = 3) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(0, VOCAB, (n,), generator=generator) for n in lengths]


def packed_and_plain(architecture: str):
    """Two models with the same weights: one for packed sequences, one as transformers runs it."""
    packed, plain = tiny_model(architecture), tiny_model(architecture)
    packed.set_attn_implementation(PACKED_ATTENTION)
    plain.set_attn_implementation("eager")
    return packed, plain


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_packed_sequences_get_the_hidden_states_they_get_alone(architecture):
    packed, plain = packed_and_plain(architecture)
    sequences = sequences_of(LENGTHS)
    with torch.no_grad():
        ours = packed_hidden(packed, sequences).split(LENGTHS)
        for sequence, hidden in zip(sequences, ours, strict=True):
            alone = plain.base_model(input_ids=sequence[None], use_cache=False).last_hidden_state[0]
            torch.testing.assert_close(hidden, alone, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_packed_gradients_are_the_sum_of_those_of_separate_sequences(architecture):
    packed, plain = packed_and_plain(architecture)
    sequences = sequences_of(LENGTHS)
    torch.manual_seed(0)
    weights = torch.randn(sum(LENGTHS), packed.config.hidden_size)
    (packed_hidden(packed, sequences) * weights).sum().backward()
    for sequence, weight in zip(sequences, weights.split(LENGTHS), strict=True):
        hidden = plain.base_model(input_ids=sequence[None], use_cache=False).last_hidden_state[0]
        (hidden * weight).sum().backward()
    for (name, ours), theirs in zip(packed.named_parameters(), plain.parameters(), strict=True):
        if theirs.grad is None:
            assert ours.grad is None, name
            continue
        scale = theirs.grad.abs().max().item()
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-4, atol=1e-5 * scale, msg=name)


def test_a_token_changes_only_what_follows_it_in_its_own_sequence():
    packed, _ = packed_and_plain("qwen3")
    sequences = sequences_of([6, 8, 7])
    changed = [sequence.clone() for sequence in sequences]
    changed[1][3] = (changed[1][3] + 1) % VOCAB
    with torch.no_grad():
        before, after = packed_hidden(packed, sequences), packed_hidden(packed, changed)
    moved = (before != after).any(-1)
    assert moved.tolist() == [False] * 9 + [True] * 5 + [False] * 7


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 70), min_size=1, max_size=40))
def test_a_layout_places_every_token_once_and_wastes_little(lengths):
    layout = PackedLayout.of(lengths, device=CPU)
    num_tokens = sum(lengths)
    tokens = torch.arange(num_tokens)
    padded = tokens[layout.padded_from_packed]
    assert torch.equal(padded[layout.packed_from_padded], tokens)
    assert int((~layout.is_padding).sum()) == num_tokens
    assert len(padded) <= num_tokens / 0.75 + len(lengths)
    # Each row of each bucket is one sequence from its start, then padding.
    starts = set((np.cumsum(lengths) - lengths).tolist())
    row = 0
    for b, longest in layout.buckets:
        for _ in range(b):
            assert int(padded[row]) in starts
            row += longest


@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("window", [None, 1, 700, 3000])
def test_long_sequences_are_attended_to_in_query_blocks(softcap, window):
    torch.manual_seed(0)
    length = 1100  # more than two query blocks
    q, k, v = (torch.randn(1, heads, length, 4) for heads in (2, 1, 1))
    out = _attend(q, k, v, scaling=0.7, window=window, softcap=softcap)
    scores = (q @ k.transpose(2, 3)) * 0.7
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    behind = torch.arange(length)[:, None] - torch.arange(length)
    seen = (behind >= 0) & (behind < (window or length))
    expected = scores.masked_fill(~seen, -torch.inf).softmax(-1) @ v
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-5)
