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
class WeightUpdate:
    version: int
    tensors: tuple[TensorSpec, ...]
    num_bytes: int
    checksum: int  # xxh3_64 of the whole payload
    transport: str  # which transport carries it: "shm"
    location: str  # where, in that transport's own words
