"""A curve over a run of any length, in bounded memory: the longer it is, the coarser."""


class Thinned:
    """Values in order. When there are more than `most`, neighbours are joined to their mean; the
    first and the last stay as they are."""

    def __init__(self, *, most: int = 2048) -> None:
        self._most = most
        self._first: float | None = None
        self._means: list[float] = []  # of `_each` values, behind the first
        self._each = 1
        self._open: list[float] = []  # behind these, and too few for a mean

    def add(self, value: float) -> None:
        if self._first is None:
            self._first = value
            return
        self._open.append(value)
        if len(self._open) > self._each:  # the last one stays as it is
            self._means.append(sum(self._open[:-1]) / self._each)
            del self._open[:-1]
        if len(self._means) == self._most:
            self._thin()

    @property
    def values(self) -> tuple[float, ...]:
        if self._first is None:
            return ()
        return (self._first, *self._means, *self._open[-1:])

    def _thin(self) -> None:
        pairs = zip(self._means[::2], self._means[1::2], strict=True)
        self._means = [(one + other) / 2 for one, other in pairs]
        self._each *= 2
