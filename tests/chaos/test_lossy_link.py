"""Messages that are lost or late between a worker and its hub."""

import asyncio

import pytest
from supervised_worker import SupervisedWorker, ask

from millrace.cluster.messages import Done
from millrace.core.errors import WorkerError


async def test_a_reply_that_is_lost_ends_at_its_deadline_or_when_nothing_moves_and_never_hangs(
    tmp_path,
):
    async with SupervisedWorker("lossy_worker", folder=tmp_path) as supervised:
        assert isinstance(await supervised.worker.call(ask("fine")), Done)
        first = supervised.worker.pid
        with pytest.raises(WorkerError, match=r"did not answer Generate within 0\.3 s"):
            await supervised.worker.call(ask("lost"), timeout_s=0.3, kill_on_timeout=True)
        second = await supervised.replaced()
        assert second.pid != first
        assert isinstance(await second.call(ask("fine")), Done)
        # Without a deadline: the worker is alive and says that it does nothing.
        with pytest.raises(WorkerError, match="made no progress"):
            await asyncio.wait_for(second.call(ask("lost"), expect_progress=True), 20)
        third = await supervised.replaced()
        assert isinstance(await third.call(ask("fine")), Done)
        assert len(supervised.restarts) == 2
        log = (tmp_path / "supervised-0.log").read_text()
        assert log.count("lost a reply") == 2


async def test_a_reply_that_is_late_answers_its_own_call_or_nobodys(tmp_path):
    async with SupervisedWorker("lossy_worker", folder=tmp_path) as supervised:
        with pytest.raises(WorkerError, match="did not answer"):
            await supervised.worker.call(
                ask("late"), timeout_s=0.1
            )  # no deadline: the worker stays
        late = asyncio.create_task(supervised.worker.call(ask("late")))
        assert isinstance(await supervised.worker.call(ask("fine")), Done)
        assert not late.done()  # overtaken
        assert isinstance(await late, Done)
        assert supervised.hub.num_unclaimed == 1
        assert supervised.restarts == []
