import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import settings

# tests/fakes.py is imported by name from every folder below.
sys.path.insert(0, str(Path(__file__).parent))

from tiny_model import make_tiny_model

from millrace.cluster.fork_server import shared_fork_server
from millrace.environments.threads import LoopThread

# The same examples in every run, and no limit on the time of one, which depends on the machine.
settings.register_profile("millrace", deadline=None, derandomize=True)
settings.load_profile("millrace")


@pytest.fixture(scope="session")
def model(tmp_path_factory) -> Path:
    """A directory with a model, for all tests that only read it."""
    return make_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="session")
def warm_fork_server() -> Iterator[None]:
    """The fork server of all runs in this process; without it, each run imports torch anew."""
    with shared_fork_server():
        yield


@pytest.fixture(scope="module")
def thread() -> Iterator[LoopThread]:
    """The thread on which environments run."""
    with LoopThread("environments") as thread:
        yield thread


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu") is not None:
            item.add_marker(pytest.mark.skip(reason="needs CUDA"))
