import pytest


@pytest.fixture(scope="session", autouse=True)
def _warm(warm_fork_server: None) -> None:
    """Commands in this folder are forked from one server."""
