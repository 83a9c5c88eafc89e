import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping

import pytest
import torch
from operations import Operations

from millrace.core.errors import WeightError
from millrace.core.records import WeightUpdate
from millrace.weights.backends import NoSpace
from millrace.weights.publisher import Publisher, WeightSnapshot
from millrace.weights.transport import make_receiver, make_sender


class SlowSender:
    """Publishes when `may_publish` is set, and keeps copies of the tensors."""

    def __init__(self, *, num_slots: int = 1) -> None:
        self.dtype = torch.bfloat16
        self.num_slots = num_slots
        self.may_publish = threading.Event()
        self.is_publishing = threading.Event()
        self.published: dict[int, dict[str, torch.Tensor]] = {}
        self.held: set[int] = set()
        self.is_closed = False

    @property
    def has_room(self) -> bool:
        return len(self.held) < self.num_slots

    def publish(self, version: int, tensors: Mapping[str, torch.Tensor]) -> WeightUpdate:
        self.is_publishing.set()
        assert self.may_publish.wait(5)
        self.published[version] = {name: tensor.clone() for name, tensor in tensors.items()}
        self.held.add(version)
        return WeightUpdate(
            version=version, tensors=(), num_bytes=0, checksum=0, transport="slow", location=""
        )

    def release(self, version: int) -> None:
        if version not in self.held:
            raise WeightError(f"Version {version} is not held.")
        self.held.remove(version)

    def close(self) -> None:
        self.is_closed = True


@pytest.fixture
def emitted() -> "queue.Queue[WeightUpdate]":
    return queue.Queue()


@pytest.fixture
def slow() -> SlowSender:
    return SlowSender()


@pytest.fixture
def publisher(slow: SlowSender, emitted: "queue.Queue[WeightUpdate]") -> Iterator[Publisher]:
    publisher = Publisher(slow, emit=emitted.put)
    yield publisher
    slow.may_publish.set()
    publisher.close()
    assert slow.is_closed


def weights(value: float) -> dict[str, torch.Tensor]:
    return {"weight": torch.full((3,), float(value)), "count": torch.tensor([int(value)])}


def versions(emitted: "queue.Queue[WeightUpdate]", count: int) -> list[int]:
    found = [emitted.get(timeout=5).version for _ in range(count)]
    time.sleep(0.05)
    assert emitted.empty()
    return found


def test_later_training_does_not_change_published_weights(
    publisher: Publisher, slow: SlowSender, emitted: "queue.Queue[WeightUpdate]"
):
    live = weights(1)
    publisher.publish(1, live)
    for tensor in live.values():
        tensor.fill_(99)  # the trainer steps on
    slow.may_publish.set()
    assert versions(emitted, 1) == [1]
    assert slow.published[1]["weight"].tolist() == [1, 1, 1]
    assert slow.published[1]["weight"].dtype is torch.bfloat16
    assert slow.published[1]["count"].dtype is torch.int64


def test_publish_never_waits_and_the_newest_supersedes_unsent_versions(
    publisher: Publisher, slow: SlowSender, emitted: "queue.Queue[WeightUpdate]"
):
    publisher.publish(1, weights(1))
    assert slow.is_publishing.wait(5)
    for version in range(2, 6):  # returns although the sender is stuck in version 1
        publisher.publish(version, weights(version))
    assert publisher.superseded == 3
    slow.num_slots = 2
    slow.may_publish.set()
    assert versions(emitted, 2) == [1, 5]
    assert slow.published[1]["weight"].tolist() == [1, 1, 1]
    assert slow.published[5]["weight"].tolist() == [5, 5, 5]


def test_pending_version_is_sent_when_another_is_released(
    publisher: Publisher, slow: SlowSender, emitted: "queue.Queue[WeightUpdate]"
):
    slow.may_publish.set()
    publisher.publish(1, weights(1))
    assert versions(emitted, 1) == [1]
    publisher.publish(2, weights(2))
    publisher.publish(3, weights(3))
    assert versions(emitted, 0) == []
    publisher.release(1)
    assert versions(emitted, 1) == [3]
    assert slow.held == {3}


def test_an_error_in_the_thread_is_raised_by_the_next_call(
    slow: SlowSender, emitted: "queue.Queue[WeightUpdate]"
):
    publisher = Publisher(slow, emit=emitted.put)
    publisher.release(7)
    publisher._thread.join(5)
    for call in (
        lambda: publisher.publish(1, weights(1)),
        lambda: publisher.release(1),
        publisher.close,
    ):
        with pytest.raises(WeightError, match="Version 7 is not held"):
            call()
    assert slow.is_closed


def test_an_error_of_emit_is_raised_by_the_next_call(slow: SlowSender):
    def refuse(update: WeightUpdate) -> None:
        raise ConnectionError(f"no engine takes version {update.version}")

    slow.may_publish.set()
    publisher = Publisher(slow, emit=refuse)
    publisher.publish(1, weights(1))
    publisher._thread.join(5)
    with pytest.raises(ConnectionError, match="no engine takes version 1"):
        publisher.close()


def test_a_failed_snapshot_leaves_the_publisher_usable(
    publisher: Publisher, slow: SlowSender, emitted: "queue.Queue[WeightUpdate]"
):
    slow.may_publish.set()
    for _ in range(3):
        with pytest.raises(AttributeError):
            publisher.publish(1, {"weight": None})  # type: ignore[dict-item]
    publisher.publish(2, weights(2))
    assert versions(emitted, 1) == [2]


def test_close_finishes_the_version_being_sent_and_drops_the_pending_one(
    slow: SlowSender, emitted: "queue.Queue[WeightUpdate]"
):
    publisher = Publisher(slow, emit=emitted.put)
    publisher.publish(1, weights(1))
    assert slow.is_publishing.wait(5)
    publisher.publish(2, weights(2))
    threading.Timer(0.1, slow.may_publish.set).start()
    publisher.close()
    assert versions(emitted, 1) == [1]


class FullSender(SlowSender):
    """Raises NoSpace until the test makes space."""

    def __init__(self) -> None:
        super().__init__(num_slots=9)
        self.may_publish.set()
        self.is_full = True
        self.num_refused = 0

    def publish(self, version: int, tensors: Mapping[str, torch.Tensor]) -> WeightUpdate:
        if self.is_full:
            self.num_refused += 1
            raise NoSpace(f"Version {version} could not be written.")
        return super().publish(version, tensors)


def test_without_space_the_newest_weights_are_tried_again(
    emitted: "queue.Queue[WeightUpdate]", capfd: pytest.CaptureFixture[str]
):
    full = FullSender()
    publisher = Publisher(full, emit=emitted.put)
    for version in range(1, 6):
        publisher.publish(version, weights(version))
        while full.num_refused < version:  # each publish wakes the thread for another try
            time.sleep(0.001)
    full.is_full = False
    publisher.publish(6, weights(6))
    assert versions(emitted, 1) == [6]
    assert publisher.superseded == 5
    assert full.published[6]["weight"].tolist() == [6, 6, 6]
    publisher.close()
    assert capfd.readouterr().err == "Version 1 could not be written. Trying for 60 s.\n"


def test_without_space_for_too_long_the_publisher_fails(emitted: "queue.Queue[WeightUpdate]"):
    publisher = Publisher(FullSender(), emit=emitted.put, patience_s=0.05)
    publisher.publish(1, weights(1))
    publisher._thread.join(5)
    with pytest.raises(NoSpace, match="Version 1 could not be written"):
        publisher.check()


def live_publisher(sender: SlowSender, emitted: "queue.Queue[WeightUpdate]") -> Publisher:
    return Publisher(sender, emit=emitted.put, copies=False)


def test_without_copies_weights_may_change_only_after_they_were_read(
    slow: SlowSender, emitted: "queue.Queue[WeightUpdate]"
):
    publisher, live = live_publisher(slow, emitted), weights(1)
    publisher.finish_reading()  # nothing is read before the first step
    publisher.publish(1, live)
    assert slow.is_publishing.wait(5)
    threading.Timer(0.1, slow.may_publish.set).start()
    publisher.finish_reading()
    live["weight"].fill_(99)
    assert slow.published[1]["weight"].tolist() == [1, 1, 1]
    assert slow.published[1]["weight"].dtype is torch.float32  # the sender converts it
    assert versions(emitted, 1) == [1]
    publisher.close()


def test_without_copies_a_version_that_waits_for_room_is_dropped_for_the_next(
    slow: SlowSender, emitted: "queue.Queue[WeightUpdate]"
):
    publisher = live_publisher(slow, emitted)
    slow.may_publish.set()
    publisher.publish(1, weights(1))
    assert versions(emitted, 1) == [1]
    publisher.publish(2, weights(2))  # version 1 is held
    publisher.finish_reading()
    assert publisher.superseded == 1
    publisher.publish(3, weights(3))
    publisher.release(1)
    assert versions(emitted, 1) == [3]
    publisher.close()


def test_without_copies_a_step_waits_neither_for_space_nor_for_a_dead_thread(
    emitted: "queue.Queue[WeightUpdate]",
):
    full = FullSender()
    publisher = live_publisher(full, emitted)
    publisher.publish(1, weights(1))
    publisher.finish_reading()
    assert publisher.superseded == 1
    publisher.release(7)
    publisher._thread.join(5)
    with pytest.raises(WeightError, match="Version 7 is not held"):
        publisher.finish_reading()


def test_shapes_may_change_between_snapshots(
    publisher: Publisher, slow: SlowSender, emitted: "queue.Queue[WeightUpdate]"
):
    slow.may_publish.set()
    slow.num_slots = 9
    for version, size in enumerate((3, 4, 2)):
        publisher.publish(version, {"weight": torch.full((size,), float(version))})
        assert versions(emitted, 1) == [version]
        assert slow.published[version]["weight"].tolist() == [version] * size


def test_a_snapshot_of_a_known_layout_is_one_operation_for_each_dtype_into_the_same_memory():
    snapshot = WeightSnapshot()
    snapshot.fill(0, weights(0), dtype=torch.bfloat16)
    places = [tensor.data_ptr() for tensor in snapshot.tensors.values()]
    newer = weights(1)
    with Operations() as operations:
        snapshot.fill(1, newer, dtype=torch.bfloat16)
    assert operations.names == ["_foreach_copy_", "_foreach_copy_"]  # of "weight" and "count"
    assert places == [tensor.data_ptr() for tensor in snapshot.tensors.values()]
    assert snapshot.tensors["weight"].tolist() == [1, 1, 1]
    snapshot.fill(2, newer, dtype=torch.float32)
    assert snapshot.tensors["weight"].dtype is torch.float32


def test_trainer_that_outruns_its_engines_delivers_only_whole_versions():
    """200 versions through real shared memory while a slow engine stages what it gets."""
    torch.set_num_threads(1)
    emitted: queue.Queue[WeightUpdate | None] = queue.Queue()
    publisher = Publisher(make_sender("shm", dtype=torch.float32), emit=emitted.put)
    released: queue.Queue[int] = queue.Queue()
    seen: list[int] = []

    def engine() -> None:
        receiver = make_receiver("shm")
        while (update := emitted.get(timeout=20)) is not None:
            tensors = receiver.stage(update)
            seen.append(update.version)
            for tensor in tensors.values():
                assert torch.all(tensor == update.version)
            time.sleep(0.002)
            released.put(update.version)
        receiver.close()

    thread = threading.Thread(target=engine)
    thread.start()
    live = {f"layer.{i}": torch.zeros(1000) for i in range(20)}
    for version in range(200):
        for tensor in live.values():
            tensor.fill_(version)
        publisher.publish(version, live)
        while not released.empty():
            publisher.release(released.get())
        time.sleep(0.0005)
    while 199 not in seen:
        assert thread.is_alive()
        publisher.release(released.get(timeout=20))
    emitted.put(None)
    thread.join(20)
    publisher.close()
    assert seen == sorted(set(seen))
    assert len(seen) + publisher.superseded == 200


def test_late_engine_borrows_the_newest_version_and_both_must_release_it(
    publisher: Publisher, slow: SlowSender, emitted: "queue.Queue[WeightUpdate]"
):
    slow.may_publish.set()
    publisher.publish(1, weights(1))
    assert versions(emitted, 1) == [1]
    lent: queue.Queue[WeightUpdate] = queue.Queue()
    publisher.lend(1, weights(1), answer=lent.put)
    assert versions(lent, 1) == [1]
    publisher.release(1)
    time.sleep(0.05)
    assert slow.held == {1}
    publisher.release(1)
    wait_until(lambda: not slow.held)
    # Nobody holds it any more: it is made ready once more, and not announced again.
    publisher.lend(1, weights(1), answer=lent.put)
    assert versions(lent, 1) == [1]
    assert slow.held == {1}
    assert emitted.empty()


def test_loan_waits_for_the_version_being_sent(
    publisher: Publisher, slow: SlowSender, emitted: "queue.Queue[WeightUpdate]"
):
    lent: queue.Queue[WeightUpdate] = queue.Queue()
    publisher.publish(1, weights(1))
    assert slow.is_publishing.wait(5)
    publisher.lend(1, weights(1), answer=lent.put)
    slow.may_publish.set()
    assert versions(lent, 1) == versions(emitted, 1) == [1]
    assert list(slow.published) == [1]


def test_loan_of_a_version_that_waits_to_be_sent_gets_no_older_one(
    publisher: Publisher, slow: SlowSender, emitted: "queue.Queue[WeightUpdate]"
):
    lent: queue.Queue[WeightUpdate] = queue.Queue()
    slow.num_slots = 2
    publisher.publish(1, weights(1))
    assert slow.is_publishing.wait(5)
    publisher.publish(2, weights(2))
    publisher.lend(2, weights(2), answer=lent.put)
    slow.may_publish.set()
    assert [emitted.get(timeout=5).version for _ in range(2)] == [1, 2]
    assert lent.get(timeout=5).version == 2
    assert lent.empty()


def wait_until(happens: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 5
    while not happens():
        assert time.monotonic() < deadline
        time.sleep(0.01)
