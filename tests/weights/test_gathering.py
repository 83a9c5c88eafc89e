"""Sharded weights reach engines whole. The trainer is two real processes with gloo between them."""

import contextlib
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import sharded_trainer as trainer
import torch

from millrace.core.records import WeightUpdate
from millrace.weights.transport import make_receiver, make_sender
from millrace.weights.transports.disk import MARKER


class Ranks:
    """sharded_trainer.py, once for each rank."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.processes = [
            subprocess.Popen(
                [sys.executable, trainer.__file__, str(rank), str(folder)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env={"PYTHONPATH": ":".join(sys.path)},
            )
            for rank in range(trainer.NUM_RANKS)
        ]

    def begin(self, command: str) -> None:
        for rank in range(trainer.NUM_RANKS):
            self.send(command, rank=rank)

    def read_line(self) -> bytes:
        assert self.processes[0].stdout is not None
        return self.processes[0].stdout.readline()

    def update(self) -> WeightUpdate:
        return msgspec.json.decode(self.read_line(), type=WeightUpdate)

    def send(self, line: str = "", *, rank: int = 0) -> None:
        stdin = self.processes[rank].stdin
        assert stdin is not None
        stdin.write(f"{line}\n".encode())
        stdin.flush()

    def end(self) -> list[int]:
        """The exit code of each rank."""
        return [process.wait(20) for process in self.processes]

    def close(self) -> None:
        for process in self.processes:
            process.kill()
            process.communicate()


@pytest.fixture(scope="module")
def ranks(tmp_path_factory) -> Iterator[Ranks]:
    """One set of ranks, shared by the tests."""
    ranks = Ranks(tmp_path_factory.mktemp("ranks"))
    yield ranks
    ranks.begin("")
    assert ranks.end() == [0, 0]
    ranks.close()


def test_shards_arrive_as_the_full_weights(ranks):
    ranks.begin("publish_by_all_transports")
    for version, transport in enumerate(("shm", "disk", "collective"), start=1):
        update, full = ranks.update(), trainer.full_weights(version)
        assert (update.version, update.transport) == (version, transport)
        receiver = make_receiver(transport)
        received = receiver.stage(update)
        assert list(received) == list(full)
        for name, tensor in full.items():
            expected = tensor.bfloat16() if tensor.is_floating_point() else tensor
            assert torch.equal(received[name], expected), name
        unsharded = make_sender("shm", dtype=torch.bfloat16)
        assert update.checksum == unsharded.publish(version, full).checksum
        unsharded.close()
        receiver.close()
        ranks.send()


def test_no_rank_holds_more_than_two_buckets(ranks):
    ranks.begin("measure_what_is_gathered")
    for peak in msgspec.json.decode(ranks.read_line(), type=list[int]):
        # Messages between ranks take less than half a bucket.
        assert trainer.BUCKET_BYTES < peak < 2.5 * trainer.BUCKET_BYTES


def test_ranks_that_race_publish_whole_versions_in_order_up_to_the_last(ranks):
    seen = []
    ranks.begin("race")
    receiver = make_receiver("shm")
    while trainer.NUM_RACED not in seen:
        update = ranks.update()
        assert torch.all(receiver.stage(update)["weight"] == update.version)
        seen.append(update.version)
        ranks.send(str(update.version))
    receiver.close()
    assert seen == sorted(set(seen))


@pytest.mark.slow
def test_a_rank_killed_during_a_gather_is_named_and_only_whole_versions_are_left(tmp_path: Path):
    with contextlib.closing(Ranks(tmp_path)) as running:
        running.begin("publish_for_ever")
        updates = [running.update()]
        running.processes[1].kill()
        while b"A rank of the trainer died" not in (line := running.read_line()):
            updates.append(msgspec.json.decode(line, type=WeightUpdate))
        marked = sorted(path.parent.name for path in tmp_path.glob(f"weights/*/{MARKER}"))
        assert f"version_{updates[-1].version}" in marked
        received = make_receiver("disk").stage(updates[-1])["weight"]
        assert torch.all(received == float(updates[-1].version))
        running.send()  # continues after the error
        running.send()  # no further command: it exits
        assert running.end() == [0, -signal.SIGKILL]
