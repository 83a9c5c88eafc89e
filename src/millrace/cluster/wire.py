"""Messages as frames: one msgpack header, then one raw frame per array, uncopied.

Promise: decode() returns a valid message or raises WireError, whatever bytes it gets. Nothing is
ever unpickled. An array in the header is a msgpack extension [frame index, dtype, shape]; the
k-th array owns frame k, so no bytes are shared, left over or out of range. Decoded arrays are
read-only: records are frozen, and large arrays are views of the socket's buffer.
"""

import functools
import math
import operator
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar, cast

import msgspec
import numpy as np

from millrace.cluster.messages import MESSAGES, Message
from millrace.core.errors import MillraceError

T = TypeVar("T")
Frame = bytes | memoryview

ARRAY_CODE = 1  # msgpack extension type of an array
# Sockets close a connection that announces a larger frame, before they allocate memory for it.
MAX_FRAME_BYTES = 2**30
MAX_DIMENSIONS = 8
# Little-endian on the wire. No objects, no strings, no structured types: plain numbers only.
DTYPES = {
    name: np.dtype(name)
    for name in ["|b1", "|i1", "|u1", "<i2", "<u2", "<i4", "<u4", "<i8", "<u8", "<f2", "<f4", "<f8"]
}
_ARRAY_HEADER = tuple[int, str, tuple[int, ...]]


class WireError(MillraceError):
    """A message cannot be encoded, or received bytes are not a message."""


def encode(message: Any) -> list[Frame]:
    """Frames of a message or a record. Its arrays must not change until the frames are sent."""
    arrays: list[Frame] = []
    try:
        header = msgspec.msgpack.Encoder(enc_hook=_array_collector(arrays)).encode(message)
    except (TypeError, OverflowError, RecursionError, UnicodeEncodeError) as error:
        raise WireError(
            f"A {type(message).__name__} holds a value that cannot travel between"
            f" processes: {error}; use plain numbers, strings, lists, dicts and numpy arrays."
        ) from None
    frames: list[Frame] = [header, *arrays]
    if (size := max(memoryview(frame).nbytes for frame in frames)) > MAX_FRAME_BYTES:
        raise WireError(
            f"A {type(message).__name__} has a part of {size} bytes, and processes exchange at most"
            f" {MAX_FRAME_BYTES} at once; use smaller batches or shorter sequences."
        )
    return frames


class Decoder(Generic[T]):
    """Decodes messages, or records of one type, in one thread. Keep it: making one takes longer."""

    def __init__(self, of: type[T]) -> None:
        self._arrays: Sequence[Frame] = ()
        self._next = 0
        self._decoder = msgspec.msgpack.Decoder(of, ext_hook=self._extension, dec_hook=expect_array)

    def decode(self, frames: Sequence[Frame]) -> T:
        if not frames:
            raise WireError("A message has no frames.")
        header, *self._arrays = frames
        self._next = 0
        try:
            message = self._decoder.decode(header)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise WireError(f"Received bytes are not a message: {error}.") from None
        finally:
            arrays, self._arrays = self._arrays, ()
        if self._next != len(arrays):
            raise WireError(f"A message refers to {self._next} arrays but has {len(arrays)}.")
        return message

    def _extension(self, code: int, data: memoryview) -> np.ndarray:
        if code != ARRAY_CODE:
            raise WireError(f"Extension type {code} is unknown.")
        index, dtype, shape = msgspec.msgpack.decode(data, type=_ARRAY_HEADER)
        if index != self._next or index >= len(self._arrays):
            raise WireError(f"An array refers to frame {index}, which belongs to another.")
        self._next += 1
        return _view(self._arrays[index], dtype=dtype, shape=shape)


def message_decoder() -> Decoder[Message]:
    return Decoder(cast(type[Message], functools.reduce(operator.or_, MESSAGES)))


def decode(frames: Sequence[Frame]) -> Message:
    """Decode a single message; keep a decoder to receive many."""
    return message_decoder().decode(frames)


def _array_collector(arrays: list[Frame]) -> Callable[[Any], Any]:
    def move_out(value: Any) -> Any:
        if isinstance(value, np.generic) and value.dtype.kind in "biuf":
            return value.item()
        if not isinstance(value, np.ndarray):
            raise TypeError(f"{type(value).__module__}.{type(value).__qualname__}")
        dtype = value.dtype.newbyteorder("<")
        if dtype.str not in DTYPES:
            raise TypeError(f"a numpy array of {value.dtype}")
        if value.ndim > MAX_DIMENSIONS:
            raise TypeError(f"a numpy array of {value.ndim} dimensions")
        header = msgspec.msgpack.encode((len(arrays), dtype.str, value.shape))
        # As bytes: a memoryview of a zero-size or float16 array cannot be cast.
        flat = np.ascontiguousarray(value, dtype=dtype).reshape(-1).view(np.uint8)
        arrays.append(flat.data)
        return msgspec.msgpack.Ext(ARRAY_CODE, header)

    return move_out


def expect_array(expected: type, value: Any) -> np.ndarray:
    """Check a field of the only type that msgspec does not know by itself."""
    if expected is not np.ndarray or not isinstance(value, np.ndarray):
        raise ValueError(f"expected {expected.__name__}, got {type(value).__name__}")
    return value


def _view(frame: Frame, *, dtype: str, shape: tuple[int, ...]) -> np.ndarray:
    if dtype not in DTYPES:
        raise WireError(f"Arrays of {dtype!r} are not supported.")
    if len(shape) > MAX_DIMENSIONS or any(size < 0 for size in shape):
        raise WireError(f"{shape} is not the shape of an array.")
    num_bytes = memoryview(frame).nbytes
    if math.prod(shape) * DTYPES[dtype].itemsize != num_bytes:
        raise WireError(f"An array of shape {shape} and type {dtype} cannot be {num_bytes} bytes.")
    try:
        array = np.frombuffer(frame, dtype=DTYPES[dtype]).reshape(shape)
    except ValueError as error:  # an empty array with a dimension beyond what numpy can address
        raise WireError(f"{shape} is not the shape of an array: {error}.") from None
    if not array.flags.aligned:
        array = array.copy()
    array.flags.writeable = False
    return array
