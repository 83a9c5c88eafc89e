"""The requests of the training API on disk, TRAIN_DIR/requests/journal.db (requests.sql), and the
audit log of what tenants do.

Promise: what is awaited here survives the death of the process and a loss of power. A request is
written before it has any effect, and its result before the client gets it. The body of a request is
kept until its effects are in a snapshot of its model.

Called from the server's event loop, apart from read(); a thread commits (journal/database.py).
"""

import asyncio
import contextlib
import fcntl
import json
import logging
import os
import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from millrace.core.errors import ConfigError, JournalError
from millrace.journal import database
from millrace.serving.api.errors import ApiError
from millrace.serving.tinker.states import iso_time

Result = bytes | dict[str, Any]  # protobuf, or JSON
# Owner and seq_id: the same request has the same key when it is sent again.
RequestKey = tuple[str, int]

_FOLDER = "requests"
_SCHEMA = Path(__file__).with_name("requests.sql")
_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class AcceptedRequest:
    id: str  # of its future
    operation: str
    owner: str  # the session, model or sampler whose client numbered it
    seq_id: int
    body: bytes | None  # None: it is never executed again
    result: Result | None = None  # None: not executed yet

    @property
    def key(self) -> RequestKey:
        return self.owner, self.seq_id


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class TenantRecord:
    """What the log holds of one tenant."""

    sessions: list[str]
    samplers: dict[str, Path | None]  # folders of their adapters; None = the base model
    requests: list[AcceptedRequest]  # in the order of acceptance


class RequestLog:
    def __init__(self, train_dir: Path) -> None:
        self._train_dir, self._folder = train_dir, train_dir / _FOLDER
        db = database.open_writer(self._folder, schema=_SCHEMA)
        # Without a pause: a pass waits for its commit.
        self._writer = database.JournalWriter(db, folder=self._folder, commit_interval_s=0.0)

    async def close(self) -> None:
        await self._writer.close()

    def read(self, tenant: str) -> TenantRecord:
        with contextlib.closing(database.open_reader(self._folder)) as db:
            sessions = db.execute("SELECT id FROM sessions WHERE tenant = ?", (tenant,))
            samplers = db.execute("SELECT id, folder FROM samplers WHERE tenant = ?", (tenant,))
            requests = db.execute(
                "SELECT id, operation, owner, seq_id, body, result FROM requests"
                " WHERE tenant = ? ORDER BY number",
                (tenant,),
            )
            return TenantRecord(
                sessions=[id for (id,) in sessions],
                samplers={id: self._train_dir / own if own else None for id, own in samplers},
                requests=[_request(*row) for row in requests],
            )

    def remove_unused(self, *folders: Path) -> None:
        """Remove what killed processes have left: folders in these that no model or sampler has."""
        with contextlib.closing(database.open_reader(self._folder)) as db:
            models = "SELECT id FROM requests WHERE operation = 'create_model'"
            used = {id for (id,) in db.execute(f"{models} UNION SELECT id FROM samplers")}
        for left in (path for folder in folders for path in folder.glob("*")):
            if left.name not in used:
                shutil.rmtree(left)

    async def add_session(self, tenant: str, id: str) -> None:
        await self._commit("INSERT OR IGNORE INTO sessions VALUES (?, ?)", (id, tenant))

    async def end_session(self, id: str, models: Sequence[str]) -> None:
        """Remove the session, its models, its samplers, and their requests."""
        owners = f"(?{', ?' * len(models)})"
        await self._commit(f"DELETE FROM requests WHERE owner IN {owners}", (id, *models))
        await self._commit("DELETE FROM samplers WHERE session = ?", (id,))
        await self._commit("DELETE FROM sessions WHERE id = ?", (id,))

    async def add_sampler(
        self, tenant: str, id: str, folder: Path | None, *, session: str | None
    ) -> None:
        within = None if folder is None else str(folder.relative_to(self._train_dir))
        sql = "INSERT OR REPLACE INTO samplers VALUES (?, ?, ?, ?)"
        await self._commit(sql, (id, tenant, session, within))

    async def remove_sampler(self, id: str) -> None:
        await self._commit("DELETE FROM samplers WHERE id = ?", (id,))

    async def accept(self, tenant: str, request: AcceptedRequest) -> None:
        values = request.operation, request.owner, request.seq_id, request.body
        await self._commit(
            "INSERT INTO requests (id, tenant, operation, owner, seq_id, body)"
            " VALUES (?, ?, ?, ?, ?, ?)",
            (request.id, tenant, *values),
        )

    async def finish(self, id: str, result: Result, *, keeps_body: bool) -> None:
        """`keeps_body`: it is executed again if the server dies before the next snapshot."""
        written = result if isinstance(result, bytes) else json.dumps(result)
        more = "" if keeps_body else ", body = NULL"
        await self._commit(f"UPDATE requests SET result = ?{more} WHERE id = ?", (written, id))

    async def cover(self, model: str, *, next_seq: int) -> None:
        """A snapshot has the effects of the requests before `next_seq`."""
        sql = "UPDATE requests SET body = NULL WHERE owner = ? AND seq_id < ?"
        await self._commit(sql, (model, next_seq))

    def forget(self, id: str) -> None:
        """Its result is no longer kept."""
        sql = "DELETE FROM requests WHERE id = ? AND body IS NULL"
        self._writer.append(lambda db: db.execute(sql, (id,)), position=0)

    async def _commit(self, sql: str, values: tuple[Any, ...]) -> None:
        try:
            written = self._writer.append(lambda db: db.execute(sql, values), position=0)
            await asyncio.wrap_future(written)
        except JournalError as error:
            _log.error("%s", error)
            raise ApiError(
                "The server cannot write to its disk; its operator has to make room there and to"
                " restart it.",
                status=503,
            ) from error


def _request(
    id: str, operation: str, owner: str, seq_id: int, body: bytes | None, result: Any
) -> AcceptedRequest:
    return AcceptedRequest(
        id=id,
        operation=operation,
        owner=owner,
        seq_id=seq_id,
        body=body,
        result=json.loads(result) if isinstance(result, str) else result,
    )


class AuditLog:
    """A line of JSON for each accepted request, only ever appended to; only its owner reads it. One
    process at a time has it open."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT
        self._file = os.fdopen(os.open(path, flags, 0o600), "a", buffering=1)
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self.close()
            raise ConfigError(
                f"--train-dir {path.parent} belongs to another server; stop it, or choose another."
            ) from None

    def close(self) -> None:
        self._file.close()

    def write(self, tenant: str, operation: str, *, about: str, tokens: int = 0) -> None:
        """`about`: the model, path, session or sampler."""
        line = {"time": iso_time(time.time()), "tenant": tenant, "operation": operation}
        self._file.write(json.dumps({**line, "about": about, "tokens": tokens}) + "\n")
