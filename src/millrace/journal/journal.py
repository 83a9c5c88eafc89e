"""The journal of a live run: changes are committed to a database, and read again to redo them.

Promise: admit_group(), append_tokens() and begin_step() return when their change is durable; all
others are committed in order with them. A task is trained at most once. The database is bounded by
the groups that wait and by the steps since the last checkpoints, plus one small row per task.
Called from the controller's event loop. Encoding and SQL run in the writer's thread; reading runs
in threads with connections of their own.
"""

import asyncio
import sqlite3
from collections.abc import Callable, Collection, Iterable, Sequence
from concurrent.futures import Future
from pathlib import Path

from millrace.config import JournalConfig
from millrace.core.completions import StreamedTokens
from millrace.core.errors import JournalError
from millrace.core.records import Group, Task
from millrace.journal import database
from millrace.journal.database import Connect, checksum, connect_file, encode_completion
from millrace.journal.ledger import TRAINED, UNKNOWN, Ledger, LedgerStep, Observation, Outcome
from millrace.journal.reading import JournalHistory, read_groups, read_tokens

TaskOf = Callable[[int, int | None], Task]  # of a number and its draw


class Journal:
    def __init__(
        self,
        folder: Path,
        *,
        history: JournalHistory,
        task_of: TaskOf,
        settings: JournalConfig,
        commit_interval_s: float = database.COMMIT_INTERVAL_S,
        connect: Connect = connect_file,
    ) -> None:
        """Continues after `history`, or replaces the database if that is new."""
        self.ledger = history.ledger
        self._folder = folder
        self._task_of = task_of
        self._max_bytes = settings.max_bytes
        self._has_partials = set(history.has_partials)
        self.position = history.position  # the number of changes so far
        try:
            db = database.open_writer(folder, connect=connect)
            position = db.execute("SELECT value FROM meta WHERE key = 'position'").fetchone()
            if not history.is_new and position != (history.position,):
                db.close()
                raise JournalError(
                    f"Another process has written to the journal in {str(folder)!r} since it was"
                    " read; start again."
                )
            self._writer = database.JournalWriter(
                db, folder=folder, commit_interval_s=commit_interval_s
            )
        except (sqlite3.Error, OSError) as error:
            raise database.write_failure(error, folder) from None
        self._last = self._append(_begin(history))

    @property
    def num_bytes(self) -> int:
        return self._writer.num_bytes

    @property
    def is_too_large(self) -> bool:
        """True if a checkpoint should be made so that the journal can shrink."""
        return self.num_bytes > self._max_bytes

    def issue_task(self, number: int, *, draw: int | None) -> None:
        """Record a new task; one that is tried again is on record."""
        if number >= self.ledger.next_number:
            self.ledger.issue(number, draw=draw)
            sql = "INSERT INTO tasks (number, status, draw) VALUES (?, 'running', ?)"
            self._execute(sql, (number, draw))

    def record_solve_rate(self, number: int, *, solve_rate: float, draw: int | None) -> None:
        """Record what a curriculum learned; without a draw there is no curriculum."""
        if draw is None:
            return
        row = (self.position + 1, number, draw, solve_rate)
        self.ledger.observations.append(Observation(*row))
        self._execute("INSERT INTO observations VALUES (?, ?, ?, ?)", row)

    async def append_tokens(
        self, number: int, *, tries: int, tokens: Sequence[StreamedTokens]
    ) -> None:
        """Record tokens of a running task; those of an attempt that was given up are ignored."""
        is_current = tries == self.ledger.tries.get(number, 0)
        if not is_current or number not in self.ledger.running:
            return
        self._has_partials.add(number)

        def insert(cursor: sqlite3.Cursor) -> None:
            for one in tokens:
                payload = encode_completion(one.part)
                row = (None, number, one.request, one.digest, one.member, one.start)
                row = (*row, len(one.part.tokens), payload, checksum(payload))
                cursor.execute("INSERT INTO partials VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)", row)

        await asyncio.wrap_future(self._append(insert))

    async def read_tokens(self, number: int) -> list[StreamedTokens]:
        """The recorded tokens of the current attempt at a running task."""
        if number not in self._has_partials:
            return []
        return await asyncio.to_thread(read_tokens, self._folder, number)

    async def admit_group(self, group: Group) -> None:
        """The group may be trained when this returns: a crash cannot lose it."""
        number = group.number
        self.ledger.admit(number)
        self._has_partials.discard(number)
        admitted = self.position + 1

        def insert(cursor: sqlite3.Cursor) -> None:
            payload = database.encode_group(group)
            row = (number, payload, checksum(payload))
            cursor.execute("INSERT OR REPLACE INTO groups VALUES (?, ?, ?)", row)
            cursor.execute("DELETE FROM partials WHERE number = ?", (number,))
            sql = "UPDATE tasks SET status = 'waiting', admitted = ? WHERE number = ?"
            cursor.execute(sql, (admitted, number))

        await asyncio.wrap_future(self._append(insert))

    def reopen_task(self, number: int) -> None:
        """The tokens of its attempt have become too stale; another attempt follows."""
        self.ledger.reopen(number)
        self._discard(number, "status = 'running', admitted = NULL, tries = tries + 1")

    def close_task(self, number: int, *, outcome: Outcome, reason: str) -> None:
        self.ledger.close(number, f"{outcome}: {reason}")
        self._discard(number, "status = ?, reason = ?", outcome, reason)

    async def begin_step(
        self, version: int, *, fresh: Iterable[int], replayed: Iterable[int] = ()
    ) -> None:
        """Once this returns, the step learns from these groups in this order, also when redone."""
        step = LedgerStep(version=version, fresh=tuple(fresh), replayed=tuple(replayed))
        self.ledger.begin_step(step)

        def insert(cursor: sqlite3.Cursor) -> None:
            _insert_step(cursor, step)
            rows = [(number,) for number in step.fresh]
            cursor.executemany("UPDATE tasks SET status = 'training' WHERE number = ?", rows)

        await asyncio.wrap_future(self._append(insert))

    def finish_step(self, version: int, *, was_skipped: bool) -> None:
        if self.ledger.finish_step(version, was_skipped=was_skipped):
            step = self.ledger.steps[version]
            self._append(lambda cursor: _finish_step(cursor, step))

    async def read_groups(self, numbers: Sequence[int]) -> list[Group]:
        if not numbers:
            return []
        tasks = [self._task_of(number, self.ledger.draws.get(number)) for number in numbers]
        return await asyncio.to_thread(read_groups, self._folder, numbers, tasks=tasks)

    async def flush(self) -> None:
        """Returns when all changes so far are durable."""
        await asyncio.wrap_future(self._last)

    async def discard_covered(
        self, version: int, *, position: int, keep: Collection[int] = ()
    ) -> None:
        """There is a good checkpoint of `version`, made when the journal was at `position`. Delete
        what only an older one would need; `keep`: groups that may be trained once more."""
        self.ledger.cover(version, position=position, keep=keep)
        kept = [step for v, step in self.ledger.steps.items() if v <= version]
        covered_version = self.ledger.covered_version

        def delete(cursor: sqlite3.Cursor) -> None:
            database.set_meta(cursor, "covered_version", covered_version)
            cursor.execute("DELETE FROM observations WHERE position <= ?", (position,))
            cursor.execute("DELETE FROM steps WHERE version <= ?", (version,))
            cursor.execute("DELETE FROM step_groups WHERE version <= ?", (version,))
            for step in kept:
                _insert_step(cursor, step)
            cursor.execute(
                "DELETE FROM groups WHERE number NOT IN (SELECT number FROM step_groups UNION ALL"
                " SELECT number FROM tasks WHERE status = 'waiting')"
            )

        await asyncio.wrap_future(self._append(delete))

    async def close(self) -> None:
        await self._writer.close()

    def _execute(self, sql: str, row: Sequence[object]) -> None:
        self._append(lambda cursor: cursor.execute(sql, row))

    def _discard(self, number: int, values: str, *row: object) -> None:
        """Change the status of a task whose group and tokens are not needed any more."""
        self._has_partials.discard(number)

        def change(cursor: sqlite3.Cursor) -> None:
            cursor.execute(f"UPDATE tasks SET {values} WHERE number = ?", (*row, number))
            cursor.execute("DELETE FROM groups WHERE number = ?", (number,))
            cursor.execute("DELETE FROM partials WHERE number = ?", (number,))

        self._append(change)

    def _append(self, change: database.Change) -> "Future[None]":
        self.position += 1
        self._last = self._writer.append(change, position=self.position)
        return self._last


class NoJournal:
    """Replaces the journal of a run that has none: records nothing, and has no past."""

    is_too_large = False
    position = None  # so that no checkpoint is paired with a journal

    def __init__(self) -> None:
        self.ledger = Ledger.begin()

    def _record(self, *_args: object, **_kwargs: object) -> None: ...

    issue_task = record_solve_rate = reopen_task = close_task = finish_step = _record

    async def _commit(self, *_args: object, **_kwargs: object) -> None: ...

    append_tokens = admit_group = begin_step = discard_covered = flush = close = _commit

    async def read_tokens(self, number: int) -> list[StreamedTokens]:
        return []

    async def read_groups(self, numbers: Sequence[int]) -> list[Group]:
        assert not numbers, "nothing was recorded"
        return []


def _begin(history: JournalHistory) -> database.Change:
    """What a checkpoint knows and the database does not."""
    ledger, version = history.ledger, history.ledger.covered_version
    # Collected now, because the ledger moves on before the writer's thread executes the change.
    proven = [ledger.steps[version] for version in history.proven_steps]
    tasks = [
        (number, "running" if number in ledger.open else UNKNOWN)
        for number in range(ledger.next_number if history.is_new else 0)
    ]

    def write(cursor: sqlite3.Cursor) -> None:
        if history.is_new:
            for table in database.TABLES:
                cursor.execute(f"DELETE FROM {table}")
            database.set_meta(cursor, "format_version", database.FORMAT_VERSION)
            database.set_meta(cursor, "covered_version", version)
            cursor.executemany("INSERT INTO tasks (number, status) VALUES (?, ?)", tasks)
        for step in proven:
            _finish_step(cursor, step)

    return write


def _insert_step(cursor: sqlite3.Cursor, step: LedgerStep) -> None:
    cursor.execute("INSERT INTO steps VALUES (?, ?)", (step.version, step.status))
    rows = (
        (step.version, place, number, number in step.replayed)
        for place, number in enumerate(step.numbers)
    )
    cursor.executemany("INSERT INTO step_groups VALUES (?, ?, ?, ?)", rows)


def _finish_step(cursor: sqlite3.Cursor, step: LedgerStep) -> None:
    cursor.execute("UPDATE steps SET status = ? WHERE version = ?", (step.status, step.version))
    rows = [(TRAINED, step.version, number) for number in step.fresh]
    cursor.executemany("UPDATE tasks SET status = ?, version = ? WHERE number = ?", rows)
