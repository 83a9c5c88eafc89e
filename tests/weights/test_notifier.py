import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from http_engine import HttpEngine

from millrace.core.weight_update import WeightUpdate
from millrace.weights.notifier import Notifier
from millrace.weights.transports.disk import MARKER, MODEL_FILE


def committed(version: int, folder: Path) -> WeightUpdate:
    place = folder / f"version_{version}"
    place.mkdir()
    (place / MARKER).touch()
    location = str(place / MODEL_FILE)
    return WeightUpdate(
        version=version, tensors=(), num_bytes=0, checksum=0, transport="disk", location=location
    )


@asynccontextmanager
async def running(*urls: str, timeout_s: float = 20.0) -> AsyncIterator[tuple[Notifier, list[str]]]:
    warnings: list[str] = []
    notifier = Notifier(urls, timeout_s=timeout_s, warn=warnings.append, retry_s=0.01)
    task = asyncio.create_task(notifier.run())
    yield notifier, warnings
    task.cancel()


async def until(engine: HttpEngine, *, num_posts: int) -> None:
    while len(engine.versions) < num_posts:  # noqa: ASYNC110 - the server has a thread of its own
        await asyncio.sleep(0.005)


async def test_a_version_is_needed_until_every_engine_has_answered(tmp_path: Path):
    with HttpEngine() as fast, HttpEngine() as slow:
        slow.may_answer.clear()
        async with running(fast.url, slow.url) as (notifier, warnings):
            notifier.submit(committed(1, tmp_path))
            await until(slow, num_posts=1)
            release = asyncio.create_task(notifier.done_with(1))
            await until(fast, num_posts=1)
            await asyncio.sleep(0.02)
            assert not release.done()
            slow.may_answer.set()
            await release
            await notifier.done_with(1)  # and a version that nobody was told of is not needed
            assert (fast.versions, slow.versions) == ([1], [1])
            assert fast.had_marker == slow.had_marker == [True]
            assert (warnings, notifier.num_failed) == ([], 0)


async def test_of_versions_that_wait_only_the_newest_is_told(tmp_path: Path):
    with HttpEngine() as engine:
        engine.may_answer.clear()
        async with running(engine.url) as (notifier, _):
            notifier.submit(committed(1, tmp_path))
            await until(engine, num_posts=1)
            for version in (2, 3, 4):
                notifier.submit(committed(version, tmp_path))
            await notifier.done_with(2)
            await notifier.done_with(3)
            engine.may_answer.set()
            await notifier.finish()
            assert engine.versions == [1, 4]


async def test_an_engine_that_fails_is_asked_again(tmp_path: Path):
    with HttpEngine(answers=(503, 500)) as engine:
        async with running(engine.url) as (notifier, warnings):
            notifier.submit(committed(1, tmp_path))
            await notifier.finish()
            assert engine.versions == [1, 1, 1]
            assert (warnings, notifier.num_failed) == ([], 0)


async def test_an_engine_that_is_gone_is_one_warning_and_counted(tmp_path: Path):
    with HttpEngine() as gone, HttpEngine(answers=(404,) * 3) as wrong:
        gone.close()
        async with running(gone.url, wrong.url) as (notifier, warnings):
            for version in (1, 2):
                notifier.submit(committed(version, tmp_path))
                await notifier.finish()
            assert notifier.num_failed == 3  # twice one, once the other
            assert sorted(warnings) == sorted(set(warnings))
            assert any("it answered '404 Not Found'" in warning for warning in warnings)
            assert all("could not be told of version 1 (" in warning for warning in warnings)


async def test_an_engine_that_hangs_is_given_up(tmp_path: Path):
    with HttpEngine() as hanging:
        hanging.may_answer.clear()
        async with running(hanging.url, timeout_s=0.1) as (notifier, warnings):
            notifier.submit(committed(1, tmp_path))
            await notifier.finish()
            assert notifier.num_failed == 1
        assert "no answer in weights.timeout_s = 0.1" in warnings[0]
