"""A worker that gets no more memory; one that the system kills for it dies by SIGKILL, as others
do."""

import sys

import pytest
from supervised_worker import SupervisedWorker, ask

from millrace.cluster.messages import Done
from millrace.core.errors import WorkerError


@pytest.mark.skipif(sys.platform != "linux", reason="RLIMIT_AS does not hold elsewhere")
async def test_a_worker_without_memory_says_so_and_is_replaced(tmp_path):
    async with SupervisedWorker("hungry_worker", folder=tmp_path) as supervised:
        with pytest.raises(WorkerError, match="failed: MemoryError"):
            await supervised.worker.call(ask("eat"))
        another = await supervised.replaced()
        assert isinstance(await another.call(ask("fine")), Done)
        (reason,) = supervised.restarts
        assert "MemoryError" in reason
