"""Messages that are lost or late between a worker and its hub."""

import asyncio

import pytest
from supervised_worker import SupervisedWorker, generate

from millrace.cluster.messages import Done
from millrace.core.errors import WorkerError


async def test_lost_reply_fails_at_its_deadline_or_at_the_hang_timeout(
    tmp_path,
):
    async with SupervisedWorker("lossy_worker", folder=tmp_path) as supervised:
        assert isinstance(await supervised.worker.call(generate("fine")), Done)
        first = supervised.worker.pid
        with pytest.raises(WorkerError, match=r"did not answer Generate within 0\.3 s"):
            await supervised.worker.call(generate("lost"), timeout_s=0.3, kill_on_timeout=True)
        second = await supervised.replaced()
        assert second.pid != first
        assert isinstance(await second.call(generate("fine")), Done)
        # Without a deadline: the worker is alive but reports no progress.
        with pytest.raises(WorkerError, match="made no progress"):
            await asyncio.wait_for(second.call(generate("lost"), expect_progress=True), 20)
        third = await supervised.replaced()
        assert isinstance(await third.call(generate("fine")), Done)
        assert len(supervised.restarts) == 2
        log = (tmp_path / "supervised-0.log").read_text()
        assert log.count("lost a reply") == 2


async def test_late_reply_answers_only_its_own_call(tmp_path):
    async with SupervisedWorker("lossy_worker", folder=tmp_path) as supervised:
        with pytest.raises(WorkerError, match="did not answer"):
            await supervised.worker.call(
                generate("late"), timeout_s=0.1
            )  # does not kill the worker
        late = asyncio.create_task(supervised.worker.call(generate("late")))
        assert isinstance(await supervised.worker.call(generate("fine")), Done)
        assert not late.done()  # the second call was answered first
        assert isinstance(await late, Done)
        assert supervised.hub.num_unclaimed == 1
        assert supervised.restarts == []
