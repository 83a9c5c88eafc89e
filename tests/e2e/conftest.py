from collections.abc import Iterator

import pytest
from project import Command


@pytest.fixture(scope="session", autouse=True)
def _warm(warm_fork_server: None) -> None:
    """Runs in this folder fork their workers from one server."""


@pytest.fixture
def commands() -> Iterator[list[Command]]:
    """Commands in this list do not outlive the test."""
    commands: list[Command] = []
    yield commands
    for command in commands:
        if command.process.poll() is None:
            command.process.kill()
        command.process.communicate()
