import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest
from fake_worker import FakeReplica, FakeWorker, settle

from millrace.cluster.supervision.pool import RestartHistory, RestartPolicy, WorkerPool
from millrace.core.errors import ConfigError, RestartLimitExceeded, RunFailed, WorkerError

AT_ONCE = RestartPolicy(max_restarts=2, window_s=100.0, backoff_s=0.0)


async def launch_nothing(_name: str, _module: str):
    pytest.fail("fake replicas launch no process")


@pytest.fixture
def reports() -> list[str]:
    return []


@pytest.fixture
async def pool(reports: list[str]) -> AsyncIterator[WorkerPool]:
    async with WorkerPool(
        launch_nothing,
        policy=AT_ONCE,
        on_restart=lambda name, reason: reports.append(f"{name}: {reason}"),
    ) as pool:
        yield pool


async def test_replica_that_dies_is_restarted_and_so_is_the_next(pool, reports):
    first, second, third = FakeWorker(), FakeWorker(), FakeWorker()
    replica = FakeReplica(first, second, third)
    await pool.add(replica)
    for number, worker in enumerate((first, second), start=1):
        worker.die()
        await settle()
        assert replica.num_detached == replica.num_deaths == len(reports) == number
        assert reports[-1] == "engine-0: It was killed. It is being restarted."
    assert replica.attached == [(first, False), (second, True), (third, True)]
    assert await replica.serving() is third


async def test_failed_restarts_count_until_the_limit_is_reached(pool):
    first = FakeWorker()
    replica = FakeReplica(
        first, OSError("no memory"), WorkerError("It did not come up.", worker="engine-0")
    )
    await pool.add(replica)
    waiting = asyncio.create_task(pool.run())
    first.die()
    with pytest.raises(RestartLimitExceeded, match="failed 3 times within 100 s") as exceeded:
        await waiting
    assert "supervision.max_restarts = 2" in str(exceeded.value)
    assert "the last error: It did not come up." in str(exceeded.value)
    assert (exceeded.value.worker, replica.num_detached) == ("engine-0", 1)
    with pytest.raises(RunFailed, match="failed 3 times"):
        await replica.serving()


async def test_deaths_do_not_count_where_user_code_may_kill_the_process(pool):
    workers = [FakeWorker() for _ in range(9)]
    replica = FakeReplica(*workers, *(OSError("no memory") for _ in range(3)))
    await pool.add(replica, policy=replace(AT_ONCE, limit_deaths=False))
    for worker in workers:
        worker.die()
        await settle()
    assert replica.num_deaths == 9
    with pytest.raises(RestartLimitExceeded, match=r"failed 3 times .* no memory"):
        await pool.run()


async def test_replica_that_hangs_is_ended_and_restarted(pool, reports):
    first, second = FakeWorker(), FakeWorker()
    with first.watchdog.expect_progress():
        await pool.add(FakeReplica(first, second, hang_timeout_s=0.01))
        await asyncio.wait({first.dead}, timeout=5)
    await settle()
    assert "made no progress for 0 s (supervision.hang_timeout_s)" in reports[0]
    await asyncio.sleep(0.3)  # no call expects progress of the second
    assert len(reports) == 1


async def test_error_that_a_retry_cannot_fix_is_not_retried(pool):
    first = FakeWorker()
    replica = FakeReplica(first, RunFailed("The steps are gone."), FakeWorker())
    await pool.add(replica)
    first.die()
    with pytest.raises(RunFailed, match="The steps are gone"):
        await pool.run()
    assert len(replica.outcomes) == 1


async def test_replica_killed_in_its_first_start_is_restarted(pool, reports):
    killed = WorkerError("Killed.", worker="engine-0", was_killed=True)
    replica = FakeReplica(killed, FakeWorker())
    await pool.add(replica)
    assert reports == ["engine-0: Killed. It is being restarted."]
    assert [is_restart for _, is_restart in replica.attached] == [False]


async def test_other_errors_of_the_first_start_are_raised(pool, reports):
    with pytest.raises(ConfigError):
        await pool.add(FakeReplica(ConfigError("No such model."), FakeWorker()))
    with pytest.raises(WorkerError):
        await pool.add(FakeReplica(WorkerError("It failed.", worker="engine-0"), FakeWorker()))
    assert reports == []


async def test_removed_replica_is_stopped_and_not_restarted(pool, reports):
    stays, leaves = FakeWorker("engine-0"), FakeWorker("engine-1")
    await pool.add(FakeReplica(stays, FakeWorker()))
    await pool.add(FakeReplica(leaves, name="engine-1"))
    await pool.remove("engine-1")
    assert leaves.was_stopped
    leaves.die()
    stays.die()
    await settle()
    assert reports == ["engine-0: It was killed. It is being restarted."]
    await pool.remove("engine-9")  # never added


def test_the_wait_doubles_with_each_failure_within_the_window():
    now_s = 0.0
    policy = RestartPolicy(max_restarts=2, window_s=100.0, backoff_s=1.0)
    history = RestartHistory(name="trainer", policy=policy, clock=lambda: now_s)
    error = WorkerError("It died.", worker="trainer", traceback="line 1")
    assert [history.add(error), history.add(error)] == [1.0, 2.0]
    now_s = 101.0  # both are forgotten
    assert [history.add(error), history.add(error)] == [1.0, 2.0]
    now_s = 130.0
    times = r"3 times within 100 s \(101.0, 101.0, 130.0 s"
    with pytest.raises(RestartLimitExceeded, match=times) as exceeded:
        history.add(error)
    assert exceeded.value.traceback == "line 1"


def test_only_failures_in_quick_succession_lengthen_the_wait():
    now_s = 0.0
    history = RestartHistory(name="engine-0", policy=RestartPolicy(), clock=lambda: now_s)
    waits = []
    for now_s in (0.0, 1.0, 30.0, 60.0):  # noqa: B007 - the clock reads it
        waits.append(history.add(WorkerError("It died.", worker="engine-0")))
    assert waits == [0.5, 1.0, 0.5, 0.5]
