import numpy as np
import pytest
import torch
from architectures import ARCHITECTURES, VOCAB, tiny_model
from hypothesis import given, settings
from hypothesis import strategies as st

from millrace.models.attention.layout import Block, PackedLayout, ScoreRules
from millrace.models.attention.packed import PACKED_ATTENTION, attend, packed_attention
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


def test_a_token_changes_only_what_follows_it_in_its_own_sequence():
    packed, _ = packed_and_plain("qwen3")
    sequences = sequences_of([6, 8, 7])
    changed = [sequence.clone() for sequence in sequences]
    changed[1][3] = (changed[1][3] + 1) % VOCAB
    with torch.no_grad():
        before, after = packed_hidden(packed, sequences), packed_hidden(packed, changed)
    moved = (before != after).any(-1)
    assert moved.tolist() == [False] * 9 + [True] * 5 + [False] * 7


def family_hidden(model, families: list[tuple[torch.Tensor, list[torch.Tensor]]]):
    """Hidden states of each continuation, with the shared prefix stored once."""
    parents = [shared for shared, _ in families]
    children = [(i, own) for i, (_, parts) in enumerate(families) for own in parts]
    segments = [*parents, *(own for _, own in children)]
    begins = [*[0] * len(parents), *(len(parents[i]) for i, _ in children)]
    lengths = [len(segment) for segment in segments]
    hidden = hidden_states(
        model,
        input_ids=torch.cat(segments)[None],
        position_ids=torch.cat([torch.arange(n) + b for n, b in zip(lengths, begins, strict=True)])[
            None
        ],
        layout=PackedLayout(
            lengths, parents=[*[-1] * len(parents), *(i for i, _ in children)], device=CPU
        ),
    )
    return hidden.split(lengths)


def families_of(sizes: list[tuple[int, list[int]]]):
    parts = sequences_of([n for shared, own in sizes for n in (shared, *own)])
    families = []
    for _, own in sizes:
        shared, *rest = parts[: 1 + len(own)]
        parts = parts[1 + len(own) :]
        families.append((shared, rest))
    return families


# Small families are attended to whole, large ones (more than 128 rows) part by part.
FAMILIES = {
    "small": [(9, [4, 5, 1]), (30, [2, 20]), (5, [7])],
    "large": [(60, [50, 3, 45]), (9, [70, 66])],
    "both": [(9, [4, 8]), (60, [50, 30]), (21, [1, 2, 3, 4])],
}


@pytest.mark.parametrize("sizes", FAMILIES.values(), ids=FAMILIES)
@pytest.mark.parametrize("architecture", [*ARCHITECTURES, "gpt_oss", "qwen3_next"])
def test_a_shared_prefix_gives_the_hidden_states_of_whole_sequences(architecture, sizes):
    packed, plain = packed_and_plain(architecture)
    families = families_of(sizes)
    torch.manual_seed(0)
    shared_hidden = family_hidden(packed, families)
    children = list(shared_hidden[len(families) :])
    loss, expected_loss = torch.zeros(()), torch.zeros(())
    for number, (shared, parts) in enumerate(families):
        weight = torch.randn(len(shared), packed.config.hidden_size)
        loss = loss + (shared_hidden[number] * weight).sum()
        for i, own in enumerate(parts):
            tokens = torch.cat([shared, own])[None]
            whole = plain.base_model(input_ids=tokens, use_cache=False).last_hidden_state[0]
            hidden = children.pop(0)
            torch.testing.assert_close(hidden, whole[len(shared) :], rtol=1e-5, atol=1e-5)
            own_weight = torch.randn_like(hidden)
            loss = loss + (hidden * own_weight).sum()
            expected_loss = expected_loss + (whole[len(shared) :] * own_weight).sum()
            if i == 0:
                expected_loss = expected_loss + (whole[: len(shared)] * weight).sum()
    loss.backward()
    expected_loss.backward()
    for (name, ours), theirs in zip(packed.named_parameters(), plain.parameters(), strict=True):
        if theirs.grad is not None:
            scale = theirs.grad.abs().max().item()
            torch.testing.assert_close(
                ours.grad, theirs.grad, rtol=1e-4, atol=1e-5 * scale, msg=name
            )


def test_a_token_of_one_branch_changes_nothing_in_another():
    packed, _ = packed_and_plain("qwen3")
    families = families_of([(6, [4, 5]), (70, [40, 41])])
    changed = [(shared, [own.clone() for own in parts]) for shared, parts in families]
    for number, (_, parts) in enumerate(changed):
        parts[number][1] = (parts[number][1] + 1) % VOCAB
    with torch.no_grad():
        before, after = family_hidden(packed, families), family_hidden(packed, changed)
    moved = [(a != b).any(-1).tolist() for a, b in zip(before, after, strict=True)]
    assert [any(rows) for rows in moved] == [False, False, True, False, False, True]
    assert moved[2] == [False, True, True, True]
    assert moved[5] == [False] + [True] * 40


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


sizes = st.integers(1, 40)


@settings(max_examples=60, deadline=None)
@given(
    families=st.lists(st.tuples(sizes, st.lists(sizes, min_size=1, max_size=5)), max_size=4),
    others=st.lists(sizes, min_size=1, max_size=3),
    window=st.none() | st.integers(1, 50),
)
def test_rows_attend_to_their_segment_and_its_parent_only(families, others, window):
    children = [(i, n) for i, (_, own) in enumerate(families) for n in own]
    lengths = [*(n for n, _ in families), *(n for _, n in children), *others]
    parents = [*[-1] * len(families), *(i for i, _ in children), *[-1] * len(others)]
    layout = PackedLayout(lengths, parents=parents, device=CPU)
    segment = np.repeat(np.arange(len(lengths)), lengths)
    row = np.arange(len(segment))
    parent = np.array(parents)[segment]
    position = row - (np.cumsum(lengths) - lengths)[segment]
    position = position + np.where(parent >= 0, np.array(lengths)[parent], 0)
    behind = position[:, None] - position
    seen = ((segment[:, None] == segment) & (behind >= 0)) | (parent[:, None] == segment)
    seen &= behind < (window or len(row))
    # With equal scores and one-hot values, the output shows which rows were attended to.
    values = torch.eye(len(row)).view(1, 1, len(row), len(row))
    zeros = torch.zeros(1, 1, len(row), 4)
    out, _ = packed_attention(
        None, zeros, zeros, values, None, layout=layout, sliding_window=window
    )
    expected = torch.from_numpy(seen / seen.sum(1, keepdims=True)).float()
    torch.testing.assert_close(out[0, :, 0], expected)


def test_a_layout_refuses_children_that_do_not_follow_their_parents():
    for parents in ([-1, -1, 0], [-1, -1, 1, 0]):
        with pytest.raises(AssertionError, match="children"):
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
