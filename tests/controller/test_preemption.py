"""SIGTERM, as a run handles it: sent to this process."""

import asyncio
import contextlib
import os
import signal

import pytest

from millrace.controller.preemption import Preemption
from millrace.core.errors import Preempted


def terminate() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


async def stopped_by_sigterm(*, grace_s: float, trains: bool) -> None:
    async with Preemption(grace_s=grace_s) as preemption:
        with preemption.deferred() if trains else contextlib.nullcontext():
            terminate()
            await asyncio.sleep(1000)


async def test_run_that_has_nothing_to_save_stops_at_once():
    with pytest.raises(Preempted, match="--resume"):
        await stopped_by_sigterm(grace_s=1000, trains=False)


async def test_run_that_trains_has_the_grace_period_and_a_second_sigterm_changes_nothing():
    warnings: list[str] = []
    async with Preemption(grace_s=1000, warn=warnings.append) as preemption:
        with preemption.deferred():
            never = asyncio.create_task(asyncio.sleep(1000))
            asyncio.get_running_loop().call_soon(terminate)
            assert await preemption.unless_requested(never) is None
            terminate()
            await asyncio.sleep(0.01)
        never.cancel()
    assert len(warnings) == 1
    assert "within 1000 s (checkpoint.grace_s)" in warnings[0]


async def test_checkpoint_that_takes_longer_than_the_grace_period_is_given_up():
    with pytest.raises(Preempted):
        await stopped_by_sigterm(grace_s=0.01, trains=True)


async def test_work_that_is_done_first_is_returned():
    async def work() -> str:
        return "batch"

    async with Preemption(grace_s=1000) as preemption:
        assert await preemption.unless_requested(asyncio.create_task(work())) == "batch"


async def test_request_of_another_thread_before_the_start_stops_the_run_at_its_start():
    preemption = Preemption()
    await asyncio.to_thread(preemption.request_from_thread, "Run.stop()")
    with pytest.raises(Preempted, match=r"stopped by Run\.stop\(\)"):
        async with preemption:
            await asyncio.sleep(1000)
    preemption.request_from_thread("too late")
    assert preemption.reason == "Run.stop()"


async def test_stop_of_the_user_has_no_time_limit_until_sigterm_comes():
    async def stop_twice() -> None:
        async with Preemption(grace_s=0.01) as preemption:
            with preemption.deferred():
                await asyncio.to_thread(preemption.request_from_thread, "Run.stop()")
                await asyncio.sleep(0.05)
                assert preemption.reason == "Run.stop()"
                terminate()
                await asyncio.sleep(1000)

    with pytest.raises(Preempted, match="SIGTERM"):
        await stop_twice()


async def test_stop_after_a_step_cancels_nothing_before_the_first_one():
    async with Preemption(grace_s=0.01) as preemption:
        preemption.finish_step("enough")
        await asyncio.sleep(0.05)
        with preemption.deferred():
            never = asyncio.create_task(asyncio.sleep(1000))
            assert await preemption.unless_requested(never) is None
        never.cancel()


async def test_sigterm_while_a_stopped_run_shuts_down_changes_nothing():
    async def stop_twice() -> None:
        async with Preemption() as preemption:
            preemption.request("Run.stop()")
            try:
                await asyncio.sleep(1000)
            finally:
                preemption.request()

    with pytest.raises(Preempted):
        await stop_twice()


async def test_sigterm_after_the_run_changes_nothing():
    async with Preemption() as preemption:
        pass
    preemption.request()  # the handler of the signal stays until the loop is closed
