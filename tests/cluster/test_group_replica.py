import asyncio
import os
import signal
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import pytest
from echo_worker import ask
from fake_worker import FakeWorker

from millrace.cluster.fork_server import PRELOAD
from millrace.cluster.hub import Hub
from millrace.cluster.supervision.pool import RestartPolicy, WorkerPool
from millrace.cluster.supervision.replica import GroupReplica
from millrace.cluster.worker import Worker
from millrace.core.errors import ConfigError, MillraceError, RunFailed, WorkerError

HANG_S = 0.5


class EchoPair(GroupReplica):
    """Two real processes."""

    def __init__(self, hub: Hub) -> None:
        super().__init__("pair", members=("pair-0", "pair-1"), hang_timeout_s=HANG_S)
        self.attached: asyncio.Queue[list] = asyncio.Queue()
        self.num_detached = 0
        self._hub = hub

    async def launch(self, name):
        return await self._hub.launch(name, "echo_worker")

    async def attach(self, workers, *, is_restart):
        await self.attached.put(list(workers))

    def detach(self):
        self.num_detached += 1


@pytest.fixture
async def hub(tmp_path: Path, warm_fork_server: None) -> AsyncIterator[Hub]:
    settings = {"stop_timeout_s": 2.0, "preload": PRELOAD}
    async with Hub(log_dir=tmp_path, on_event=lambda *_: None, **settings) as hub:
        yield hub


@pytest.fixture
def reports() -> list[str]:
    return []


@pytest.fixture
async def pool(hub, reports) -> AsyncIterator[WorkerPool]:
    async with WorkerPool(
        hub.launch,
        policy=RestartPolicy(max_restarts=3, backoff_s=0.0),
        on_restart=lambda name, reason: reports.append(f"{name}: {reason}"),
    ) as pool:
        yield pool


async def started_pair(hub, pool) -> tuple[EchoPair, Sequence[Worker]]:
    pair = EchoPair(hub)
    await pool.add(pair)
    return pair, await pair.attached.get()


@pytest.mark.parametrize("victim", [0, 1])
async def test_killed_worker_ends_the_others_and_all_start_again(hub, pool, reports, victim):
    pair, first = await started_pair(hub, pool)
    os.kill(first[victim].pid, signal.SIGKILL)
    second = await pair.attached.get()
    assert all(worker.is_gone for worker in first)
    (report,) = reports
    assert report.startswith(f"pair: Worker 'pair-{victim}' was killed by SIGKILL")
    assert pair.num_detached == 1
    for worker in second:
        await worker.call(ask("echo"))


@pytest.mark.parametrize("victim", [0, 1])
async def test_stopped_worker_is_found_although_all_stand_still(hub, pool, reports, victim):
    pair, first = await started_pair(hub, pool)
    os.kill(first[victim].pid, signal.SIGSTOP)
    calls = [worker.call(ask("echo after 3600"), expect_progress=True) for worker in first]
    errors = await asyncio.gather(*calls, return_exceptions=True)
    assert all(isinstance(error, WorkerError) for error in errors)
    for worker in await pair.attached.get():
        await worker.call(ask("echo"))
    assert all(worker.is_gone for worker in first)
    (report,) = reports
    assert report.startswith(f"pair: Worker 'pair-{victim}' made no progress for")
    assert "it is stopped (SIGSTOP)" in report


class FakePair(GroupReplica):
    """`attached` is awaited after the workers have been launched."""

    def __init__(self, *workers, attached=None) -> None:
        names = [f"pair-{i}" for i in range(len(workers))]
        super().__init__("pair", members=names, hang_timeout_s=0.01)
        self.workers = dict(zip(names, workers, strict=True))
        self.attached = attached

    async def launch(self, name):
        outcome = self.workers[name]
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    async def attach(self, workers, *, is_restart):
        if self.attached is not None:
            await self.attached


class EndedWorker(FakeWorker):
    is_stopped = False
    was_killed = False

    def kill(self) -> None:
        self.was_killed = True

    async def is_gone_within(self, timeout_s):
        return True


def make_pair():
    return EndedWorker("pair-0"), EndedWorker("pair-1")


async def test_worker_that_is_behind_is_suspected_to_hang():
    ahead, behind = make_pair()
    pair = FakePair(ahead, behind)
    ahead.watchdog.report(work=3, waits=False)
    behind.watchdog.report(work=2, waits=False)
    with ahead.watchdog.expect_progress(), behind.watchdog.expect_progress():
        await pair.start(is_restart=False)
        error = await pair.health()
    assert isinstance(error, WorkerError)
    assert error.worker == "pair-1"
    assert ahead.dead.done()


async def test_failed_start_names_the_worker_that_died_instead_of_the_one_that_missed_it():
    first, second = make_pair()

    async def lose_the_other():
        asyncio.get_running_loop().call_later(0.05, second.die)
        raise RunFailed("Rank 0 could not reach the others.")

    with pytest.raises(WorkerError) as caught:
        await FakePair(first, second, attached=lose_the_other()).start(is_restart=True)
    assert caught.value.worker == "pair-1"
    assert first.was_killed


async def test_worker_that_hangs_while_callers_are_connected_fails_the_start():
    workers = make_pair()

    async def call():
        with workers[1].watchdog.expect_progress():
            raise await workers[1].dead

    workers[0].watchdog.report(work=1, waits=False)
    with pytest.raises(WorkerError, match="made no progress"):
        await FakePair(*workers, attached=call()).start(is_restart=True)
    assert all(worker.was_killed for worker in workers)


@pytest.mark.parametrize("error", [ConfigError("No such model."), RunFailed("The steps are gone.")])
async def test_other_errors_of_a_start_are_raised_and_all_workers_ended(error):
    async def fail():
        raise error

    workers = make_pair()
    with pytest.raises(MillraceError) as caught:
        await FakePair(*workers, attached=fail()).start(is_restart=False)
    assert caught.value is error
    assert all(worker.was_killed for worker in workers)


async def test_worker_that_cannot_be_launched_ends_the_others():
    first, _ = make_pair()
    error = WorkerError("It did not come up.", worker="pair-1")
    with pytest.raises(WorkerError, match="did not come up"):
        await FakePair(first, error).start(is_restart=False)
    assert first.was_killed
