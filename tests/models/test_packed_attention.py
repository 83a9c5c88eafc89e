import numpy as np
import pytest
import torch
from architectures import ARCHITECTURES, VOCAB, tiny_model
from hypothesis import given, settings
from hypothesis import strategies as st

from millrace.models.attention.layout import Block, PackedLayout, ScoreRules
from millrace.models.attention.packed import (
    PACKED_ATTENTION,
    attend,
    attend_masked,
    packed_attention,
)
from millrace.models.loading import hidden_states

CPU = torch.device("cpu")
LENGTHS = [5, 19, 1, 12, 20, 3, 19]


def packed_hidden(model, sequences: list[torch.Tensor]) -> torch.Tensor:
    lengths = [len(sequence) for sequence in sequences]
    return hidden_states(
        model,
        input_ids=torch.cat(sequences)[None],
        position_ids=torch.cat([torch.arange(n) for n in lengths])[None],
        layout=PackedLayout(lengths, device=CPU),
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


@pytest.mark.parametrize("size", [1, 4, 7, 16, 64])
def test_rows_attend_within_chunks_of_their_sequence(size):
    """Parts of several segments lie in one chunk, and parts of one segment in several."""
    layout = PackedLayout([9, 7, 12, 3, 20, 5], parents=[-1, 0, 1, 1, 0, -1], device=CPU)
    generator = torch.Generator().manual_seed(1)
    inputs = [torch.randn(1, h, 56, 8, generator=generator).requires_grad_() for h in (4, 2, 2)]
    ours, _ = packed_attention(
        torch.nn.Module(), *inputs, None, layout=layout, scaling=0.3, attention_chunk=size
    )
    visible = torch.zeros(56, 56, dtype=torch.bool)
    for segment, length in enumerate(layout.lengths):
        rows = layout.path(segment)
        for place in range(len(rows) - length, len(rows)):
            visible[rows[place], rows[place // size * size : place + 1]] = True
    rules = ScoreRules(0.3)
    expected = attend_masked(*inputs, visible=visible[None, None], rules=rules).transpose(1, 2)
    torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-6)
    weights = torch.randn(expected.shape, generator=generator)
    found = torch.autograd.grad((ours * weights).sum(), inputs)
    for one, other in zip(
        found, torch.autograd.grad((expected * weights).sum(), inputs), strict=True
    ):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def test_a_token_changes_only_what_follows_it_in_its_own_sequence():
    packed, _ = packed_and_plain("qwen3")
    sequences = sequences_of([6, 8, 7])
    changed = [sequence.clone() for sequence in sequences]
    changed[1][3] = (changed[1][3] + 1) % VOCAB
    with torch.no_grad():
        before, after = packed_hidden(packed, sequences), packed_hidden(packed, changed)
    moved = (before != after).any(-1)
    assert moved.tolist() == [False] * 9 + [True] * 5 + [False] * 7


def tree_hidden(model, segments: list[torch.Tensor], parents: list[int]):
    """Hidden states of each segment, with what segments share stored once."""
    lengths = [len(segment) for segment in segments]
    layout = PackedLayout(lengths, parents=parents, device=CPU)
    positions = [
        torch.arange(n) + first for n, first in zip(lengths, layout.first_positions, strict=True)
    ]
    hidden = hidden_states(
        model,
        input_ids=torch.cat(segments)[None],
        position_ids=torch.cat(positions)[None],
        layout=layout,
    )
    return hidden.split(lengths)


def path_of(segment: int, parents: list[int]) -> list[int]:
    above = [segment]
    while (segment := parents[segment]) >= 0:
        above.insert(0, segment)
    return above


# Lengths and parents of segments. Small trees are attended to whole, large ones (more than 128
# rows) part by part.
TREES = {
    "small": ([9, 30, 5, 4, 5, 1, 2, 20, 7], [-1, -1, -1, 0, 0, 0, 1, 1, 2]),
    "large": ([60, 9, 50, 3, 45, 70, 66], [-1, -1, 0, 0, 0, 1, 1]),
    "both": ([9, 60, 21, 4, 8, 50, 30, 1, 2, 3, 4], [-1, -1, -1, 0, 0, 1, 1, 2, 2, 2, 2]),
    "small and deep": ([9, 6, 8, 5, 1, 3, 7, 4, 12, 11], [-1, -1, 0, 2, 3, 3, 2, 0, 1, -1]),
    "large and deep": ([40, 20, 30, 25, 41, 3, 7, 14, 12, 33], [-1, -1, 0, 2, 3, 3, 2, 0, 1, -1]),
}


@pytest.mark.parametrize(("lengths", "parents"), TREES.values(), ids=TREES)
@pytest.mark.parametrize("architecture", [*ARCHITECTURES, "gpt_oss", "qwen3_next"])
def test_shared_rows_give_the_hidden_states_of_whole_sequences(architecture, lengths, parents):
    packed, plain = packed_and_plain(architecture)
    segments = sequences_of(lengths)
    torch.manual_seed(0)
    loss, expected_loss = torch.zeros(()), torch.zeros(())
    for number, hidden in enumerate(tree_hidden(packed, segments, parents)):
        tokens = torch.cat([segments[n] for n in path_of(number, parents)])
        whole = plain.base_model(input_ids=tokens[None], use_cache=False).last_hidden_state[0]
        own = whole[-len(hidden) :]
        torch.testing.assert_close(hidden, own, rtol=1e-5, atol=1e-5)
        weight = torch.randn_like(hidden)
        loss = loss + (hidden * weight).sum()
        expected_loss = expected_loss + (own * weight).sum()
    loss.backward()
    expected_loss.backward()
    for (name, ours), theirs in zip(packed.named_parameters(), plain.parameters(), strict=True):
        if theirs.grad is not None:
            scale = theirs.grad.abs().max().item()
            torch.testing.assert_close(
                ours.grad, theirs.grad, rtol=1e-4, atol=1e-5 * scale, msg=name
            )


def test_a_token_changes_only_what_continues_it():
    packed, _ = packed_and_plain("qwen3")
    for kind in ("small and deep", "large and deep"):
        lengths, parents = TREES[kind]
        segments = sequences_of(lengths)
        changed = [segment.clone() for segment in segments]
        changed[2][1] = (changed[2][1] + 1) % VOCAB
        with torch.no_grad():
            before, after = (tree_hidden(packed, part, parents) for part in (segments, changed))
        moved = [(a != b).any(-1) for a, b in zip(before, after, strict=True)]
        assert moved[2].tolist() == [False] + [True] * (lengths[2] - 1)
        below = [n for n in range(len(lengths)) if 2 in path_of(n, parents)[:-1]]
        assert below == [3, 4, 5, 6]
        for number, rows in enumerate(moved):
            assert number == 2 or bool(rows.all()) == bool(rows.any()) == (number in below)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 70), min_size=1, max_size=40))
def test_blocks_place_every_row_once_and_waste_little(lengths):
    blocks = PackedLayout(lengths, device=CPU).blocks
    num_rows = sum(lengths)
    rows = torch.arange(num_rows)
    padded = rows[blocks.row_of_query]
    assert torch.equal(padded[blocks.query_of_row], rows)
    assert int((~blocks.is_padding).sum()) == num_rows
    assert blocks.row_of_key is None
    assert len(padded) <= num_rows / 0.75 + len(lengths)
    # Each row of each block is one segment from its start, then padding.
    starts = set((np.cumsum(lengths) - lengths).tolist())
    row = 0
    for block in blocks.blocks:
        b, longest, _ = block.shape
        for _ in range(b):
            assert int(padded[row]) in starts
            row += longest


@st.composite
def trees(draw) -> tuple[list[int], list[int]]:
    """Lengths and parents of some trees, whose segments continue any earlier one of their tree that
    leaves them contiguous, and of segments that share nothing."""
    roots = draw(st.integers(0, 3))
    parents = [-1] * roots
    for root in range(roots):
        path = [root]
        for _ in range(draw(st.integers(1, 6))):
            path = path[: draw(st.integers(1, len(path)))]
            parents.append(path[-1])
            path.append(len(parents) - 1)
    parents += [-1] * draw(st.integers(1, 3))
    return [draw(st.integers(1, 40)) for _ in parents], parents


@settings(max_examples=60, deadline=None)
@given(tree=trees(), window=st.none() | st.integers(1, 50))
def test_rows_attend_to_their_path_only(tree, window):
    lengths, parents = tree
    layout = PackedLayout(lengths, parents=parents, device=CPU)
    starts = np.cumsum(lengths) - lengths
    num_rows = sum(lengths)
    seen = np.zeros((num_rows, num_rows), bool)
    for segment in range(len(lengths)):
        path = [n for s in path_of(segment, parents) for n in starts[s] + np.arange(lengths[s])]
        for place in range(len(path) - lengths[segment], len(path)):
            first = 0 if window is None else max(0, place + 1 - window)
            seen[path[place], path[first : place + 1]] = True
    # With equal scores and one-hot values, the output shows which rows were attended to.
    values = torch.eye(num_rows).view(1, 1, num_rows, num_rows)
    zeros = torch.zeros(1, 1, num_rows, 4)
    out, _ = packed_attention(
        None, zeros, zeros, values, None, layout=layout, sliding_window=window
    )
    expected = torch.from_numpy(seen / seen.sum(1, keepdims=True)).float()
    torch.testing.assert_close(out[0, :, 0], expected)


def test_a_layout_refuses_trees_that_are_not_contiguous():
    for parents in ([-1, -1, 0, 1, 0], [-1, 0, 0, 1]):
        with pytest.raises(AssertionError, match="contiguous"):
            PackedLayout([3] * len(parents), parents=parents, device=CPU)


@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("window", [None, 1, 700, 3000])
def test_long_sequences_are_computed_in_query_blocks(softcap, window):
    torch.manual_seed(0)
    length = 1100  # more than two query blocks
    q, k, v = (torch.randn(1, heads, length, 4) for heads in (2, 1, 1))
    block = Block(shape=(1, length, length))
    out = attend(q, k, v, block=block, rules=ScoreRules(0.7, window, softcap))
    scores = (q @ k.transpose(2, 3)) * 0.7
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    behind = torch.arange(length)[:, None] - torch.arange(length)
    seen = (behind >= 0) & (behind < (window or length))
    expected = scores.masked_fill(~seen, -torch.inf).softmax(-1) @ v
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-5)
