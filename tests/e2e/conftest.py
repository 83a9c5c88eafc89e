import pytest


@pytest.fixture(scope="session", autouse=True)
def _warm(warm_fork_server: None) -> None:
    """Runs in this folder fork their workers from one server."""
