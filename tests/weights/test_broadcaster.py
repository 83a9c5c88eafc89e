import asyncio
from contextlib import suppress

import pytest
from fakes import make_update

from millrace.core.errors import WeightError
from millrace.core.records import WeightUpdate
from millrace.weights.broadcaster import VersionBroadcaster


class FakeTrainer:
    """A source whose updates can be lost; `newest` is what a restarted trainer lends."""

    def __init__(self) -> None:
        self.released: list[int] = []
        self.lost: set[int] = set()
        self.newest: asyncio.Queue[int] = asyncio.Queue()

    async def release(self, update: WeightUpdate) -> None:
        self.released.append(update.version)

    async def is_lost(self, update: WeightUpdate) -> bool:
        return update.version in self.lost

    async def borrow(self, policy: str) -> WeightUpdate:
        return make_update(await self.newest.get())


class Receiver:
    """A subscriber that finishes one transfer each time the test allows it."""

    def __init__(self, trainer: FakeTrainer) -> None:
        self.began: list[int] = []
        self.received: list[int] = []
        self.gate = asyncio.Semaphore(0)
        self._trainer = trainer

    async def receive(self, update: WeightUpdate) -> int:
        self.began.append(update.version)
        await self.gate.acquire()
        if update.version in self._trainer.lost:
            raise WeightError("gone")
        self.received.append(update.version)
        return update.version


class Broadcast:
    def __init__(self, *, receivers: int = 1) -> None:
        self.trainer = FakeTrainer()
        self.broadcaster = VersionBroadcaster(version=0)
        self.receivers = [Receiver(self.trainer) for _ in range(receivers)]
        self.visible: list[int] = []
        self.subscriptions = [
            self.broadcaster.subscribe(receiver.receive, on_version=self.visible.append)
            for receiver in self.receivers
        ]
        self.running: asyncio.Task[None] | None = None

    async def publish(self, *versions: int) -> None:
        if self.running is None:
            self.running = asyncio.create_task(self.broadcaster.run(self.trainer))
        for version in versions:
            self.broadcaster.publish(make_update(version))
            await settle()

    async def close(self) -> None:
        if self.running is not None:
            self.running.cancel()
            with suppress(asyncio.CancelledError):
                await self.running


async def settle() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


@pytest.fixture
async def one():
    broadcast = Broadcast()
    yield broadcast
    await broadcast.close()


@pytest.fixture
async def two():
    broadcast = Broadcast(receivers=2)
    yield broadcast
    await broadcast.close()


async def test_newer_version_supersedes_one_not_yet_sent(one):
    await one.publish(1, 2, 3)
    (receiver,), (subscription,) = one.receivers, one.subscriptions
    assert receiver.began == [1]
    assert one.trainer.released == [2]
    receiver.gate.release()
    receiver.gate.release()
    await subscription.reached(3)
    await settle()
    assert one.visible == [1, 3]
    assert sorted(one.trainer.released) == [1, 2, 3]


async def test_version_is_released_when_the_last_subscriber_is_done_with_it(two):
    quick, slow = two.receivers
    await two.publish(1)
    quick.gate.release()
    await settle()
    assert (quick.received, two.trainer.released) == ([1], [])
    slow.gate.release()
    await settle()
    assert two.trainer.released == [1]


async def test_slow_subscriber_delays_no_other_and_receives_only_the_newest(two):
    quick, slow = two.receivers
    for _ in range(3):
        quick.gate.release()
    await two.publish(1, 2, 3)
    assert quick.received == [1, 2, 3]
    assert two.trainer.released == [2]  # 1 is being received and 3 waits
    slow.gate.release()
    slow.gate.release()
    await two.subscriptions[1].idle()
    assert slow.received == [1, 3]


async def test_unwanted_version_is_released_at_once():
    broadcast = Broadcast(receivers=0)
    refusing = Receiver(broadcast.trainer)
    broadcast.broadcaster.subscribe(refusing.receive, wants=lambda version: version == 2)
    await broadcast.publish(1, 2)
    assert (refusing.began, broadcast.trainer.released) == ([2], [1])
    await broadcast.close()


async def test_version_lost_with_its_trainer_is_retried_with_the_newest(one):
    (receiver,) = one.receivers
    one.trainer.lost.add(1)
    await one.publish(1)
    receiver.gate.release()
    await settle()
    assert (one.subscriptions[0].version, one.visible) == (0, [])
    await one.trainer.newest.put(2)
    receiver.gate.release()
    await settle()
    assert (receiver.began, one.visible) == ([1, 2], [2])
    await one.publish(2)  # the restarted trainer announces it, too
    assert receiver.began == [1, 2]
    assert sorted(one.trainer.released) == [1, 2, 2]


async def test_pending_version_is_skipped_if_a_retry_has_delivered_it(one):
    (receiver,) = one.receivers
    one.trainer.lost.add(1)
    await one.publish(1, 2)
    await one.trainer.newest.put(2)
    receiver.gate.release()
    receiver.gate.release()
    await one.subscriptions[0].idle()
    assert receiver.began == [1, 2]


async def test_subscriber_that_refuses_a_version_ends_the_run(one):
    async def refuse(update: WeightUpdate) -> int:
        raise WeightError("checksum")

    one.broadcaster.subscribe(refuse)
    await one.publish(1)
    with pytest.raises(ExceptionGroup, match="unhandled"):
        await one.running
    one.running = None


async def test_version_published_before_the_run_is_delivered(one):
    one.broadcaster.publish(make_update(1))
    one.receivers[0].gate.release()
    await one.publish()
    await one.subscriptions[0].reached(1)
