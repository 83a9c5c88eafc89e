"""JSON in pieces."""

import base64
import json
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from millrace.serving.api.replies import PIECE_BYTES, encoded, encoded_row

SCALARS = st.none() | st.integers() | st.text() | st.floats(allow_nan=False, allow_infinity=False)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=10,
)


@given(VALUES)
@settings(max_examples=50)
def test_pieces_are_the_json_of_a_value(value: Any):
    assert json.loads(b"".join(encoded(value))) == value


def test_iterators_become_lists_that_are_made_while_they_are_written():
    made: list[int] = []

    def rows(count: int):
        for number in range(count):
            made.append(number)
            yield encoded_row({"number": number, "text": "x" * 100})

    reply = {"choices": ({"index": i, "rows": rows(1000)} for i in range(2)), "none": iter(())}
    pieces = encoded(reply, before=b"data: ", after=b"\n\n")
    first = next(pieces)
    assert PIECE_BYTES <= len(first) < PIECE_BYTES + 200
    assert len(made) < PIECE_BYTES / 100
    *middle, last = pieces
    assert all(PIECE_BYTES <= len(piece) < PIECE_BYTES + 200 for piece in middle)
    text = b"".join([first, *middle, last])
    assert (text[:6], text[-2:]) == (b"data: ", b"\n\n")
    found = json.loads(text[6:])
    assert [choice["index"] for choice in found["choices"]] == [0, 1]
    for choice in found["choices"]:
        assert [row["number"] for row in choice["rows"]] == list(range(1000))
    assert found["none"] == []


@pytest.mark.parametrize("depth", [1, 10, 300])
def test_deep_values_are_encoded(depth: int):
    value: Any = []
    for _ in range(depth):
        value = {"a": [value]}
    assert json.loads(b"".join(encoded(value))) == value


@pytest.mark.parametrize("size", [0, 1, 2, 3, 5000])
def test_arrays_become_base64_of_their_bytes(size: int):
    array = np.arange(2 * size, dtype="<f4").reshape(size, 2)
    text = json.loads(b"".join(encoded([array])))[0]
    assert base64.b64decode(text, validate=True) == array.tobytes()


def test_numbers_that_json_does_not_have_become_null():
    assert b"".join(encoded({"a": math.nan, "b": [math.inf]})) == b'{"a":null,"b":[null]}'
