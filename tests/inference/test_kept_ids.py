"""Kept ids of a sequence, part by part."""

import itertools

import numpy as np
import pytest

from millrace.core.records import Kept
from millrace.inference.embedded.scheduling.sequence import KeptIds


def rows_of(kept: Kept) -> list[list[int]]:
    bounds = kept.offsets.tolist()
    return [kept.ids[a:b].tolist() for a, b in itertools.pairwise(bounds)]


def ints(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.int32)


@pytest.mark.parametrize("start", range(7))
def test_since_returns_rows_from_any_token_on(start: int):
    kept = KeptIds(Kept(ids=ints(1, 2), offsets=np.array([0, 2, 2])))
    kept.append(ints(3, 4, 5, 6), sizes=np.array([1, 3]))
    kept.append(ints(), sizes=np.array([0]))
    kept.append(ints(7), sizes=np.array([1]))
    assert rows_of(kept.since(start)) == [[1, 2], [], [3], [4, 5, 6], [], [7]][start:]


def test_since_without_tokens_is_empty():
    kept = KeptIds().since(0)
    assert rows_of(kept) == []
    assert kept.ids.dtype == np.int32
    assert kept.offsets.dtype == np.int64
