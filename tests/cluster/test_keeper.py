import asyncio

import pytest
from fake_worker import FakeWorker, settle

from millrace.cluster.supervision.restarts import RestartHistory, RestartLimits
from millrace.cluster.supervision.supervisor import Keeper
from millrace.cluster.supervision.watchdog import ProgressWatchdog
from millrace.core.errors import GivenUp, RunFailed, WorkerError

LIMITS = RestartLimits(max_restarts=2, window_s=100.0, backoff_s=1.0)
AT_ONCE = RestartLimits(max_restarts=2, window_s=100.0, backoff_s=0.0)


class Rig:
    """A kept worker, its successors, and what was said."""

    def __init__(self, *successors, hang_timeout_s=1000.0) -> None:
        self.first = FakeWorker()
        self.successors = list(successors)
        self.deaths = 0
        self.restarts: list[str] = []
        self.keeping = asyncio.create_task(
            Keeper(
                self.first,  # pyright: ignore
                replace=self._replace,
                on_death=self._on_death,
                limits=AT_ONCE,
                make_pulse=lambda: ProgressWatchdog(timeout_s=hang_timeout_s, first_timeout_s=0.0),
                remedy="It is started again.",
                on_restart=lambda name, reason: self.restarts.append(f"{name}: {reason}"),
            ).run()
        )

    async def _replace(self):
        successor = self.successors.pop(0)
        if isinstance(successor, Exception):
            raise successor
        return successor

    def _on_death(self) -> None:
        self.deaths += 1


async def test_a_worker_that_dies_is_replaced_and_so_is_the_next():
    second, third = FakeWorker(), FakeWorker()
    rig = Rig(second, third)
    for number, worker in enumerate((rig.first, second), start=1):
        worker.die()
        await settle()
        assert rig.deaths == number
        assert rig.restarts[-1] == "engine-0: It was killed. It is started again."
    assert not rig.keeping.done()
    rig.keeping.cancel()


async def test_a_worker_that_cannot_be_started_again_counts_as_dead_until_that_is_too_often():
    rig = Rig(OSError("no memory"), WorkerError("It did not come up.", worker="engine-0"))
    rig.first.die()
    with pytest.raises(GivenUp, match="died 3 times within 100 s") as given_up:
        await rig.keeping
    assert "supervision.max_restarts = 2" in str(given_up.value)
    assert "the last time: It did not come up." in str(given_up.value)
    assert (given_up.value.worker, rig.deaths) == ("engine-0", 1)


async def test_a_worker_that_hangs_is_ended_and_replaced():
    successor = FakeWorker()
    successor.num_pulsed = 0  # nobody asks it for anything
    rig = Rig(successor, hang_timeout_s=0.01)
    await asyncio.wait({rig.first.dead}, timeout=5)
    await settle()
    assert "made no progress for 0 s (supervision.hang_timeout_s)" in rig.restarts[0]
    await asyncio.sleep(0.3)
    assert len(rig.restarts) == 1
    rig.keeping.cancel()


async def test_what_no_retry_mends_is_not_tried_again():
    rig = Rig(RunFailed("The steps are gone."), FakeWorker())
    rig.first.die()
    with pytest.raises(RunFailed, match="The steps are gone"):
        await rig.keeping


def test_the_wait_doubles_with_each_death_within_the_window():
    now_s = 0.0
    deaths = RestartHistory("trainer", limits=LIMITS, clock=lambda: now_s)
    error = WorkerError("It died.", worker="trainer", traceback="line 1")
    assert [deaths.note(error), deaths.note(error)] == [1.0, 2.0]
    now_s = 101.0  # both are forgotten
    assert [deaths.note(error), deaths.note(error)] == [1.0, 2.0]
    now_s = 110.0
    with pytest.raises(GivenUp, match=r"3 times within 100 s \(101.0, 101.0, 110.0 s") as given_up:
        deaths.note(error)
    assert given_up.value.traceback == "line 1"
