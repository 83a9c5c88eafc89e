"""Folders that go with their process, also with one that was killed."""

import os
import signal
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

from millrace.core.files import private_folder

OWNER = """
import sys, time
from pathlib import Path
from millrace.core.files import private_folder

with private_folder(Path(sys.argv[1])) as folder:
    print(folder, flush=True)
    time.sleep(60)
"""


def start_owner(parent: Path) -> tuple[subprocess.Popen[str], Path]:
    command = [sys.executable, "-c", OWNER, str(parent)]
    owner = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert owner.stdout is not None
    return owner, Path(owner.stdout.readline().strip())


def test_folder_is_private_and_removed_on_exit(tmp_path):
    with private_folder(tmp_path) as folder:
        assert folder.stat().st_mode & 0o777 == 0o700
        (folder / "socket").touch()
    assert list(tmp_path.iterdir()) == []


def test_folder_has_a_path_that_is_short_enough_for_sockets(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with private_folder() as folder, socket.socket(socket.AF_UNIX) as listener:
        assert folder.parent == tmp_path
        listener.bind(str(folder / "hub"))
    (long := tmp_path / "long" / ("x" * 80)).mkdir(parents=True)
    monkeypatch.setattr(tempfile, "tempdir", str(long))
    with private_folder() as folder, socket.socket(socket.AF_UNIX) as listener:
        assert folder.parent == Path("/tmp")
        listener.bind(str(folder / "hub"))
    assert not folder.exists()


def test_folders_of_killed_processes_are_removed_and_those_of_live_ones_are_not(tmp_path):
    other = tmp_path / "millrace-of-another-program"  # which does not lock it
    other.mkdir()
    living, kept = start_owner(tmp_path)
    dead, left = start_owner(tmp_path)
    dead.send_signal(signal.SIGKILL)
    dead.communicate()
    assert left.is_dir()
    with private_folder(tmp_path) as folder:
        assert set(tmp_path.iterdir()) == {other, kept, folder}
    living.kill()
    living.communicate()


def test_a_lock_that_is_a_link_is_not_opened(tmp_path):
    """Another user may put one into a folder of theirs, to a file or pipe of this user."""
    os.mkfifo(pipe := tmp_path / "pipe")
    (folder := tmp_path / "millrace-of-another-user").mkdir()
    (folder / "owner.lock").symlink_to(pipe)
    command = [sys.executable, "-c", OWNER.replace("60", "0"), str(tmp_path)]
    subprocess.run(command, check=True, timeout=20)  # opening the pipe would block
    assert folder.is_dir()
