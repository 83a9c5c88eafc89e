"""Of everything that failed together, the one error that says most to the user."""

import contextlib
from collections.abc import Generator, Iterator
from typing import Any, cast

from millrace.core.errors import MillraceError, RunFailed


@contextlib.contextmanager
def first_cause() -> Generator[None]:
    """Raise a single error of ours in place of a group."""
    try:
        yield
    except BaseExceptionGroup as group:
        causes = list(_leaves(group))
        ours = [cause for cause in causes if isinstance(cause, MillraceError)]
        # A dead worker fails everything that waits for it; a RunFailed is the reason itself.
        reason = next((c for c in ours if isinstance(c, RunFailed)), ours[0] if ours else causes[0])
        raise reason from None


def _leaves(group: BaseExceptionGroup[BaseException]) -> Iterator[BaseException]:
    for error in group.exceptions:
        if isinstance(error, BaseExceptionGroup):
            yield from _leaves(cast(Any, error))
        else:
            yield error
