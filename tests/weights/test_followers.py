import asyncio
from contextlib import suppress

from millrace.core.weight_update import WeightUpdate
from millrace.weights.broadcaster import Followers


def update(version: int) -> WeightUpdate:
    return WeightUpdate(
        version=version, tensors=(), num_bytes=0, checksum=0, transport="none", location=""
    )


class SlowFollower:
    """Takes a version when it is let."""

    def __init__(self) -> None:
        self.taken: list[int] = []
        self.may_go_on = asyncio.Event()

    async def swap(self, update: WeightUpdate) -> int:
        await self.may_go_on.wait()
        self.taken.append(update.version)
        return update.version


async def until_idle() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


async def test_a_version_is_needed_until_all_followers_are_done_with_it():
    quick, slow = SlowFollower(), SlowFollower()
    quick.may_go_on.set()
    followers = Followers([quick.swap, slow.swap], version=0)
    running = asyncio.create_task(followers.run())
    followers.submit(update(1))
    done = asyncio.create_task(followers.done_with(1))
    await until_idle()
    assert quick.taken == [1]
    assert not done.done()
    slow.may_go_on.set()
    await done
    running.cancel()
    with suppress(asyncio.CancelledError):
        await running


async def test_a_slow_follower_sees_the_newest_and_holds_up_none_it_never_sees():
    follower = SlowFollower()
    followers = Followers([follower.swap], version=0)
    running = asyncio.create_task(followers.run())
    for version in (1, 2, 3):
        followers.submit(update(version))
        await until_idle()
    follower.may_go_on.set()
    await asyncio.gather(*(followers.done_with(version) for version in (1, 2, 3)))
    assert follower.taken == [1, 3]
    running.cancel()
    with suppress(asyncio.CancelledError):
        await running


async def test_without_followers_nothing_is_needed():
    followers = Followers([], version=0)
    followers.submit(update(1))
    waiting = asyncio.create_task(followers.done_with(1))
    await until_idle()
    assert waiting.done()
