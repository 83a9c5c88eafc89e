import gc
import os
import signal
import sys
from pathlib import Path

import psutil
import pytest
import torch
from forked_program import start_program

from millrace.core.errors import WeightError
from millrace.weights.transports.memory import DEFAULT_BACKING, Backing, Segment, ShmRecvBackend

linux = pytest.mark.skipif(sys.platform != "linux", reason="memfd is Linux's")
BACKINGS = [pytest.param("memfd", marks=linux), "file"]


@pytest.mark.parametrize("backing", BACKINGS)
def test_reader_sees_what_the_owner_writes(backing: Backing):
    segment, reader = Segment(100, backing=backing), ShmRecvBackend(keep=2)
    segment.flat[:] = torch.arange(100)
    mapped = reader.map(segment.location, num_bytes=100)
    assert mapped.tolist() == list(range(100))
    segment.flat[0] = 7
    assert reader.map(segment.location, num_bytes=100)[0] == 7
    segment.close()
    reader.close()


@pytest.mark.parametrize("backing", BACKINGS)
def test_tensors_outlive_reader_and_owner(backing: Backing):
    segment, reader = Segment(4000, backing=backing), ShmRecvBackend(keep=1)
    segment.flat.view(torch.float32)[:] = 2.5
    tensor = reader.map(segment.location, num_bytes=4000).view(torch.float32)[10:20]
    reader.close()
    segment.close()
    gc.collect()
    assert torch.equal(tensor, torch.full((10,), 2.5))


@pytest.mark.parametrize("backing", BACKINGS)
def test_closed_segment_cannot_be_opened(backing: Backing):
    segment, reader = Segment(10, backing=backing), ShmRecvBackend(keep=1)
    location = segment.location
    segment.close()
    segment.close()  # again is fine
    with pytest.raises(WeightError, match="Cannot open the published weights at"):
        reader.map(location, num_bytes=10)


@pytest.mark.parametrize("backing", BACKINGS)
def test_the_reader_keeps_the_last_few_segments_open_and_no_more(backing: Backing):
    reader, process = ShmRecvBackend(keep=2), psutil.Process()
    segments = [Segment(10, backing=backing) for _ in range(5)]
    before = process.num_fds()
    for _ in range(3):
        for segment in segments:
            reader.map(segment.location, num_bytes=10)
            assert process.num_fds() <= before + 2
    reader.close()
    assert process.num_fds() == before
    for segment in segments:
        segment.close()
    assert process.num_fds() == before - 2 * len(segments)  # one is the mapping's own


@linux
def test_an_anonymous_segment_cannot_shrink_under_its_readers():
    segment = Segment(100, backing="memfd")
    fd = os.open(segment.location, os.O_RDWR)
    with pytest.raises(PermissionError):
        os.ftruncate(fd, 10)
    os.close(fd)
    segment.close()


def test_a_truncated_file_is_refused():
    segment, reader = Segment(100, backing="file"), ShmRecvBackend(keep=1)
    os.truncate(segment.location, 50)
    with pytest.raises(WeightError, match="has 50 bytes, but the update has 100"):
        reader.map(segment.location, num_bytes=100)
    segment.close()


def test_private_files_are_private_and_removed():
    segment = Segment(100, backing="file")
    path = Path(segment.location)
    assert path.parent.stat().st_mode & 0o777 == 0o700
    assert path.stat().st_mode & 0o777 == 0o600
    segment.close()
    assert not path.parent.exists()


@linux
def test_killed_owner_leaves_nothing_behind(tmp_path: Path, warm_fork_server):
    script, temp = tmp_path / "owner.py", tmp_path / "temp"
    temp.mkdir()
    others = set(Path("/dev/shm").glob("*millrace*"))
    script.write_text(
        "import sys, tempfile, time\n"
        "tempfile.tempdir = sys.argv[1]\n"
        "from millrace.weights.transports.memory import Segment\n"
        "segment = Segment(1000)\n"
        "print(segment.location, flush=True)\n"
        "time.sleep(3600)\n"
    )
    with start_program(script, str(temp)) as owner:
        assert owner.stdout is not None
        location = owner.stdout.readline().decode().strip()
        reader = ShmRecvBackend(keep=1)
        assert reader.map(location, num_bytes=1000).tolist() == [0] * 1000
        owner.send_signal(signal.SIGKILL)
    assert not Path(location).exists()
    assert not list(temp.iterdir())
    assert set(Path("/dev/shm").glob("*millrace*")) <= others


def test_linux_uses_anonymous_files():
    assert ("memfd" if sys.platform == "linux" else "file") == DEFAULT_BACKING
