"""Errors that a user may see, suggestions for misspelled names, and text for a terminal.

Each message is one sentence: what happened, which value, what to do. It may quote a completion or a
service, so whoever prints it to a terminal or a log calls printable().
"""

import asyncio
import contextlib
import difflib
import re
import textwrap
import traceback
import unicodedata
from collections import Counter
from collections.abc import Coroutine, Generator, Iterable, Mapping
from typing import Any, TypeVar, cast

CONTROLS = ("Cc", "Cf", "Cs", "Zl", "Zp")  # Unicode categories: controls, formats, separators
MIN_SIMILARITY = 0.66  # one of three letters may differ
T = TypeVar("T")


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
    """A worker process failed or died. `traceback` is the worker's own, or the end of its log.
    `was_killed`: a signal ended it, so a restart may help."""

    def __init__(
        self, message: str, *, worker: str, traceback: str = "", was_killed: bool = False
    ) -> None:
        super().__init__(message)
        self.worker = worker
        self.traceback = traceback
        self.was_killed = was_killed


class ReplayError(MillraceError):
    """An environment does something other than what is recorded."""


class EngineLost(MillraceError):
    """An engine died or stopped answering; another engine can resume its requests."""


class EnginesDown(MillraceError):
    """No engine serves now; a later request may find one."""


class OutOfMemory(MillraceError):
    """A microbatch did not fit into the memory of a rank, while other ranks wait for it."""

    @property
    def num_tokens(self) -> int | None:
        """Tokens of that microbatch as the sentence says: an error reaches the controller as text.
        None if it says nothing of them."""
        found = re.search(r"microbatch of (\d+) tokens", str(self))
        return None if found is None else int(found[1])


class RankUnreachable(MillraceError):
    """A rank of the trainer lost its connection to another one, in a collective."""


class Terminated(KeyboardInterrupt):
    """SIGTERM stopped the command, after it had cleaned up."""


class RunFailed(MillraceError):
    """The run stopped for a reason that a retry would not fix."""


class Preempted(MillraceError):
    """SIGTERM or its user stopped the run, which can resume."""


class RestartLimitExceeded(RunFailed):
    """A worker failed more often than supervision.max_restarts allows; `traceback` is the last."""

    def __init__(self, message: str, *, worker: str, traceback: str = "") -> None:
        super().__init__(message)
        self.worker = worker
        self.traceback = traceback


@contextlib.contextmanager
def first_cause() -> Generator[None]:
    """Raise a single error in place of an exception group, a MillraceError if it has one."""
    try:
        yield
    except BaseExceptionGroup as group:
        # A dead worker fails everything that waits for it; a RunFailed is the reason itself.
        cause: BaseException = group.subgroup(RunFailed) or group.subgroup(MillraceError) or group
        while isinstance(cause, BaseExceptionGroup):
            cause = cast(BaseExceptionGroup[BaseException], cause).exceptions[0]
        raise cause from None


async def run_all(coroutines: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Run coroutines concurrently and return their results; if one raises, cancel the others."""
    with first_cause():
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(each) for each in coroutines]
    return [task.result() for task in tasks]


async def cancel_all(tasks: Iterable[asyncio.Future[T]]) -> list[T | BaseException]:
    """Cancel tasks and wait until they have ended; returns their results and errors."""
    tasks = list(tasks)
    for task in tasks:
        task.cancel()
    return await asyncio.gather(*tasks, return_exceptions=True)


@contextlib.contextmanager
def user_code(what: str) -> Generator[None]:
    """Turn what user code raises into a ScoreError, except for errors that Millrace raises on
    purpose; `what` names the code."""
    try:
        yield
    except MillraceError:
        raise
    except Exception as error:
        raise ScoreError(f"{what} raised {type(error).__name__}: {error}; fix it.") from error


def printable(text: str) -> str:
    """Escape characters that would control a terminal or reorder its text: a completion that an
    error quotes must not move the cursor. Line ends and tabs stay."""
    if text.isascii() and text.replace("\n", "").replace("\t", "").isprintable():
        return text
    return "".join(
        char if char in "\n\t" or unicodedata.category(char) not in CONTROLS else ascii(char)[1:-1]
        for char in text
    )


def failure_text(what: str, error: BaseException) -> str:
    """A line of what has failed, and an indented traceback, for a log. Both may quote a client, but
    no quoted text begins a line or controls a terminal."""
    lines = textwrap.indent("".join(traceback.format_exception(error)), "  ")
    return printable(what.replace("\n", "\\n") + "\n" + lines)


def shortened(text: str, max_length: int) -> str:
    return text if len(text) <= max_length else f"{text[: max_length - 3]}..."


def nearest(name: str, known: Iterable[str]) -> str | None:
    """Return the known name that was probably meant; None if none is similar."""
    best = max(known, key=lambda other: _similarity(name, other), default=None)
    return None if best is None or _similarity(name, best) < MIN_SIMILARITY else best


def _similarity(a: str, b: str) -> float:
    """Share of common letters, in order and in any order, so that a transposition counts little."""
    a, b = a.lower(), b.lower()
    in_order = difflib.SequenceMatcher(None, a, b).ratio()
    in_any_order = 2 * (Counter(a) & Counter(b)).total() / max(len(a) + len(b), 1)
    return (in_order + in_any_order) / 2


def suggestion(name: str, known: Iterable[str], *, otherwise: str = "valid here") -> str:
    """The end of an error about an unknown name: the nearest known name, or all of them."""
    names = list(known)
    if (found := nearest(name, names)) is not None:
        return f"did you mean {found!r}?"
    return f"{otherwise}: {', '.join(names) or 'none'}."


def describe_setting_error(detail: Mapping[str, Any], *, where: str) -> str:
    """Explain one of ValidationError.errors(); `where` is the full name of the setting."""
    if detail["type"] == "missing":
        return f"Setting {where!r} is missing"
    message = detail["msg"].removeprefix("Value error, ")
    return f"Setting {where!r} = {detail['input']!r}: {message[0].lower()}{message[1:]}"
