"""A worker's link whose other end is a test in the same process."""

import queue
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

from millrace.cluster.link import serve
from millrace.cluster.messages import Completed, Done, Message
from millrace.core.records import Completion


class FakeCall:
    """A call whose reply can be waited for."""

    def __init__(self, message: Message) -> None:
        self.message = message
        self._answers: queue.Queue[Message | BaseException] = queue.Queue()
        self.parts: list[Message] = []

    def reply(self, message: Message | None = None) -> None:
        self._answers.put(message or Done())

    def send_part(self, part: Message) -> None:
        assert self._answers.empty(), "a part comes before the reply"
        self.parts.append(part)

    def fail(self, error: BaseException) -> None:
        self._answers.put(error)

    def completions(self) -> list[Completion]:
        """Of a Generate call, from its parts and its reply."""
        last = self.result().completions
        ended = [part.completions for part in self.parts if isinstance(part, Completed)]
        return [c for one in (*ended, last) for c in one.values()]

    def result(self, timeout_s: float = 20) -> Any:
        answer = self._answers.get(timeout=timeout_s)
        if isinstance(answer, BaseException):
            raise answer
        assert self._answers.empty(), "a call is answered once"
        return answer


class FakeLink:
    """Calls by a queue instead of a socket; events in a list."""

    def __init__(self) -> None:
        self._inbox: queue.SimpleQueue[FakeCall] = queue.SimpleQueue()
        self.events: list[Message] = []

    def call(self, message: Message) -> FakeCall:
        call = FakeCall(message)
        self._inbox.put(call)
        return call

    def receive(self, timeout_s: float | None = None) -> FakeCall | None:
        try:
            return (
                self._inbox.get(timeout=timeout_s) if timeout_s != 0 else self._inbox.get_nowait()
            )
        except queue.Empty:
            return None

    def emit(self, message: Message) -> None:
        self.events.append(message)


@contextmanager
def in_thread(body: Callable[[], None]) -> Iterator[None]:
    """Run `body` beside the test, which tells it to stop; what it raises, the test raises."""
    with ThreadPoolExecutor(max_workers=1) as pool:
        running = pool.submit(body)
        yield
        running.result(20)


def run_beside(
    link: FakeLink, name: str, message: type[Message], start: Callable[..., Any]
) -> AbstractContextManager[None]:
    """Run a worker beside the test, as run_module(message, start) does in a process of its own."""
    return in_thread(partial(serve, link, name, message=message, start=start))  # pyright: ignore[reportArgumentType]
