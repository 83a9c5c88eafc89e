"""The trainer as the controller sees it: a process that takes batches. Torch-free."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from millrace.cluster.hub import Worker
from millrace.cluster.messages import Release, SaveCheckpoint, Saved, Step, Stepped
from millrace.core.microbatch import Batch


class RemoteTrainer:
    def __init__(self, worker: Worker) -> None:
        self._worker = worker

    async def step(self, batch: Batch, *more: Batch, version: int) -> Stepped:
        """An optimizer update for each batch; the weights become `version` and are published in the
        background."""
        reply = await self._worker.call(Step(batch=batch, version=version, more=more))
        assert isinstance(reply, Stepped)
        assert reply.version == version
        return reply

    async def release(self, version: int) -> None:
        await self._worker.call(Release(version=version))

    async def save(
        self, directory: Path, *, run_state: dict[str, Any], on_copied: Callable[[], None]
    ) -> Saved:
        """Returns when the checkpoint is on the disk; steps may go on after `on_copied`."""
        message = SaveCheckpoint(directory=str(directory), run_state=run_state)
        reply = await self._worker.call(message, on_part=lambda _: on_copied())
        assert isinstance(reply, Saved)
        return reply
