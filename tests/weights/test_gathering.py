"""Sharded weights reach engines whole. The trainer is two real processes with gloo between them."""

import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import sharded_trainer as trainer
import torch

from millrace.core.weight_update import WeightUpdate
from millrace.weights.carriers.disk import MARKER
from millrace.weights.receiver import make_receiver
from millrace.weights.sender import make_sender


class Ranks:
    """sharded_trainer.py, once for each rank."""

    def __init__(self, deed: str, *, folder: Path) -> None:
        self.processes = [
            subprocess.Popen(
                [sys.executable, trainer.__file__, str(rank), str(folder), deed],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env={"PYTHONPATH": ":".join(sys.path)},
            )
            for rank in range(trainer.NUM_RANKS)
        ]

    def hear(self) -> bytes:
        assert self.processes[0].stdout is not None
        return self.processes[0].stdout.readline()

    def update(self) -> WeightUpdate:
        return msgspec.json.decode(self.hear(), type=WeightUpdate)

    def tell(self, line: str = "") -> None:
        assert self.processes[0].stdin is not None
        self.processes[0].stdin.write(f"{line}\n".encode())
        self.processes[0].stdin.flush()


@contextmanager
def ranks(deed: str, folder: Path, *, ends: tuple[int, int] = (0, 0)) -> Iterator[Ranks]:
    running = Ranks(deed, folder=folder)
    try:
        yield running
        assert tuple(process.wait(20) for process in running.processes) == ends
    finally:
        for process in running.processes:
            process.kill()
            process.communicate()


def test_shards_arrive_as_the_full_weights_and_no_rank_holds_more_than_two_buckets(tmp_path: Path):
    with ranks("publish_by_all_transports", tmp_path) as running:
        for version, transport in enumerate(("shm", "disk", "collective"), start=1):
            update, full = running.update(), trainer.full_weights(version)
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
            running.tell()
    for rank in range(trainer.NUM_RANKS):
        peak = int((tmp_path / f"peak_{rank}").read_text())
        # What ranks tell each other besides takes less than half a bucket.
        assert trainer.BUCKET_BYTES < peak < 2.5 * trainer.BUCKET_BYTES


def test_ranks_that_race_publish_whole_versions_in_order_up_to_the_last(tmp_path: Path):
    seen = []
    with ranks("race", tmp_path) as running:
        receiver = make_receiver("shm")
        while trainer.NUM_RACED not in seen:
            update = running.update()
            assert torch.all(receiver.stage(update)["weight"] == update.version)
            seen.append(update.version)
            running.tell(str(update.version))
        receiver.close()
    assert seen == sorted(set(seen))


def test_a_rank_killed_during_a_gather_is_named_and_only_whole_versions_are_left(tmp_path: Path):
    with ranks("publish_for_ever", tmp_path, ends=(0, -signal.SIGKILL)) as running:
        updates = [running.update()]
        running.processes[1].kill()
        while b"A rank of the trainer died" not in (line := running.hear()):
            updates.append(msgspec.json.decode(line, type=WeightUpdate))
        marked = sorted(path.parent.name for path in tmp_path.glob(f"weights/*/{MARKER}"))
        assert f"version_{updates[-1].version}" in marked
        received = make_receiver("disk").stage(updates[-1])["weight"]
        assert torch.all(received == float(updates[-1].version))
        running.tell()
