"""How contexts are divided among the programs of decode attention."""

import numpy as np
import pytest

from millrace.inference.embedded.decode.splits import (
    max_splits,
    num_splits_of,
    plan_splits,
    split_counts,
)


def test_one_long_row_among_short_ones_is_split_and_short_ones_are_not():
    lengths = np.array([16384, *[164] * 255])
    counts = split_counts(lengths, num_rows=256, num_heads=8)
    assert counts.tolist() == [16, *[1] * 255]


def test_equal_rows_that_fill_a_gpu_are_not_split():
    counts = split_counts(np.full(64, 600), num_rows=64, num_heads=8)
    assert counts.tolist() == [1] * 64
    assert num_splits_of(counts, num_rows=64, num_heads=8) == 64


@pytest.mark.parametrize("num_rows", [8, 16, 32])
def test_few_rows_are_split_until_they_fill_a_gpu(num_rows: int):
    counts = split_counts(np.full(num_rows, 2000), num_rows=num_rows, num_heads=8)
    assert 448 <= counts.sum() * 8 <= 512


@pytest.mark.parametrize("num_heads", [1, 3, 8, 48])
@pytest.mark.parametrize("num_rows", [8, 48, 264])
def test_every_plan_covers_each_row_once_within_the_largest_number(num_rows: int, num_heads: int):
    random = np.random.default_rng(num_rows + num_heads)
    for longest in (2, 100, 5_000, 200_000):
        lengths = random.integers(1, longest, size=num_rows - 3)
        counts = split_counts(lengths, num_rows=num_rows, num_heads=num_heads)
        num_splits = num_splits_of(counts, num_rows=num_rows, num_heads=num_heads)
        assert num_splits <= max_splits(num_rows=num_rows, num_heads=num_heads)
        plan = plan_splits(counts, num_rows=num_rows, num_splits=num_splits)
        row, split, of, place = plan[plan[:, 2] > 0].T
        expected = [*counts.tolist(), 1, 1, 1]
        found = [sorted(split[row == r].tolist()) for r in range(num_rows)]
        assert found == [list(range(count)) for count in expected]
        assert (of == np.array(expected)[row]).all()
        assert sorted(place.tolist()) == list(range(len(place)))
        for own in range(num_rows):  # parts of a row are neighbours, in the order of its splits
            in_order = place[row == own][np.argsort(split[row == own])]
            assert (np.diff(in_order) == 1).all()


def test_the_number_of_programs_changes_rarely_while_contexts_grow():
    sizes = set()
    for length in range(64, 2048, 32):
        counts = split_counts(np.full(8, length), num_rows=8, num_heads=8)
        sizes.add(num_splits_of(counts, num_rows=8, num_heads=8))
    assert sizes == {72}
