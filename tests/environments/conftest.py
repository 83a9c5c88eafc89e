"""What most tests of episodes need."""

from collections.abc import Iterator

import pytest

from millrace.environments.loop_thread import LoopThread


@pytest.fixture(scope="module")
def thread() -> Iterator[LoopThread]:
    """Where environments run."""
    with LoopThread("environments") as thread:
        yield thread
