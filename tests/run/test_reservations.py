"""What a run reserves at a cluster before its workers start."""

from types import SimpleNamespace
from typing import Any

import pytest

from millrace.cluster.launchers.launcher import HostDevice, Launcher
from millrace.config import load_config
from millrace.run.resume import Cursor
from millrace.run.workers import RunWorkers
from millrace.weights.broadcaster import VersionBroadcaster


@pytest.mark.parametrize(
    ("trains", "expected"), [(True, [["trainer"], ["engine-0"]]), (False, [["engine-0"]])]
)
async def test_evaluation_reserves_nothing_for_ranks(trains, expected):
    """Ray refuses an empty reservation."""
    reserved: list[list[str]] = []

    class Cluster(Launcher):
        async def reserve(self, workers):
            reserved.append([*workers])

    config = load_config({"model": "m", "cluster": {"launcher": "ray", "threads": 1}})
    prepared: Any = SimpleNamespace(
        config=config,
        given=config,
        policies={},
        checkpoint=None,
        cursor=Cursor(),
        devices=(HostDevice(name="cpu", kind="1 core", total_bytes=2**30),),
    )
    unused: Any = None
    workers = RunWorkers(
        prepared=prepared,
        hub=unused,
        launcher=Cluster(),
        worker_pool=unused,
        gpu_env={},
        on_phase=lambda *_: None,
        broadcasters={None: VersionBroadcaster(version=0)},
        trains=trains,
    )
    await workers.reserve()
    assert reserved == expected
