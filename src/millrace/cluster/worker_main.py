"""How a worker begins: it waits until it is told what to be, and then serves as that.

Promise: a start that fails is answered with its sentence, and the worker waits for another.
"""

from collections.abc import Callable
from typing import Protocol, TypeVar

from millrace.cluster.link import Link, WorkerCall
from millrace.cluster.messages import Message, Stop, WorkerProgress
from millrace.core.errors import MillraceError
from millrace.core.spans import Timeline

Start = TypeVar("Start", bound=Message)


class Serving(Protocol):
    def serve(self) -> None:
        """Answer until told to stop."""
        ...


def serve_as_told(
    link: Link,
    name: str,
    *,
    message: type[Start],
    start: Callable[[Start, Link, Timeline], Serving],
) -> None:
    """`start` makes what serves of the first `message` that does not fail."""
    timeline = Timeline(name, name="load", busy=True)
    while True:
        timeline.enter("no work", busy=False)
        call = link.receive(None)
        assert call is not None
        if isinstance(call.message, Stop):
            call.reply()
            return
        if not isinstance(call.message, message):
            call.fail(out_of_turn(call, but="start it first"))
            continue
        timeline.enter("load", busy=True)
        link.emit(WorkerProgress(spans=timeline.drain(), counters={}))
        try:
            worker = start(call.message, link, timeline)
        except MillraceError as error:
            call.fail(error)
            continue
        call.reply()
        worker.serve()
        return


def out_of_turn(call: WorkerCall, *, but: str = "it is already running") -> MillraceError:
    return MillraceError(f"A worker cannot take {type(call.message).__name__} now; {but}.")
