"""One published version of a policy's weights: its tensors and where their bytes are.

Promise: a swap is all or nothing. The manifest says exactly what must arrive; the receiver checks
names, shapes, dtypes and checksums before any of it becomes visible.
"""

from dataclasses import dataclass

from millrace.core.records import DEFAULT_POLICY


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorSpec:
    name: str  # the parameter's name in the transformers model
    dtype: str  # torch name without the prefix: "float32", "bfloat16"
    shape: tuple[int, ...]
    offset: int  # bytes from the start of the payload


@dataclass(frozen=True, kw_only=True, slots=True)
class Delta:
    """A version as the words in which its payload differs from a base payload."""

    # Checksum of the base payload. A version number would not do: a restarted trainer repeats
    # steps, and its weights may differ from what engines hold under the same number.
    base: int
    num_changed: int  # words
    word_bytes: int  # 2 or 4
    num_bytes: int  # indices and words together
    location: str  # in the transport's own format


@dataclass(frozen=True, kw_only=True, slots=True)
class WeightUpdate:
    version: int
    tensors: tuple[TensorSpec, ...]
    num_bytes: int  # of the full payload
    checksum: int  # of the full payload; see weights/checksum.py
    transport: str  # "shm", "disk", "collective" or "ipc"
    location: str  # of the payload, in the transport's own format
    delta: Delta | None = None  # the change from its base, for an engine that holds that
    policy: str = DEFAULT_POLICY  # that the version belongs to
