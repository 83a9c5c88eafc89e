"""Publishes the weights of each step in a thread of the trainer, while the next step runs.

Promise: publish() costs the trainer one copy of the weights on their device and never waits for
engines. Versions are emitted in order; a version that is superseded before it is sent is never
emitted. An engine that joins late may borrow the newest version. The memory of a version is freed
once it has been released for its emission and for each loan.

Without snapshots, the thread reads the trainer's own weights, which saves the memory of the copies:
then finish_reading() must be called before the weights change. It waits for the version that is
being sent, and drops one that waits for room: engines get the one after it.

Threads: the trainer's main thread calls publish, finish_reading, release and close; only the
publisher's own thread uses the sender. Bounds: two snapshots exist, one being sent and one pending.
An error in the thread ends it and is raised by the next call. With sharded weights (DTensor), each
rank has a publisher of its shards, and their senders gather (gathering.py).
"""

import contextlib
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, dataclass, replace
from typing import Any

import torch

from millrace.core.records import DEFAULT_POLICY, WeightUpdate
from millrace.models.sharding import local_part
from millrace.weights.backends import NoSpace, Superseded
from millrace.weights.gathering import WeightSender
from millrace.weights.packing import copy_all, transfer_dtype

RETRY_S = 1.0


class WeightSnapshot:
    """A copy of one version's weights, whose memory is reused; or the weights themselves."""

    def __init__(self) -> None:
        self.version = -1
        self.is_announced = True  # False = only lent
        self.tensors: dict[str, torch.Tensor] = {}
        self._layout: object = None  # of what it has memory for
        self._parts: list[torch.Tensor] = []  # of `tensors` on this rank
        self._device: torch.device | None = None  # set if the weights are on a GPU
        self._copied: torch.cuda.Event | None = None  # likewise
        self._stream: torch.cuda.Stream | None = None

    def fill(
        self, version: int, tensors: Mapping[str, torch.Tensor], *, dtype: torch.dtype
    ) -> None:
        self.version = version
        # The trainer waits for this, so everything else is done once per layout.
        parts = [local_part(tensor) for tensor in tensors.values()]
        shapes = [(name, tensor.shape) for name, tensor in tensors.items()]
        layout = (dtype, shapes, [(part.shape, part.dtype, part.device) for part in parts])
        if layout != self._layout:
            self._layout = None  # until the memory is allocated
            copied: dict[str, torch.Tensor] = {}
            for name, tensor in tensors.items():
                sent_as = transfer_dtype(name, tensor, dtype=dtype)
                copied[name] = torch.empty_like(tensor, dtype=sent_as, requires_grad=False)
            self.tensors = copied
            self._parts = [local_part(tensor) for tensor in self.tensors.values()]
            self._device = next((part.device for part in self._parts if part.is_cuda), None)
            self._layout = layout
        copy_all(self._parts, parts)
        self._record()

    def refer_to(self, version: int, tensors: Mapping[str, torch.Tensor]) -> None:
        """Take the weights themselves instead of a copy."""
        self.version, self.tensors, self._layout = version, dict(tensors), None
        self._device = next((t.device for t in self.tensors.values() if t.is_cuda), None)
        self._record()

    def _record(self) -> None:
        if self._device is not None:
            copied = self._copied = torch.cuda.Event()
            copied.record(torch.cuda.current_stream(self._device))
            self._stream = self._stream or torch.cuda.Stream(self._device)

    def reading(self) -> contextlib.AbstractContextManager[Any]:
        """Inside, the copy is complete, and reads do not queue behind the next step."""
        if self._copied is None:
            return contextlib.nullcontext()
        self._copied.synchronize()
        return torch.cuda.stream(self._stream)


@dataclass(eq=False)
class Publisher:
    sender: WeightSender
    _: KW_ONLY
    emit: Callable[[WeightUpdate], None]  # called in the publisher's thread with a ready update
    patience_s: float = 60.0  # without space for a version
    policy: str = DEFAULT_POLICY  # whose versions these are
    copies: bool = True  # snapshots are taken
    superseded: int = 0  # versions never sent, because a newer one came first

    def __post_init__(self) -> None:
        self._no_space_since_s: float | None = None  # monotonic; set by the thread
        self._changed = threading.Condition()
        # All below is guarded by the condition.
        self._spare = [WeightSnapshot(), WeightSnapshot()]
        self._pending: WeightSnapshot | None = None
        self._sending: int | None = None  # version
        # Of the next ready version that is at least this one.
        self._borrowers: list[tuple[int, Callable[[WeightUpdate], None]]] = []
        self._ready: dict[int, WeightUpdate] = {}  # by version; not released
        self._holders: Counter[int] = Counter()  # by version
        self._releases: list[int] = []
        self._is_closing = False
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="publisher", daemon=True)
        self._thread.start()

    def lend(
        self,
        version: int,
        tensors: Mapping[str, torch.Tensor],
        *,
        answer: Callable[[WeightUpdate], None],
    ) -> None:
        """Call `answer` with the newest version, which is this one, when it is ready; here or in
        the publisher's thread. Each loan needs its own release()."""
        with self._changed:
            self.check()
            if (ready := self._ready.get(version)) is not None:
                self._holders[version] += 1
            else:
                self._borrowers.append((version, answer))
            is_coming = self._sending == version or self._pending is not None
        if ready is not None:
            answer(ready)
        elif not is_coming:
            self.publish(version, tensors, is_announced=False)

    def publish(
        self, version: int, tensors: Mapping[str, torch.Tensor], *, is_announced: bool = True
    ) -> None:
        """Take a snapshot and return; the update is emitted when it is ready, unless it is only to
        be lent."""
        with self._changed:
            self.check()
            snapshot, self._pending = self._pending, None  # ours while it is filled
            if snapshot is None:
                snapshot = self._spare.pop()
            else:
                self.superseded += snapshot.is_announced
        snapshot.is_announced = is_announced
        try:
            if self.copies:
                snapshot.fill(version, tensors, dtype=self.sender.dtype)
            else:
                snapshot.refer_to(version, tensors)
        except BaseException:
            with self._changed:
                self._spare.append(snapshot)
            raise
        with self._changed:
            if self._pending is not None:  # put back by the thread meanwhile
                self._spare.append(self._pending)
                self.superseded += self._pending.is_announced
            self._pending = snapshot
            self._changed.notify()

    def finish_reading(self) -> None:
        """Call this before the weights change."""
        if self.copies:
            return
        with self._changed:
            while self._sending is not None or self._can_send:
                self.check()
                self._changed.wait()
            self.check()
            if self._pending is not None:
                self._spare.append(self._pending)
                self.superseded += self._pending.is_announced
                self._pending = None

    @property
    def _can_send(self) -> bool:
        """Whether the thread will send what is pending without waiting for anything."""
        has_space = self._no_space_since_s is None and self.sender.has_room
        return self._pending is not None and has_space

    def release(self, version: int) -> None:
        with self._changed:
            self.check()
            self._holders[version] -= 1
            if self._holders[version] <= 0:
                del self._holders[version]
                self._ready.pop(version, None)
                self._releases.append(version)
                self._changed.notify()

    def close(self) -> None:
        """Finish the version being sent, drop the pending one, and free all memory."""
        with self._changed:
            self._is_closing = True
            self._changed.notify()
        self._thread.join()
        self.sender.close()
        self.check()

    def check(self) -> None:
        """Raise the error that ended the thread, if one did."""
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        try:
            while (work := self._next_work()) is not None:
                snapshot, releases = work
                for version in releases:
                    self.sender.release(version)
                if snapshot is not None:
                    self._send(snapshot)
        except BaseException as error:  # noqa: BLE001 - raised by the trainer's next call
            with self._changed:
                self._error = error
                self._changed.notify_all()

    def _next_work(self) -> tuple[WeightSnapshot | None, list[int]] | None:
        """What to send and what to release; None = close."""
        with self._changed:
            while not self._is_closing:
                releases, self._releases = self._releases, []
                snapshot = self._pending if self.sender.has_room else None
                if snapshot is not None:
                    self._pending, self._sending = None, snapshot.version
                if snapshot is not None or releases:
                    return snapshot, releases
                self._changed.wait()
        return None

    def _send(self, snapshot: WeightSnapshot) -> None:
        try:
            with snapshot.reading():
                update = self.sender.publish(snapshot.version, snapshot.tensors)
            update = replace(update, policy=self.policy)
        except NoSpace as error:
            self._try_later(snapshot, error)
            return
        except Superseded:  # another rank has a newer version, which follows here, too
            update = None
        with self._changed:
            self._sending = None
            self._changed.notify_all()
            self._spare.append(snapshot)
            if update is None:
                self.superseded += snapshot.is_announced
                return
            self._no_space_since_s = None
            version, waiting = update.version, self._borrowers
            borrowers = [answer for wanted, answer in waiting if wanted <= version]
            self._borrowers = [one for one in waiting if one[0] > version]
            self._ready[version] = update
            self._holders[version] = len(borrowers) + snapshot.is_announced
        for answer in borrowers:
            answer(update)
        if snapshot.is_announced:
            self.emit(update)

    def _try_later(self, snapshot: WeightSnapshot, error: NoSpace) -> None:
        """Make it pending again, or drop it for a newer one; engines keep what they have. Raises
        after patience_s without space, as the run would wait forever."""
        now_s = time.monotonic()
        if self._no_space_since_s is None:
            self._no_space_since_s = now_s
            print(f"{error} Trying for {self.patience_s:g} s.", file=sys.stderr, flush=True)
        if now_s - self._no_space_since_s >= self.patience_s:
            raise error
        with self._changed:
            self._sending = None
            self._changed.notify_all()
            if self._pending is None:
                self._pending = snapshot
            else:
                self._spare.append(snapshot)
                self.superseded += 1
            if not self._is_closing:
                self._changed.wait(min(RETRY_S, self.patience_s))
