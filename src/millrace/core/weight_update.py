"""One published version of the weights: what it holds and where its bytes lie.

Promise: a swap is all-or-nothing. The manifest says exactly what must arrive; whoever receives
checks names, shapes, dtypes and checksums before anything of it becomes visible.
"""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorSpec:
    name: str  # the parameter's name in the transformers model
    dtype: str  # torch name without the prefix: "float32", "bfloat16"
    shape: tuple[int, ...]
    offset: int  # bytes from the start of the payload


@dataclass(frozen=True, kw_only=True, slots=True)
class Delta:
    """The same version again, as the words in which its payload differs from another's."""

    # Checksum of the payload it differs from: a trainer that was started again makes versions of
    # its own, which need not be what engines hold under the same number.
    base: int
    num_changed: int  # words
    word_bytes: int  # 2 or 4
    num_bytes: int  # indices and words together
    location: str  # where, in the transport's own words


@dataclass(frozen=True, kw_only=True, slots=True)
class WeightUpdate:
    version: int
    tensors: tuple[TensorSpec, ...]
    num_bytes: int  # of the full payload
    checksum: int  # of the full payload, whichever way it was made: see weights/checksum.py
    transport: str  # which transport carries it: "shm", "disk", "collective" or "ipc"
    location: str  # where, in that transport's own words
    delta: Delta | None = None  # a shorter way for whoever holds its base
