"""Suggestions for misspelled names. Torch-free."""

import difflib
from collections.abc import Iterable


def nearest(name: str, known: Iterable[str]) -> str | None:
    """Return the known name that was probably meant.

    This is the one with the fewest edits, at most one per three letters, or else one that shares
    most of its letters, such as "leave_one_out" for "leave_out".
    """
    limit = max(1, len(name) // 3)
    distances = {other: _distance(name.lower(), other.lower()) for other in known}
    best = min(distances, key=lambda other: distances[other], default=None)
    if best is not None and distances[best] <= limit:
        return best
    return next(iter(difflib.get_close_matches(name, distances, n=1, cutoff=0.75)), None)


def suggestion(name: str, known: Iterable[str], *, otherwise: str = "valid here") -> str:
    """The end of an error about an unknown name: the nearest known name, or all of them."""
    names = list(known)
    found = nearest(name, names)
    if found is not None:
        return f"did you mean {found!r}?"
    return f"{otherwise}: {', '.join(names) or 'none'}."


def _distance(a: str, b: str) -> int:
    """Edits from a to b; a transposition of neighbours counts as one, as most typos are one."""
    before: list[int] = []
    row = list(range(len(b) + 1))
    for i, left in enumerate(a, start=1):
        earlier, before = before, row
        row = [i]
        for j, right in enumerate(b, start=1):
            cost = min(before[j] + 1, row[j - 1] + 1, before[j - 1] + (left != right))
            if i > 1 and j > 1 and left == b[j - 2] and a[i - 2] == right:
                cost = min(cost, earlier[j - 2] + 1)
            row.append(cost)
    return row[-1]
