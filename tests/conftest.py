"""Fixtures of all tests. Only functions import torch here: the process that starts the workers of
pytest-xdist reads this file as well, and runs no test."""

import gc
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

# tests/fakes.py is imported by name from every folder below.
sys.path.insert(0, str(Path(__file__).parent))

from forked_workers import WorkerServer, start_fork_server

from millrace.cluster.fork_server import is_supported, shared_fork_server
from millrace.environments.threads import LoopThread

# The same examples in every run, and no limit on the time of one, which depends on the machine.
settings.register_profile("millrace", deadline=None, derandomize=True)
settings.load_profile("millrace")


@pytest.fixture(scope="session")
def model(tmp_path_factory) -> Path:
    """A directory with a model, for all tests that only read it."""
    from tiny_model import make_tiny_model

    return make_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="session")
def warm_fork_server() -> Iterator[None]:
    """The fork server of all runs in this process; without it, each run imports torch anew."""
    with shared_fork_server(start=start_fork_server):
        yield


@pytest.fixture(scope="module")
def thread() -> Iterator[LoopThread]:
    """The thread on which environments run."""
    with LoopThread("environments") as thread:
        yield thread


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--fork-workers",
        action="store_true",
        help="fork the workers of pytest-xdist from a process that has imported the tests",
    )


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_setupnodes(config: pytest.Config, specs: list) -> None:
    has_gpu = Path("/dev/nvidiactl").exists()  # collecting the tests initialises CUDA then
    if not config.option.fork_workers or not is_supported() or has_gpu:
        return
    folder = tempfile.TemporaryDirectory(prefix="millrace-tests-")
    server = WorkerServer(folder.name, collect=config.args)
    config.add_cleanup(folder.cleanup)
    config.add_cleanup(server.close)  # runs first
    for spec in specs:
        spec.python = server.python


def pytest_collectstart() -> None:
    gc.disable()  # nearly all objects that are created now belong to modules, and stay


# Long files from the end of the tree run first, so that no process waits for them at the end.
LATE_AND_LONG = ("test_equality.py", "test_layers.py", "test_route_replay.py")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    import torch

    items.sort(key=lambda item: item.path.name not in LATE_AND_LONG)
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu") is not None:
            item.add_marker(pytest.mark.skip(reason="needs CUDA"))


def pytest_collection_finish() -> None:
    gc.collect()
    gc.freeze()  # or each full collection during the tests would visit all modules again
    gc.enable()
