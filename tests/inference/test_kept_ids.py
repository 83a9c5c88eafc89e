"""Kept ids of a sequence, part by part."""

import itertools
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext

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
@pytest.mark.parametrize("in_threads", [False, True])
def test_since_returns_rows_from_any_token_on(start: int, in_threads: bool):
    kept = KeptIds(Kept(ids=ints(1, 2), offsets=np.array([0, 2, 2])))
    with ThreadPoolExecutor(2) if in_threads else nullcontext() as copiers:
        kept.append(ints(3, 4, 5, 6), sizes=np.array([1, 3]), copiers=copiers)
        early = kept.since(0)
        kept.append(ints(), sizes=np.array([0]), copiers=copiers)
        kept.append(ints(), sizes=ints(), copiers=copiers)
        kept.append(ints(7), sizes=np.array([1]), copiers=copiers)
    assert rows_of(early) == [[1, 2], [], [3], [4, 5, 6]]
    assert rows_of(kept.since(start)) == [[1, 2], [], [3], [4, 5, 6], [], [7]][start:]


def test_since_without_tokens_is_empty():
    kept = KeptIds().since(0)
    assert rows_of(kept) == []
    assert kept.ids.dtype == np.int32
    assert kept.offsets.dtype == np.int64
