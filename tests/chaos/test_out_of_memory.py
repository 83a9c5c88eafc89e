"""A worker that gets no more memory; one that the system kills for it dies by SIGKILL, as others
do."""

import sys

import pytest
from kept_worker import Kept, ask

from millrace.cluster.messages import Done
from millrace.core.errors import WorkerError


@pytest.mark.skipif(sys.platform != "linux", reason="RLIMIT_AS does not hold elsewhere")
async def test_a_worker_without_memory_says_so_and_is_replaced(tmp_path):
    async with Kept("hungry_worker", folder=tmp_path) as kept:
        with pytest.raises(WorkerError, match="failed: MemoryError"):
            await kept.worker.call(ask("eat"))
        another = await kept.replaced()
        assert isinstance(await another.call(ask("fine")), Done)
        (reason,) = kept.restarts
        assert "MemoryError" in reason
