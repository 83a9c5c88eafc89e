import asyncio

from millrace.core.errors import WeightError
from millrace.core.weight_update import WeightUpdate
from millrace.weights.broadcaster import Courier


def make_update(version):
    return WeightUpdate(
        version=version, tensors=(), num_bytes=0, checksum=0, transport="shm", location=""
    )


class Desk:
    """A courier whose deliveries finish when the test says so."""

    def __init__(self):
        self.sent, self.released, self.seen = [], [], []
        self.gate = asyncio.Semaphore(0)
        self.lost = set()
        self.courier = Courier(
            swap=self._swap,
            release=lambda update: self.released.append(update.version),
            on_visible=self.seen.append,
            version=0,
            is_lost=self._is_lost,
        )

    async def _swap(self, update):
        self.sent.append(update.version)
        await self.gate.acquire()
        if update.version in self.lost:
            raise WeightError("gone")
        return update.version

    async def _is_lost(self, update):
        return update.version in self.lost


async def settle():
    for _ in range(10):
        await asyncio.sleep(0)


async def test_a_newer_version_supersedes_one_not_yet_sent():
    desk = Desk()
    running = asyncio.create_task(desk.courier.run())
    for version in (1, 2, 3):
        desk.courier.submit(make_update(version))
        await settle()
    assert desk.sent == [1]
    desk.gate.release()
    desk.gate.release()
    await desk.courier.wait_visible(3)
    await settle()
    assert desk.sent == [1, 3]
    assert desk.seen == [1, 3]
    assert sorted(desk.released) == [1, 2, 3]
    assert desk.courier.num_superseded == 1
    running.cancel()


async def test_a_version_is_released_only_after_the_engines_have_it():
    desk = Desk()
    running = asyncio.create_task(desk.courier.run())
    desk.courier.submit(make_update(1))
    await settle()
    assert desk.released == []
    desk.gate.release()
    await settle()
    assert desk.released == [1]
    assert desk.courier.visible == 1
    running.cancel()


async def test_a_version_that_is_lost_with_its_trainer_is_given_up():
    desk = Desk()
    desk.lost.add(1)
    running = asyncio.create_task(desk.courier.run())
    desk.courier.submit(make_update(1))
    desk.gate.release()
    await settle()
    assert (desk.courier.visible, desk.released) == (0, [1])
    desk.courier.submit(make_update(2))
    desk.gate.release()
    await settle()
    assert (desk.courier.visible, desk.released) == (2, [1, 2])
    running.cancel()
