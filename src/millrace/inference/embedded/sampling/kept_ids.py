"""The ids that each token of a sequence was drawn from, gathered while it grows.

What a round brings is one chunk, not one array per token: truncated sampling would otherwise cost
the host more time than the device.
"""

import numpy as np

from millrace.core.records import Kept


class KeptIds:
    def __init__(self, done: Kept | None = None) -> None:
        """`done`: of the tokens the sequence has already."""
        self._ids: list[np.ndarray] = []  # int32; chunks of whole rows
        self._sizes: list[np.ndarray] = []  # int64; of the rows in each chunk
        if done is not None:
            self.append(done.ids, sizes=np.diff(done.offsets))

    def append(self, ids: np.ndarray, *, sizes: np.ndarray) -> None:
        """Add the rows of the next tokens, one after another; `ids` is kept as it is."""
        self._ids.append(ids)
        self._sizes.append(sizes)

    def since(self, start: int) -> Kept:
        """The rows from token number `start` on."""
        sizes = np.concatenate([np.empty(0, dtype=np.int64), *self._sizes])[start:]
        offsets = np.concatenate([[0], sizes.cumsum()]).astype(np.int64)
        missing = num_ids = int(offsets[-1])
        tail: list[np.ndarray] = []  # chunks that have them, the last one first
        for chunk in reversed(self._ids):
            if missing <= 0:
                break
            tail.append(chunk)
            missing -= len(chunk)
        ids = np.concatenate([np.empty(0, dtype=np.int32), *reversed(tail)])
        return Kept(ids=ids[len(ids) - num_ids :], offsets=offsets)
