import asyncio
from pathlib import Path
from unittest.mock import AsyncMock

from fakes import make_update
from http_engine import HttpEngine

from millrace.core.records import WeightUpdate
from millrace.weights.broadcaster import HttpNotifier, VersionBroadcaster
from millrace.weights.transports.disk import MARKER, MODEL_FILE


def committed(version: int, folder: Path) -> WeightUpdate:
    place = folder / f"version_{version}"
    place.mkdir()
    (place / MARKER).touch()
    return make_update(version, transport="disk", location=str(place / MODEL_FILE))


def make_notifier(*urls: str, timeout_s: float = 20.0) -> tuple[HttpNotifier, list[str]]:
    warnings: list[str] = []
    return HttpNotifier(urls, timeout_s=timeout_s, warn=warnings.append, retry_s=0.01), warnings


async def until(engine: HttpEngine, *, num_posts: int) -> None:
    while len(engine.versions) < num_posts:  # noqa: ASYNC110 - the server has a thread of its own
        await asyncio.sleep(0.005)


async def test_receive_returns_when_every_engine_has_answered(tmp_path: Path):
    with HttpEngine() as fast, HttpEngine() as slow:
        slow.may_answer.clear()
        notifier, warnings = make_notifier(fast.url, slow.url)
        receiving = asyncio.create_task(notifier.receive(committed(1, tmp_path)))
        await until(slow, num_posts=1)
        await until(fast, num_posts=1)
        await asyncio.sleep(0.02)
        assert not receiving.done()
        slow.may_answer.set()
        assert await receiving == 1
        assert (fast.versions, slow.versions) == ([1], [1])
        assert fast.had_marker == slow.had_marker == [True]
        assert (warnings, notifier.num_failed) == ([], 0)


async def test_only_the_newest_of_waiting_versions_is_posted(tmp_path: Path):
    with HttpEngine() as engine:
        engine.may_answer.clear()
        notifier, _ = make_notifier(engine.url)
        broadcaster, trainer = VersionBroadcaster(version=0), AsyncMock()
        posted = broadcaster.subscribe(notifier.receive)
        running = asyncio.create_task(broadcaster.run(trainer))
        broadcaster.publish(committed(1, tmp_path))
        await until(engine, num_posts=1)
        for version in (2, 3, 4):
            broadcaster.publish(committed(version, tmp_path))
        await asyncio.sleep(0.02)
        assert [call.args[0].version for call in trainer.release.call_args_list] == [2, 3]
        engine.may_answer.set()
        await posted.idle()
        assert engine.versions == [1, 4]
        running.cancel()


async def test_failed_post_is_tried_again(tmp_path: Path):
    with HttpEngine(answers=(503, 500)) as engine:
        notifier, warnings = make_notifier(engine.url)
        await notifier.receive(committed(1, tmp_path))
        assert engine.versions == [1, 1, 1]
        assert (warnings, notifier.num_failed) == ([], 0)


async def test_unreachable_engine_causes_one_warning_and_is_counted(tmp_path: Path):
    with HttpEngine() as gone, HttpEngine(answers=(404,) * 3) as wrong:
        gone.close()
        notifier, warnings = make_notifier(gone.url, wrong.url)
        for version in (1, 2):
            await notifier.receive(committed(version, tmp_path))
        assert notifier.num_failed == 3  # two posts to one, one to the other
        assert sorted(warnings) == sorted(set(warnings))
        assert any("it answered '404 Not Found'" in warning for warning in warnings)
        assert all("could not be notified of version 1 (" in warning for warning in warnings)


async def test_hanging_engine_times_out(tmp_path: Path):
    with HttpEngine() as hanging:
        hanging.may_answer.clear()
        notifier, warnings = make_notifier(hanging.url, timeout_s=0.1)
        await notifier.receive(committed(1, tmp_path))
        assert notifier.num_failed == 1
        assert "no answer in 0.1 s" in warnings[0]
