"""The trainer as the controller sees it: a process that takes batches. Torch-free.


Promise: while the trainer is being replaced, whoever asks it for something waits, and asks the new
one. Each update of the weights belongs to the trainer that published it: what became of it is the
business of no other.

Runs on the controller's event loop.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

from millrace.cluster.messages import (
    Lend,
    Lent,
    Message,
    Part,
    Release,
    SaveCheckpoint,
    Saved,
    Stepped,
    TrainStep,
)
from millrace.cluster.worker import Worker
from millrace.core.errors import CheckpointError, WorkerError
from millrace.core.microbatch import Batch
from millrace.core.weight_update import WeightUpdate
from millrace.training.past_steps import PastSteps

DEATH_NOTICE_S = 0.5  # a call may fail before its worker is known to be dead


class RemoteTrainer:
    def __init__(
        self,
        worker: Worker,
        *,
        past: PastSteps,
        step_timeout_s: float | None = None,
        save_timeout_s: float | None = None,
    ) -> None:
        self.past: PastSteps = past
        self.num_redone = 0  # steps that were done again, after a death
        self._step_timeout_s = step_timeout_s
        self._save_timeout_s = save_timeout_s
        self._worker: Worker | None = worker  # None while it is being replaced
        self._came = asyncio.Event()
        self._out: list[WeightUpdate] = []  # by the present trainer, not yet released

    async def step(self, batch: Batch, *more: Batch, version: int) -> Stepped:
        """An optimizer update for each batch; the weights become `version` and are published in the
        background."""
        step = TrainStep(batch=batch, version=version, more=more)
        reply = await self._call(step, timeout_s=self._step_timeout_s, is_pulsed=True)
        assert isinstance(reply, Stepped)
        assert reply.version == version
        self.past.note(version, (batch, *more))
        return reply

    async def save(
        self,
        directory: Path,
        *,
        run_state: dict[str, Any],
        is_last: bool,
        on_copied: Callable[[], None],
    ) -> Saved:
        """Returns when the checkpoint is on the disk; steps may go on after `on_copied`, unless it
        is the last. One that is lost with its trainer is written by the next if that stands where
        the copy was made; else that is a CheckpointError."""
        is_copied = False

        def hear(_: Part) -> None:
            nonlocal is_copied
            is_copied = True
            on_copied()

        def is_lost() -> None:
            if is_copied and not is_last:
                raise CheckpointError(f"The trainer died before {str(directory)!r} was written.")

        reply = await self._call(
            SaveCheckpoint(directory=str(directory), run_state=run_state),
            timeout_s=self._save_timeout_s,
            is_pulsed=True,
            on_part=hear,
            on_death=is_lost,
        )
        assert isinstance(reply, Saved)
        self.past.saved(reply.version)
        return reply

    def published(self, update: WeightUpdate) -> None:
        """The trainer has told of this update."""
        self._out.append(update)

    @contextlib.asynccontextmanager
    async def lent(self) -> AsyncIterator[WeightUpdate]:
        """The newest version, for somebody who comes late; it stays readable meanwhile."""
        update = await self.borrow()
        try:
            yield update
        finally:
            await self.release(update)

    async def borrow(self) -> WeightUpdate:
        """The newest version; it stays readable until it is released."""
        # Pulsed: while engines wait for it, nobody may have a step for a trainer that hangs.
        reply = await self._call(Lend(), timeout_s=self._step_timeout_s, is_pulsed=True)
        assert isinstance(reply, Lent)
        self._out.append(reply.update)
        return reply.update

    async def release(self, update: WeightUpdate) -> None:
        """Nobody reads it any more who was given this update."""
        worker = self._worker
        if worker is None or not any(update is other for other in self._out):
            return  # it died with its trainer
        self._out = [other for other in self._out if other is not update]
        try:
            await worker.call(Release(version=update.version))
        except WorkerError:
            if not await _dies(worker):
                raise

    async def is_lost(self, update: WeightUpdate) -> bool:
        """True if the trainer that published it is dead."""
        if self._worker is None or not any(update is other for other in self._out):
            return True
        return await _dies(self._worker)

    def lose(self) -> None:
        """The trainer is dead; calls wait for the next."""
        self._worker = None
        self._out.clear()

    async def replace(self, worker: Worker, *, version: int) -> WeightUpdate:
        """Let this one, which has loaded `version`, do the steps since then again, and take over
        where the dead one stood. Engines hear of none of these: they may hold their weights.
        Returns the newest version, as borrow() does."""
        async for following, (batch, *more) in self.past.after(version):
            step = TrainStep(batch=batch, version=following, more=tuple(more), publish=False)
            await worker.call(step, timeout_s=self._step_timeout_s, is_deadline=True)
            self.num_redone += 1
        reply = await worker.call(Lend(), timeout_s=self._step_timeout_s, is_deadline=True)
        assert isinstance(reply, Lent)
        self._out.append(reply.update)
        self._worker = worker
        self._came.set()
        return reply.update

    async def _call(
        self,
        message: Message,
        *,
        timeout_s: float | None = None,
        is_pulsed: bool = False,
        on_part: Callable[[Part], None] | None = None,
        on_death: Callable[[], None] = lambda: None,
    ) -> Message:
        """`on_death` may raise; else the next trainer is asked."""
        while True:
            while (worker := self._worker) is None:
                self._came.clear()
                await self._came.wait()
            try:
                return await worker.call(
                    message,
                    timeout_s=timeout_s,
                    is_deadline=True,
                    is_pulsed=is_pulsed,
                    on_part=on_part,
                )
            except WorkerError:
                if not await _dies(worker):
                    raise
                if self._worker is worker:
                    self.lose()
                on_death()


async def _dies(worker: Worker) -> bool:
    """True if it is dead, or is known to be in a moment."""
    await asyncio.wait({worker.dead}, timeout=DEATH_NOTICE_S)
    return worker.dead.done()
