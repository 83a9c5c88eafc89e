"""Messages that are lost or late between a worker and its hub."""

import asyncio

import pytest
from kept_worker import Kept, ask

from millrace.cluster.messages import Done
from millrace.core.errors import WorkerError


async def test_a_reply_that_is_lost_ends_at_its_deadline_or_when_nothing_moves_and_never_hangs(
    tmp_path,
):
    async with Kept("lossy_worker", folder=tmp_path) as kept:
        assert isinstance(await kept.worker.call(ask("fine")), Done)
        first = kept.worker.pid
        with pytest.raises(WorkerError, match=r"did not answer Generate within 0\.3 s"):
            await kept.worker.call(ask("lost"), timeout_s=0.3, is_deadline=True)
        second = await kept.replaced()
        assert second.pid != first
        assert isinstance(await second.call(ask("fine")), Done)
        # Without a deadline: the worker is alive and says that it does nothing.
        with pytest.raises(WorkerError, match="made no progress"):
            await asyncio.wait_for(second.call(ask("lost"), is_pulsed=True), 20)
        third = await kept.replaced()
        assert isinstance(await third.call(ask("fine")), Done)
        assert len(kept.restarts) == 2
        log = (tmp_path / "kept-0.log").read_text()
        assert log.count("lost a reply") == 2


async def test_a_reply_that_is_late_answers_its_own_call_or_nobodys(tmp_path):
    async with Kept("lossy_worker", folder=tmp_path) as kept:
        with pytest.raises(WorkerError, match="did not answer"):
            await kept.worker.call(ask("late"), timeout_s=0.1)  # no deadline: the worker stays
        late = asyncio.create_task(kept.worker.call(ask("late")))
        assert isinstance(await kept.worker.call(ask("fine")), Done)
        assert not late.done()  # overtaken
        assert isinstance(await late, Done)
        assert kept.hub.unclaimed == 1
        assert kept.restarts == []
