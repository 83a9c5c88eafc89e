"""Checkpoints in an S3 store: a real server, which `make test-adapters` installs."""

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from fake_checkpoint import write_fake_checkpoint

from millrace.core.errors import CheckpointError
from millrace.training.checkpoints.directory import damage_to, write_checkpoint
from millrace.training.checkpoints.store import CheckpointStore, newest_with_store

pytest.importorskip("moto")
s3fs = pytest.importorskip("s3fs")

URL = "s3://bucket/runs/one"
UPLOAD = """
import sys
from pathlib import Path
from millrace.training.checkpoints.store import CheckpointStore
CheckpointStore(sys.argv[1]).upload(Path(sys.argv[2]), keep=2)
"""


@pytest.fixture
def server(monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "test")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "test")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{port}")
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    s3fs.S3FileSystem.clear_instance_cache()
    try:
        _until(lambda: _is_listening(port))
        s3fs.S3FileSystem().mkdir("bucket")
        yield process
    finally:
        process.kill()
        process.wait()
        s3fs.S3FileSystem.clear_instance_cache()


def _is_listening(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def _until(condition) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def checkpoint(run_dir: Path, step: int) -> Path:
    directory = run_dir / "checkpoints" / f"step_{step}"
    write_fake_checkpoint(directory, run_state={"version": step})
    return directory


def large_checkpoint(run_dir: Path, step: int) -> Path:
    """Large enough that a kill arrives during the upload."""
    directory = run_dir / "checkpoints" / f"step_{step}"

    def write(folder: Path) -> None:
        for name in ("config.json", "trainer_state.pt"):
            (folder / name).write_text("{}")
        for number in range(60):
            (folder / f"model-{number}.safetensors").write_bytes(bytes(200_000))

    write_checkpoint(directory, write=write, run_state={"version": step}, needed_bytes=0)
    return directory


def test_run_resumes_from_s3_after_kills_during_uploads(server, tmp_path):
    store = CheckpointStore(URL)
    store.upload(checkpoint(tmp_path / "a", 1), keep=2)
    directory = large_checkpoint(tmp_path / "a", 2)
    s3 = s3fs.S3FileSystem(use_listings_cache=False)
    for num_files in (1, 10):
        process = subprocess.Popen([sys.executable, "-c", UPLOAD, URL, str(directory)])
        _until(lambda n=num_files: len(_files(s3, "step_2")) >= n)
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        assert num_files <= len(_files(s3, "step_2")) < 63
        assert store.steps() == [1]
        assert newest_with_store(tmp_path / f"b{num_files}", store).directory.name == "step_1"
    store.upload(directory, keep=1)
    found = newest_with_store(tmp_path / "c", store)
    assert found.directory.name == "step_2"
    assert damage_to(found.directory) is None
    assert _files(s3, "step_1") == []


def _files(s3, name: str) -> list[str]:
    return s3.find(f"bucket/runs/one/{name}")


def test_store_that_is_gone_or_missing_is_one_sentence(server, tmp_path):
    directory = checkpoint(tmp_path, 1)
    with pytest.raises(CheckpointError, match=r"did not take step_1 \(.*bucket does not exist"):
        CheckpointStore("s3://other/run").upload(directory, keep=1)
    server.kill()
    server.wait()
    s3fs.S3FileSystem.clear_instance_cache()
    with pytest.raises(CheckpointError, match=r"cannot be read \(") as caught:
        CheckpointStore(URL).steps()
    assert "\n" not in str(caught.value)
