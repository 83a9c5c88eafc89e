"""Reads a journal: the ledger, groups and streamed tokens. The run may be alive.

Promise: read_journal() returns one consistent state, the last that was committed, or one
JournalError sentence. A transaction that a crash cut short was never acknowledged, and is absent.
"""

import sqlite3
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from millrace.core.completions import StreamedTokens
from millrace.core.errors import JournalError
from millrace.core.records import Group, Task
from millrace.journal import database
from millrace.journal.database import checksum, decode_completion, decode_group
from millrace.journal.ledger import TRAINED, UNKNOWN, Ledger, LedgerStep, Observation

# SQLite stores any type in any column, so damage also shows as a value that does not fit.
DAMAGED_VALUES = (ValueError, TypeError, KeyError, OverflowError)
IS_OPEN = "status IN ('running', 'waiting', 'training')"  # as in the index open_tasks


@dataclass(kw_only=True, slots=True)
class JournalHistory:
    """What a journal contains when a run resumes."""

    ledger: Ledger
    position: int = 0  # of the last change
    has_partials: frozenset[int] = frozenset()  # running tasks with streamed tokens
    is_new: bool = True  # the ledger comes from a checkpoint alone, and replaces the database
    proven_steps: tuple[int, ...] = ()  # applied by the checkpoint, not yet in the database
    # Closed tasks by status and reason, if listed.
    closed: dict[str, list[int]] = field(default_factory=dict[str, list[int]])

    @property
    def pending(self) -> dict[str, list[int]]:
        names = ("training", "waiting", "running")
        return {name: sorted(getattr(self.ledger, name)) for name in names}

    def check(self) -> list[str]:
        """A sentence for each way in which the ledger and the listed tasks do not add up."""
        listed = {number for numbers in self.closed.values() for number in numbers}
        missing = {*range(self.ledger.next_number)} - self.ledger.open - listed
        return self.ledger.check() + [f"Task {number} has no status." for number in sorted(missing)]

    def status(self, number: int) -> str:
        statuses = {**self.closed, **self.pending}.items()
        return next((name for name, numbers in statuses if number in numbers), "not issued")


def read_journal(
    folder: Path, *, verify: bool = False, list_closed: bool = False
) -> JournalHistory | None:
    """Returns None if there is no journal, or a crash came before its first commit. `verify`: check
    the structure of the whole file first. `list_closed`: also list the closed tasks, one by one."""
    with reading(folder) as db:
        if db is None:
            return None
        if verify:
            (found,) = db.execute("PRAGMA quick_check(1)").fetchone()
            if found != "ok":
                raise database.damaged(folder, found)
        meta = dict(db.execute("SELECT key, value FROM meta"))
        if meta.get("format_version") != database.FORMAT_VERSION:
            raise JournalError(
                f"The journal in {str(folder)!r} has format {meta.get('format_version')}, and this"
                f" version of Millrace reads format {database.FORMAT_VERSION}; resume with its"
                " version."
            )
        partials = db.execute("SELECT DISTINCT number FROM partials")
        history = JournalHistory(
            ledger=_read_ledger(db, covered_version=meta["covered_version"]),
            position=meta["position"],
            is_new=False,
            has_partials=frozenset(number for (number,) in partials),
        )
        listed = f"SELECT number, status, reason FROM tasks WHERE NOT {IS_OPEN} ORDER BY number"
        for number, status, reason in db.execute(listed) if list_closed else ():
            history.closed.setdefault(_total_key(status, reason), []).append(number)
        missing = history.ledger.retained - {n for (n,) in db.execute("SELECT number FROM groups")}
        if missing:
            raise database.damaged(folder, f"the group of task {min(missing)} is missing")
        return history


def read_groups(folder: Path, numbers: Sequence[int], *, tasks: Sequence[Task]) -> list[Group]:
    sql = "SELECT payload, checksum FROM groups WHERE number = ?"
    groups: list[Group] = []
    with reading(folder) as db:
        for number, task in zip(numbers, tasks, strict=True):
            what = f"the group of task {number}"
            row = None if db is None else db.execute(sql, (number,)).fetchone()
            if row is None:
                raise database.damaged(folder, f"{what} is missing")
            payload, check = row
            groups.append(decode_group(_checked(payload, check, folder, what), task=task))
    return groups


def read_tokens(folder: Path, number: int) -> list[StreamedTokens]:
    """The streamed tokens of a running task, in the order of sampling."""
    names, found = ("request", "digest", "member", "start"), list[StreamedTokens]()
    columns = ", ".join((*names, "payload", "checksum"))
    sql = f"SELECT {columns} FROM partials WHERE number = ? ORDER BY id"
    with reading(folder) as db:
        for *values, payload, check in () if db is None else db.execute(sql, (number,)):
            part = decode_completion(_checked(payload, check, folder, f"task {number}"))
            found.append(StreamedTokens(**dict(zip(names, values, strict=True)), part=part))
    return found


@contextmanager
def reading(folder: Path) -> Iterator[sqlite3.Connection | None]:
    """A snapshot of the database; None where there is none."""
    database.refuse_old_format(folder)
    if not (folder / database.NAME).is_file() or not (folder / database.NAME).stat().st_size:
        yield None
        return
    try:
        with closing(database.open_reader(folder)) as db:
            # It has no rows where a crash came before the first commit of a journal.
            has_rows = database.has_tables(db) and db.execute("SELECT 1 FROM meta").fetchone()
            yield db if has_rows else None
    except (sqlite3.Error, *DAMAGED_VALUES) as error:
        raise database.damaged(folder, error) from None


def _read_ledger(db: sqlite3.Connection, *, covered_version: int) -> Ledger:
    ledger = Ledger(covered_version=covered_version)
    for version, status in db.execute("SELECT version, status FROM steps ORDER BY version"):
        sql = "SELECT number, replayed FROM step_groups WHERE version = ? ORDER BY place"
        rows = db.execute(sql, (version,)).fetchall()
        fresh = tuple(number for number, is_replayed in rows if not is_replayed)
        replayed = tuple(number for number, is_replayed in rows if is_replayed)
        step = LedgerStep(version=version, fresh=fresh, replayed=replayed, status=status)
        ledger.steps[version] = step
    opened = f"SELECT number, status, tries FROM tasks WHERE {IS_OPEN} ORDER BY admitted"
    for number, status, tries in db.execute(opened):
        ledger.open.add(number)
        if status == "waiting":
            ledger.waiting[number] = None
        if tries:
            ledger.tries[number] = tries
    needed = f"({IS_OPEN} OR number IN (SELECT number FROM step_groups))"
    sql = f"SELECT number, draw FROM tasks WHERE draw IS NOT NULL AND {needed}"
    ledger.draws = dict(db.execute(sql).fetchall())
    sql = f"SELECT status, reason, count(*) FROM tasks WHERE NOT {IS_OPEN} GROUP BY 1, 2"
    ledger.totals = Counter({_total_key(*key): count for *key, count in db.execute(sql)})
    (ledger.next_number,) = db.execute("SELECT ifnull(max(number), -1) + 1 FROM tasks").fetchone()
    sql = "SELECT position, number, draw, solve_rate FROM observations ORDER BY position"
    ledger.observations = [Observation(*row) for row in db.execute(sql)]
    return ledger


def _total_key(status: str, reason: str | None) -> str:
    return status if status in (TRAINED, UNKNOWN) else f"{status}: {reason}"


def _checked(payload: bytes, check: bytes, folder: Path, what: str) -> bytes:
    if checksum(payload) != check:
        raise database.damaged(folder, f"the checksum of {what} does not match")
    return payload
