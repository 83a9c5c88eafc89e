"""The steps since a checkpoint, which a replacement of a dead trainer repeats. Torch-free.

Runs on the controller's event loop.
"""

import dataclasses
from collections.abc import AsyncIterator, Callable

import numpy as np

from millrace.core.errors import RunFailed
from millrace.core.microbatch import Batch

MAX_BYTES = 2**31
Batches = tuple[Batch, ...]


class StepsOnRecord:
    """Steps that the journal has recorded; the interface is that of StepsInMemory."""

    def __init__(
        self, redo: Callable[..., AsyncIterator[tuple[int, Batches]]], *, version: int
    ) -> None:
        """`redo`: reads the steps from `after` (excluded) `through` a version. `version`: the
        trainer's at the start."""
        self._redo = redo
        self._version = version

    def record(self, version: int, batches: Batches) -> None:
        self._version = version

    def saved(self, version: int) -> None:
        """Nothing to do: the journal is pruned elsewhere."""

    def after(self, version: int) -> AsyncIterator[tuple[int, Batches]]:
        return self._redo(after=version, through=self._version)


class StepsInMemory:
    """Steps since the last but one checkpoint, because the last may be unfinished or damaged.
    Bound: max_bytes of batches; the oldest are dropped first."""

    def __init__(self, *, version: int, max_bytes: int = MAX_BYTES) -> None:
        """`version`: the trainer's at the start."""
        self._max_bytes = max_bytes
        self._version = version
        self._steps: dict[int, Batches] = {}  # by version, oldest first
        self._num_bytes = 0
        self._saved = version  # of the newest checkpoint

    def record(self, version: int, batches: Batches) -> None:
        """Record the batches of the step that made this version."""
        self._version = version
        self._steps[version] = batches
        self._num_bytes += _size(batches)
        while self._num_bytes > self._max_bytes:
            self._drop(next(iter(self._steps)))

    def saved(self, version: int) -> None:
        """Record that a checkpoint of this version was written."""
        for earlier in [v for v in self._steps if v <= self._saved]:
            self._drop(earlier)
        self._saved = version

    async def after(self, version: int) -> AsyncIterator[tuple[int, Batches]]:
        """The steps after this version, in order."""
        for following in range(version + 1, self._version + 1):
            if following not in self._steps:
                raise RunFailed(
                    f"The trainer cannot be replaced: its last checkpoint is of step {version}, and"
                    f" step {following} is no longer in memory; resume the run with --resume, and"
                    " lower checkpoint.every_steps."
                )
            yield following, self._steps[following]

    def _drop(self, version: int) -> None:
        self._num_bytes -= _size(self._steps.pop(version))


def _size(value: object) -> int:
    """Bytes of all arrays in a value."""
    if isinstance(value, np.ndarray):
        return value.nbytes
    if isinstance(value, tuple):
        return sum(_size(part) for part in value)
    if dataclasses.is_dataclass(value):
        return sum(_size(getattr(value, field.name)) for field in dataclasses.fields(value))
    return 0
