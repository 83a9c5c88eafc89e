"""The main loop of a process that holds a model: an engine, a reward model or a teacher.

The main thread computes. It takes the calls that have arrived between two forward passes, and waits
for calls only when it has nothing to compute.
"""

import time

from millrace.cluster.link import Link, WorkerCall
from millrace.cluster.messages import Stop, WorkerProgress
from millrace.core.spans import Timeline

PROGRESS_S = 0.25
STAGING_POLL_S = 0.002  # how often an idle worker checks for staged weights


class ModelWorker:
    """All methods run in the main thread."""

    def __init__(self, link: Link, *, timeline: Timeline) -> None:
        self._timeline = timeline
        self._link = link
        self._counters: dict[str, float] = {}
        self._reported_s = 0.0  # monotonic

    def serve(self) -> None:
        """Compute and reply until Stop."""
        try:
            while (stop := self._take_calls()) is None:
                self._compute()
                if time.monotonic() - self._reported_s >= PROGRESS_S:
                    self._report()
        finally:
            self._close()
        self._report()
        stop.reply()

    def _wait_s(self) -> float:
        """How long to wait for a call; 0 if there is work."""
        raise NotImplementedError

    def _handle(self, call: WorkerCall) -> None:
        raise NotImplementedError

    def _compute(self) -> None:
        """Run one forward pass, if there is work."""
        raise NotImplementedError

    def _close(self) -> None:
        """Release what the worker holds. The process ends afterwards."""

    def _take_calls(self) -> WorkerCall | None:
        """Handle the calls that have arrived; returns Stop."""
        wait_s = self._wait_s()
        if wait_s > 0:  # entered first, or the wait would count as computing
            self._timeline.enter(self._idle_reason(), busy=False)
        call = self._receive(wait_s)
        while call is not None:
            if isinstance(call.message, Stop):
                return call
            self._handle(call)
            call = self._receive(0)
        return None

    def _idle_reason(self) -> str:
        return "no work"

    def _receive(self, timeout_s: float) -> WorkerCall | None:
        return self._link.receive(timeout_s)

    def _report(self) -> None:
        self._reported_s = time.monotonic()
        self._link.emit(self._progress())

    def _progress(self) -> WorkerProgress:
        return WorkerProgress(spans=self._timeline.drain(), counters=dict(self._counters))
