"""Signals, as a command on its own event loop handles them: sent to this process."""

import asyncio
import os
import signal
from collections.abc import Iterator

import pytest

from millrace.cluster.event_loop import run_on_own_loop
from millrace.core.errors import Terminated

SIGNALS = (signal.SIGINT, signal.SIGTERM)


@pytest.fixture
def python_handler() -> Iterator[None]:
    """Python's own handler of SIGINT, also if the tests run in the background and ignore it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("number", SIGNALS)
def test_signal_cancels_the_command_and_handlers_are_restored(number):
    before = [signal.getsignal(each) for each in SIGNALS]
    cleaned_up = False

    async def command() -> None:
        nonlocal cleaned_up
        asyncio.get_running_loop().call_soon(os.kill, os.getpid(), number)
        try:
            await asyncio.sleep(1000)
        finally:
            cleaned_up = True

    with pytest.raises(KeyboardInterrupt) as raised:
        run_on_own_loop(command)
    assert isinstance(raised.value, Terminated) == (number == signal.SIGTERM)
    assert cleaned_up
    assert [signal.getsignal(each) for each in SIGNALS] == before


def test_ctrl_c_after_a_command_interrupts_its_caller(python_handler):
    async def command() -> str:
        return "done"

    assert run_on_own_loop(command) == "done"
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)
