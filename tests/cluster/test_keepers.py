import asyncio

import pytest
from fake_worker import FakeWorker, settle

from millrace.cluster.supervision.supervisor import Keepers
from millrace.config.supervision import SupervisionConfig
from millrace.core.errors import ConfigError, GivenUp, WorkerError


def keepers(said: list[str], *, max_restarts: int = 2) -> Keepers:
    return Keepers(
        SupervisionConfig(max_restarts=max_restarts, backoff_s=0.0),
        start_timeout_s=9.0,
        on_restart=lambda name, what: said.append(f"{name}: {what}"),
    )


def keep(kept: Keepers, worker: FakeWorker, *successors: FakeWorker) -> list[FakeWorker]:
    """Returns those that have died."""
    dead, rest = [], iter(successors)

    async def replace():
        return next(rest)

    kept.keep(worker, replace=replace, on_death=lambda: dead.append(worker))  # pyright: ignore
    return dead


async def test_whoever_is_kept_is_replaced_also_if_it_came_late_and_no_longer_once_dropped():
    said: list[str] = []
    kept = keepers(said)
    first, late = FakeWorker("engine-0"), FakeWorker("engine-1")
    dead = keep(kept, first, FakeWorker("engine-0"))
    running = asyncio.create_task(kept.run())
    await settle()
    died_late = keep(kept, late)
    first.die()
    await settle()
    assert dead == [first]
    assert said == ["engine-0: It was killed. It is started again."]
    kept.drop("engine-1")
    await settle()
    late.die()
    await settle()
    assert died_late == []
    assert not running.done()
    running.cancel()


async def test_one_that_dies_too_often_ends_them_all():
    kept = keepers([], max_restarts=0)
    worker = FakeWorker()
    keep(kept, worker)
    worker.die()
    with pytest.raises(ExceptionGroup) as info:
        await kept.run()
    assert isinstance(info.value.exceptions[0], GivenUp)


async def test_what_is_killed_while_it_first_comes_up_is_started_again_and_what_fails_is_not():
    said: list[str] = []
    outcomes = [WorkerError("Killed.", worker="engine-0", was_killed=True), FakeWorker()]

    async def start():
        outcome = outcomes.pop(0)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    assert isinstance(await keepers(said).first("engine-0", start), FakeWorker)  # pyright: ignore
    assert said == ["engine-0: Killed. It is started again."]
    outcomes.append(ConfigError("No such model."))
    with pytest.raises(ConfigError):
        await keepers(said).first("engine-0", start)  # pyright: ignore
