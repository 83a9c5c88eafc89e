"""The life of a worker process: from its command line over its start message to its last message.

Every worker module has a `main(link, name)` that calls serve(), and ends with `run_worker(main)`
under its __main__.

Promise: a start that fails is answered with its error, and the worker waits for another. A worker
that fails later sends the reason before it exits.
"""

import argparse
import contextlib
import faulthandler
import os
import signal
import sys
import traceback
from collections.abc import Callable
from types import FrameType
from typing import NoReturn, Protocol, TypeVar

from millrace.cluster.credentials import Credentials
from millrace.cluster.link import Link, WorkerCall
from millrace.cluster.messages import Failed, Message, Stop, WorkerProgress
from millrace.cluster.parent_death import exit_with_parent
from millrace.cluster.wire import WireError
from millrace.core.errors import MillraceError
from millrace.core.spans import Timeline

StartMessage = TypeVar("StartMessage", bound=Message)


class WorkerLoop(Protocol):
    """What a worker does between its start and its end."""

    def serve(self) -> None:
        """Answer calls until Stop."""
        ...


def serve(
    link: Link,
    name: str,
    *,
    message: type[StartMessage],
    start: Callable[[StartMessage, Link, Timeline], WorkerLoop],
) -> None:
    """Wait for the start message, load, and serve until Stop.

    `start` is called with each message of this type until one does not fail.
    """
    timeline = Timeline(name, name="load", busy=True)
    while True:
        timeline.enter("no work", busy=False)
        call = link.receive(None)
        assert call is not None
        if isinstance(call.message, Stop):
            call.reply()
            return
        if not isinstance(call.message, message):
            call.fail(unexpected(call, reason=f"it expects {message.__name__} first"))
            continue
        timeline.enter("load", busy=True)
        link.emit(WorkerProgress(spans=timeline.drain(), counters={}))
        try:
            loop = start(call.message, link, timeline)
        except Exception as error:  # noqa: BLE001 - raised again in the controller
            call.fail(error)
            continue
        call.reply()
        loop.serve()
        return


def unexpected(call: WorkerCall, *, reason: str = "it is running") -> MillraceError:
    return MillraceError(f"A worker cannot handle {type(call.message).__name__} now: {reason}.")


def run_worker(main: Callable[[Link, str], None]) -> NoReturn:
    """Run `main(link, name)` as this process.

    SIGINT is ignored, because Ctrl-C is for the controller. SIGTERM raises SystemExit in main.
    SIGUSR1 writes the stacks of all threads to the log.
    """
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, _exit)
    options = _parse(sys.argv[1:])
    exit_with_parent(options.parent)
    link = Link(
        options.address,
        name=options.name,
        credentials=Credentials.take(os.environ),
        heartbeat_timeout_s=options.heartbeat_timeout,
    )
    try:
        main(link, options.name)
    except Exception as error:  # noqa: BLE001 - reported to the controller
        traceback.print_exc()
        reason = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
        # If the link itself broke, the controller has the log and the exit code.
        with contextlib.suppress(WireError):
            link.emit(Failed(reason=reason, traceback=traceback.format_exc()))
        sys.exit(1)
    finally:
        link.close()
    sys.exit(0)


def _parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="A Millrace worker; the controller or `millrace join` starts it."
    )
    parser.add_argument("--name", required=True)
    parser.add_argument("--address", required=True, help="where the controller listens")
    parser.add_argument("--parent", type=int, default=os.getppid(), help="pid of the parent")
    parser.add_argument(
        "--heartbeat-timeout", type=float, help="seconds; for a controller on another host"
    )
    return parser.parse_args(argv)


def _exit(signum: int, _frame: FrameType | None) -> NoReturn:
    sys.exit(128 + signum)
