"""Errors that a user may see, and suggestions for misspelled names.

Each message is one sentence: what happened, which value, what to do.
"""

import contextlib
import difflib
from collections.abc import Generator, Iterable, Mapping
from typing import Any, cast


class MillraceError(Exception):
    """Anything Millrace raises on purpose; the command line prints it without a traceback."""


class ConfigError(MillraceError):
    """A setting or an input file is wrong; known before any worker starts."""


class TaskError(MillraceError):
    """One task cannot be played; only its group fails."""


class ScoreError(MillraceError):
    """A scorer raised, hung, or returned something that is not a score; only its group fails."""


class TransientScoreError(ScoreError):
    """A scorer could not answer; a retry may succeed."""

    def __init__(
        self, message: str, *, is_down: bool = False, retry_after_s: float | None = None
    ) -> None:
        """`is_down`: the service as a whole does not answer. `retry_after_s`: as it asks for."""
        super().__init__(message)
        self.is_down = is_down
        self.retry_after_s = retry_after_s


class Filtered(Exception):
    """A filter dropped a scored group. This is not an error: another group takes its place."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class WeightError(MillraceError):
    """A weight update is incomplete, corrupt, or does not fit the model; it was not applied."""


class CheckpointError(MillraceError):
    """A checkpoint could not be written or read; earlier checkpoints are untouched."""


class JournalError(MillraceError):
    """The journal could not be written or read; acknowledged changes are untouched."""


class WorkerError(MillraceError):
    """A worker process failed or died.

    `traceback` is the worker's own, or the end of its log. `was_killed`: a signal ended it, so a
    restart may help.
    """

    def __init__(
        self, message: str, *, worker: str, traceback: str = "", was_killed: bool = False
    ) -> None:
        super().__init__(message)
        self.worker = worker
        self.traceback = traceback
        self.was_killed = was_killed


class EngineLost(MillraceError):
    """An engine died or stopped answering; another engine can resume its requests."""


class EnginesDown(MillraceError):
    """No engine serves now; a later request may find one."""


class RunFailed(MillraceError):
    """The run stopped for a reason that a retry would not fix."""


class RestartLimitExceeded(RunFailed):
    """A worker failed more often than supervision.max_restarts allows; `traceback` is the last."""

    def __init__(self, message: str, *, worker: str, traceback: str = "") -> None:
        super().__init__(message)
        self.worker = worker
        self.traceback = traceback


@contextlib.contextmanager
def first_cause() -> Generator[None]:
    """Raise a single error, one of ours if possible, in place of a group."""
    try:
        yield
    except BaseExceptionGroup as group:
        # A dead worker fails everything that waits for it; a RunFailed is the reason itself.
        cause: BaseException = group.subgroup(RunFailed) or group.subgroup(MillraceError) or group
        while isinstance(cause, BaseExceptionGroup):
            cause = cast(BaseExceptionGroup[BaseException], cause).exceptions[0]
        raise cause from None


@contextlib.contextmanager
def user_code(what: str) -> Generator[None]:
    """Turn what user code raises into a ScoreError; `what` names the code."""
    try:
        yield
    except ScoreError:
        raise
    except Exception as error:
        raise ScoreError(f"{what} raised {type(error).__name__}: {error}; fix it.") from error


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


def describe_setting_error(detail: Mapping[str, Any], *, where: str) -> str:
    """Explain one of ValidationError.errors(); `where` is the full name of the setting."""
    if detail["type"] == "missing":
        return f"Setting {where!r} is missing"
    message = detail["msg"].removeprefix("Value error, ")
    return f"Setting {where!r} = {detail['input']!r}: {message[0].lower()}{message[1:]}"


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
