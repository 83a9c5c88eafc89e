import asyncio
import threading

import pytest

import millrace as mr
from millrace.core.errors import ConfigError, MillraceError
from millrace.run.train import MetricFeed


@pytest.fixture
def run(tmp_path) -> mr.Run:
    """Its model does not exist, so it fails before any worker starts."""
    return mr.Run(model=str(tmp_path / "missing"), run_dir=str(tmp_path / "run"), tasks=["1+1"])


def test_run_that_has_not_started_says_so(run):
    for use in (run.result, lambda: list(run)):
        with pytest.raises(ConfigError, match=r"has not started; call start\(\)"):
            use()
    run.stop()  # without effect
    assert not run.is_running


def test_wrong_settings_are_reported_before_the_start():
    with pytest.raises(ConfigError, match="did you mean 'trainer'"):
        mr.Run(model="m", trianer={"steps": 3})


async def test_every_way_to_wait_raises_what_ended_the_run(run):
    with pytest.raises(MillraceError):
        run.start().result()
    with pytest.raises(MillraceError):
        list(run)
    with pytest.raises(MillraceError):
        _ = [row async for row in run]
    with pytest.raises(MillraceError):
        await run.resume()
    assert not run.is_running


async def test_rows_of_another_thread_reach_event_loops_in_order():
    feed = MetricFeed()
    first = feed.upcoming
    feeder = threading.Thread(
        target=lambda: [feed.on_step({"step": 1}), feed.upcoming.set_result(None)]
    )
    feeder.start()
    row, after = await asyncio.wrap_future(first)
    assert row == {"step": 1}
    assert after.result(timeout=60) is None
    feeder.join()
