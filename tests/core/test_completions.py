import itertools

import numpy as np
import pytest

from millrace.core.completions import cut, joined
from millrace.core.records import Completion, Kept

NUM_PROMPT = 4


def make(num_tokens, *, kept):
    sizes = np.arange(num_tokens) % 3
    offsets = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
    rows = Kept(ids=np.arange(offsets[-1], dtype=np.int32), offsets=offsets)
    return Completion(
        tokens=np.arange(num_tokens, dtype=np.int32),
        logprobs=-np.arange(num_tokens, dtype=np.float32),
        versions=np.full(num_tokens, 3, np.int32),
        kept=rows if kept else None,
        routes=np.arange(NUM_PROMPT + num_tokens - 1, dtype=np.uint8)[:, None, None],
        finish="stop",
        text="whole",
    )


@pytest.mark.parametrize("kept", [False, True])
@pytest.mark.parametrize("bounds", [(0, 7), (0, 0, 7), (0, 3, 7), (0, 1, 2, 6, 7)])
def test_joining_the_cuts_of_a_completion_restores_it(bounds, kept):
    whole = make(7, kept=kept)
    parts = [cut(whole, a, b) for a, b in itertools.pairwise(bounds)]
    again = joined(parts, truncates=kept)
    for name in ("tokens", "logprobs", "versions", "routes"):
        np.testing.assert_array_equal(getattr(again, name), getattr(whole, name))
        assert getattr(again, name).dtype == getattr(whole, name).dtype
    assert (again.kept is None) == (not kept)
    if whole.kept is not None and again.kept is not None:
        np.testing.assert_array_equal(again.kept.ids, whole.kept.ids)
        np.testing.assert_array_equal(again.kept.offsets, whole.kept.offsets)
    assert (again.finish, again.text) == ("interrupt", "")


def test_joining_no_parts_is_an_empty_completion():
    nothing = joined([], truncates=True)
    assert nothing.kept is not None
    assert (len(nothing.tokens), nothing.kept.offsets.tolist()) == (0, [0])


def test_first_tokens_of_a_completion_have_routes_of_all_but_the_last():
    routes = cut(make(7, kept=False), 0, 3).routes
    assert routes is not None
    assert routes.ravel().tolist() == list(range(NUM_PROMPT + 3 - 1))
