"""Names from settings and sockets never leave the folder they are used in."""

import asyncio
import os
from pathlib import Path
from types import SimpleNamespace

import pytest
from fake_checkpoint import write_fake_checkpoint
from hypothesis import given
from hypothesis import strategies as st

from millrace.cluster.hub import Hub
from millrace.cluster.join.host import _JoiningHost
from millrace.cluster.launchers.launcher import JoinSlot, WorkerSpec
from millrace.cluster.process import LocalLauncher
from millrace.config import load_config
from millrace.core.errors import CheckpointError, ConfigError
from millrace.core.files import check_file_name
from millrace.scoring.pool import check_scorers, resolve_scorer
from millrace.training.checkpoints.directory import prune_checkpoints

LEADING_AWAY = ["../x", "/etc/x", "a/b", "..", ".", "", "a\\b", "a\nb", "x" * 300, "a\x00b"]


def files_in(folder: Path) -> list[Path]:
    return list(folder.iterdir())


@pytest.mark.parametrize("name", LEADING_AWAY)
def test_scorer_name_that_leaves_its_folder_is_refused_before_the_start(name):
    table = {"type": "http", "url": "http://h", "name": name or "."}
    config = load_config({"model": "m", "scorers": [table]})
    with pytest.raises(ConfigError, match=r"^A scorer has the name .*; files of the run are") as e:
        check_scorers([resolve_scorer(config.scorers[0], section="scorers.0")], ())
    assert "\n" not in str(e.value)


@pytest.mark.parametrize("name", LEADING_AWAY)
async def test_worker_name_that_leaves_its_folder_is_not_launched(name, tmp_path: Path):
    async with Hub(log_dir=tmp_path, on_event=lambda *_: None) as hub:
        with pytest.raises(ConfigError, match="A worker has the name"):
            await hub.launch(name, "no_such_module")
    assert files_in(tmp_path) == []


class SilentSocket:
    async def recv_multipart(self, *, copy: bool) -> None:
        await asyncio.Event().wait()


async def test_joining_host_refuses_worker_names_that_leave_the_folder(tmp_path: Path):
    ticket = SimpleNamespace(heartbeat_timeout_s=60.0)
    host = _JoiningHost(
        dealer=SilentSocket(),  # type: ignore[arg-type]
        ticket=ticket,  # type: ignore[arg-type]
        launcher=LocalLauncher(address="tcp://127.0.0.1:1", keys=None, log_dir=tmp_path),
        spec=WorkerSpec(name="engine", module="no_such_module", token=""),
        log=print,
    )
    slots = [JoinSlot(name="../../engine", token="t")]
    with pytest.raises(ConfigError, match=r"A worker of this run has the name '\.\./\.\./engine'"):
        await host.serve(slots, restarts=False)
    assert files_in(tmp_path) == []


@given(st.text(max_size=250))
def test_accepted_names_stay_in_their_folder(name: str):
    try:
        check_file_name(name, of="It")
    except ConfigError:
        return
    folder = Path("/run/logs")
    path = folder / f"{name}.log"
    assert path.parent == folder
    assert path.resolve().parent == folder.resolve()
    assert (folder / name).parent == folder


def test_pruning_does_not_follow_links(tmp_path: Path):
    folder, elsewhere = tmp_path / "checkpoints", tmp_path / "elsewhere"
    write_fake_checkpoint(folder / "step_2", run_state={})
    elsewhere.mkdir()
    (elsewhere / "precious").write_text("kept")
    (folder / "step_1").symlink_to(elsewhere)
    with pytest.raises(CheckpointError, match="could not be removed"):
        prune_checkpoints(folder, keep=1, good=set())
    assert (elsewhere / "precious").read_text() == "kept"


def mode_of(path: Path) -> int:
    return path.stat().st_mode & 0o777


@pytest.mark.parametrize("umask", [0o000, 0o077])
async def test_local_socket_is_in_a_private_folder(umask: int, tmp_path: Path):
    before = os.umask(umask)
    try:
        async with Hub(runtime_dir=tmp_path, log_dir=tmp_path, on_event=lambda *_: None) as hub:
            folder = Path(hub.address.removeprefix("ipc://")).parent
            assert mode_of(folder) == 0o700
    finally:
        os.umask(before)
    assert files_in(tmp_path) == []
