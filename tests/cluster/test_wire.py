import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from millrace.cluster import wire
from millrace.cluster.messages import (
    Done,
    Generate,
    GenerateDone,
    Message,
    ScoreGroup,
    TrainStep,
    WorkerProgress,
)
from millrace.cluster.wire import WireError, decode, encode
from millrace.core.microbatch import Batch, Microbatch
from millrace.core.records import Completion, Kept, Request, Sampling
from millrace.core.spans import Span

arrays = hnp.arrays(
    dtype=st.sampled_from(sorted(wire.DTYPES)).map(np.dtype),
    shape=hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=4),
)
kept = st.builds(Kept, ids=arrays, offsets=arrays)
completions = st.builds(
    Completion,
    tokens=arrays,
    logprobs=arrays,
    versions=arrays,
    kept=st.none() | kept,
    routes=st.none() | arrays,
    finish=st.sampled_from(["stop", "length", "abort", "interrupt", "expire"]),
    text=st.text(),
)
requests = st.builds(
    Request,
    id=st.text(),
    prompt=arrays,
    sampling=st.builds(Sampling, stop=st.tuples(st.text())),
    partial=st.none() | completions,
)
OPTIONAL = ("kept", "routes", "reference_logprobs", "proximal_logprobs", "groups")
microbatches = st.builds(
    Microbatch,
    **{name: arrays for name in Microbatch.__dataclass_fields__ if name not in OPTIONAL},
    kept=st.none() | kept,
    routes=st.none() | arrays,
    reference_logprobs=st.none() | arrays,
)
batches = st.builds(
    Batch,
    microbatches=st.lists(microbatches, max_size=2).map(tuple),
    num_sequences=st.integers(0, 9),
    num_trained_tokens=st.integers(0, 9),
)
anything = st.none() | st.booleans() | st.floats(allow_nan=False) | st.text() | st.binary() | arrays
messages = st.one_of(
    st.builds(Done),
    st.builds(Generate, request=requests),
    st.builds(
        GenerateDone, completions=st.dictionaries(st.integers(0, 9), completions, max_size=3)
    ),
    st.builds(TrainStep, batch=batches, version=st.integers(0, 2**31)),
    st.builds(
        WorkerProgress,
        spans=st.lists(st.builds(Span), max_size=2),
        counters=st.dictionaries(st.text(), st.floats(allow_nan=False)),
    ),
    st.builds(
        ScoreGroup,
        function=st.text(),
        prompts=st.lists(st.text(), max_size=2),
        completions=st.just([]),
        completion_ids=st.just([[1, 2], []]),
        columns=st.dictionaries(st.text(), st.lists(anything, max_size=3), max_size=2),
    ),
)


def as_bytes(frames: list[wire.Frame]) -> list[bytes]:
    return [bytes(frame) for frame in frames]


@settings(deadline=None)
@given(messages)
def test_a_message_survives_the_wire(message: Message):
    frames = as_bytes(encode(message))
    decoded = decode(frames)
    assert type(decoded) is type(message)
    assert as_bytes(encode(decoded)) == frames


def completion(**fields: object) -> Completion:
    empty = np.zeros(0, dtype=np.int32)
    return Completion(
        **{"tokens": empty, "logprobs": empty, "versions": empty, "finish": "stop", "text": ""}
        | fields
    )


def sent(array: np.ndarray) -> np.ndarray:
    message = decode(encode(GenerateDone(completions={0: completion(tokens=array)})))
    assert isinstance(message, GenerateDone)
    return message.completions[0].tokens


@pytest.mark.parametrize(
    "array",
    [
        np.array(3.5, dtype=np.float16),
        np.zeros((0, 4), dtype=np.uint16),
        np.arange(12, dtype=np.int64).reshape(3, 4).T,
        np.arange(6, dtype=np.int32)[::-2],
        np.array([True, False]),
        np.arange(4, dtype=">i4"),
    ],
    ids=["scalar", "empty", "transposed", "strided", "bool", "big-endian"],
)
def test_arrays_keep_their_values_shape_and_kind(array: np.ndarray):
    received = sent(array)
    np.testing.assert_array_equal(received, array)
    assert received.shape == array.shape
    assert received.dtype == array.dtype.newbyteorder("<")
    assert not received.flags.writeable


def test_array_bytes_are_not_copied():
    array = np.arange(1000, dtype=np.int32)
    frames = encode(GenerateDone(completions={0: completion(tokens=array)}))
    assert any(np.shares_memory(np.frombuffer(frame, np.uint8), array) for frame in frames[1:])
    message = decode(frames)
    assert isinstance(message, GenerateDone)
    assert np.shares_memory(message.completions[0].tokens, array)


def test_an_unaligned_frame_is_copied_to_an_aligned_array():
    header, *frames = as_bytes(
        encode(GenerateDone(completions={0: completion(tokens=np.arange(4))}))
    )
    shifted = [memoryview(b"x" + frame)[1:] for frame in frames]
    message = decode([header, *shifted])
    assert isinstance(message, GenerateDone)
    tokens = message.completions[0].tokens
    assert tokens.flags.aligned
    np.testing.assert_array_equal(tokens, np.arange(4))


@pytest.mark.parametrize(
    "value",
    [object(), np.array([object()]), np.array(["text"]), 2**70, np.zeros((1,) * 9), "a\ud83d"],
    ids=["object", "object array", "string array", "huge int", "many dimensions", "half a pair"],
)
def test_values_that_cannot_be_encoded_are_refused_by_the_sender(value: object):
    message = ScoreGroup(
        function="f", prompts=[], completions=[], completion_ids=[], columns={"answer": [value]}
    )
    with pytest.raises(WireError, match="ScoreGroup holds a value that cannot travel"):
        encode(message)


def test_a_part_that_no_socket_accepts_is_refused_by_the_sender():
    array = np.zeros(2**30 + 1, dtype=np.int8)  # takes no memory: it is never touched
    with pytest.raises(WireError, match=r"GenerateDone has a part of 1073741825 bytes, and"):
        encode(GenerateDone(completions={0: completion(tokens=array)}))


def with_array_header(header: object, *frames: bytes) -> list[bytes]:
    """A Generated message whose tokens claim to be `header`; its other arrays are sound."""
    empty = msgspec.msgpack.encode((1, "<i4", [0])), msgspec.msgpack.encode((2, "<i4", [0]))
    extension = [
        msgspec.msgpack.Ext(wire.ARRAY_CODE, data)
        for data in (msgspec.msgpack.encode(header), *empty)
    ]
    fields = dict(zip(("tokens", "logprobs", "versions"), extension, strict=True))
    raw = {"type": "GenerateDone", "completions": {0: {**fields, "finish": "stop", "text": ""}}}
    return [msgspec.msgpack.encode(raw), *frames, b"", b""]


def test_handmade_message_is_valid():
    assert isinstance(decode(with_array_header((0, "<i4", [2]), bytes(8))), GenerateDone)


@pytest.mark.parametrize(
    ("header", "frame"),
    [
        ((0, "|O", [1]), bytes(8)),
        ((0, "<U2", [1]), bytes(8)),
        ((0, "<M8[s]", [1]), bytes(8)),
        ((0, "<i4", [3]), bytes(8)),
        ((0, "<i4", [-1, -2]), bytes(8)),
        ((0, "<i4", [0, 2**62]), b""),
        ((0, "<i4", [1] * 40), bytes(4)),
        ((1, "<i4", [2]), bytes(8)),
        ((-1, "<i4", [2]), bytes(8)),
        ((2**40, "<i4", [2]), bytes(8)),
        (("0", "<i4", [2]), bytes(8)),
        ([0, "<i4"], bytes(8)),
    ],
)
def test_an_array_that_is_not_what_it_claims_is_refused(header: object, frame: bytes):
    with pytest.raises(WireError):
        decode(with_array_header(header, frame))


def test_frame_without_an_array_is_refused():
    with pytest.raises(WireError, match="refers to 0 arrays but has 1"):
        decode([*as_bytes(encode(Done())), b"stowaway"])


def test_unknown_messages_and_fields_are_refused():
    for raw in ({"type": "Explode"}, {"type": "Done", "extra": 1}, {}, [], 7):
        with pytest.raises(WireError):
            decode([msgspec.msgpack.encode(raw)])


def test_depth_is_refused_rather_than_overflowing_the_stack():
    with pytest.raises(WireError):
        decode([b"\x91" * 100_000])
