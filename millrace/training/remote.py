"""The trainer as the controller sees it: a process that takes batches. Torch-free."""

from pathlib import Path
from typing import Any

from millrace.cluster.hub import Worker
from millrace.cluster.messages import Release, SaveCheckpoint, Step, Stepped
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

    async def save(self, directory: Path, *, run_state: dict[str, Any]) -> None:
        await self._worker.call(SaveCheckpoint(directory=str(directory), run_state=run_state))
