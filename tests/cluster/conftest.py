"""A hub with its record of events, for tests that talk to real worker processes."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from millrace.cluster.fork_server import PRELOAD
from millrace.cluster.hub import Hub
from millrace.cluster.messages import Message


@pytest.fixture
def events() -> list[tuple[str, Message]]:
    return []


@pytest.fixture
async def hub(
    tmp_path: Path, events: list[tuple[str, Message]], warm_fork_server: None
) -> AsyncIterator[Hub]:
    async with Hub(
        log_dir=tmp_path / "logs",
        on_event=lambda worker, message: events.append((worker, message)),
        stop_timeout_s=4.0,
        preload=PRELOAD,
        start_timeout_s=30.0,
    ) as hub:
        yield hub
