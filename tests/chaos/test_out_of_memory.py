"""A worker that runs out of memory. (If the kernel kills it, its death is an ordinary SIGKILL.)"""

import sys

import pytest
from supervised_worker import SupervisedWorker, generate

from millrace.cluster.messages import Done
from millrace.core.errors import WorkerError


@pytest.mark.skipif(sys.platform != "linux", reason="RLIMIT_AS does not hold elsewhere")
async def test_worker_that_runs_out_of_memory_is_replaced_with_the_reason(tmp_path):
    async with SupervisedWorker("out_of_memory_worker", folder=tmp_path) as supervised:
        with pytest.raises(WorkerError, match="failed: MemoryError"):
            await supervised.worker.call(generate("exhaust memory"))
        another = await supervised.replaced()
        assert isinstance(await another.call(generate("fine")), Done)
        (reason,) = supervised.restarts
        assert "MemoryError" in reason
