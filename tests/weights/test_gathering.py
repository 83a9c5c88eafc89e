"""Sharded weights reach engines whole. The ranks are real processes with gloo between them."""

import contextlib
import os
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
import sharded_trainer as trainer
import torch
from forked_program import start_program

from millrace.core.records import WeightUpdate
from millrace.weights.backends import Payload
from millrace.weights.transport import make_receiver, make_sender
from millrace.weights.transports.disk import MARKER

TWO, HSDP = "dp_shard=2", "dp_replicate=2,dp_shard=2"


class Ranks:
    """The ranks of sharded_trainer.py."""

    def __init__(self, folder: Path, num_ranks: int) -> None:
        pipes = [folder / f"commands-{rank}" for rank in range(num_ranks)]
        for pipe in pipes:
            os.mkfifo(pipe)
        script = Path(trainer.__file__)
        self._launcher = start_program(script, str(folder), *map(str, pipes))
        self._writers = [pipe.open("w") for pipe in pipes]
        self.pids = msgspec.json.decode(self.read_line(), type=list[int])

    def begin(self, command: str) -> None:
        for rank in range(len(self.pids)):
            self.send(command, rank=rank)

    def read_line(self) -> bytes:
        assert self._launcher.stdout is not None
        return self._launcher.stdout.readline()

    def update(self) -> WeightUpdate:
        return msgspec.json.decode(self.read_line(), type=WeightUpdate)

    def send(self, line: str = "", *, rank: int = 0) -> None:
        self._writers[rank].write(f"{line}\n")
        self._writers[rank].flush()

    def end(self) -> list[int]:
        """The exit code of each rank, after its last command."""
        for writer in self._writers:
            with contextlib.suppress(BrokenPipeError):  # of a killed rank
                writer.close()
        return msgspec.json.decode(self.read_line(), type=list[int])

    def close(self) -> None:
        if self._launcher.poll() is None:
            for pid in self.pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        self._launcher.communicate()


def running(folder: Path, num_ranks: int) -> Iterator[Ranks]:
    with contextlib.closing(Ranks(folder, num_ranks)) as ranks:
        yield ranks
        assert ranks.end() == [0] * num_ranks


@pytest.fixture(scope="module")
def two(tmp_path_factory, warm_fork_server) -> Iterator[Ranks]:
    """Two ranks, shared by the tests."""
    yield from running(tmp_path_factory.mktemp("two"), 2)


@pytest.fixture(scope="module")
def four(tmp_path_factory, warm_fork_server) -> Iterator[Ranks]:
    yield from running(tmp_path_factory.mktemp("four"), 4)


def check_all_transports(ranks: Ranks, mesh: str, payload: Payload) -> None:
    """Every version that arrives equals that of a trainer with one rank."""
    ranks.begin(f"publish_by_all_transports {mesh} {payload}")
    for transport in trainer.TRANSPORTS:
        receiver = make_receiver(transport, payload=payload)
        one_rank = make_sender("shm", dtype=torch.bfloat16, payload=payload)
        for version in trainer.VERSIONS:
            update, full = ranks.update(), trainer.full_weights(version)
            assert (update.version, update.transport) == (version, transport)
            received = receiver.stage(update)
            assert list(received) == list(full)
            for name, tensor in full.items():
                expected = tensor.bfloat16() if tensor.is_floating_point() else tensor
                assert torch.equal(received[name], expected), name
            check_equal_but_for_locations(update, one_rank.publish(version, full))
            assert (update.delta is not None) == (payload == "delta" and version == 2)
            ranks.send()
        one_rank.close()
        receiver.close()


def check_equal_but_for_locations(found: WeightUpdate, expected: WeightUpdate) -> None:
    delta = expected.delta
    if delta is not None and found.delta is not None:
        delta = replace(delta, location=found.delta.location)
    assert found == replace(
        expected, transport=found.transport, location=found.location, delta=delta
    )


@pytest.mark.parametrize("payload", ["full", "delta"])
def test_shards_of_two_ranks_arrive_as_the_weights_of_one(two, payload):
    check_all_transports(two, TWO, payload)


@pytest.mark.slow
@pytest.mark.parametrize("payload", ["full", "delta"])
@pytest.mark.parametrize("mesh", ["dp_shard=4", HSDP, "dp_shard=2,tp=2"])
def test_shards_of_four_ranks_arrive_as_the_weights_of_one(four, mesh, payload):
    check_all_transports(four, mesh, payload)


def measure(ranks: Ranks, mesh: str, payload: str) -> list[tuple[int, int, int]]:
    ranks.begin(f"measure_what_is_gathered {mesh} {payload}")
    return msgspec.json.decode(ranks.read_line(), type=list[tuple[int, int, int]])


def test_no_rank_holds_more_than_two_buckets(two):
    for peak, kept, _ in measure(two, TWO, "full"):
        # Messages between ranks take less than half a bucket.
        assert trainer.BUCKET_BYTES < peak < 2.5 * trainer.BUCKET_BYTES
        assert kept == 0


def test_changes_alone_are_sent_and_a_rank_keeps_its_own_shards(two):
    shard_bytes = measure(two, TWO, "full")[1][2]
    peak, kept, sent = measure(two, TWO, "delta")[1]
    assert 0 < sent < shard_bytes / 10
    assert shard_bytes <= kept < 1.05 * shard_bytes  # pieces are padded
    assert peak < shard_bytes + 2.5 * trainer.BUCKET_BYTES


@pytest.mark.slow
def test_a_replicated_shard_is_sent_once(four):
    sent = [of_rank[2] for of_rank in measure(four, HSDP, "full")]
    assert sent[0] == 0
    assert sent[1] > 10 * max(sent[2:])  # only "both" is sharded over replicas


def test_changes_since_a_version_that_failed_are_not_applied_to_an_older_base(two):
    two.begin("publish_after_a_failure")
    assert two.read_line() == b'["There is no space.","There is no space."]\n'
    update = two.update()
    one_rank = make_sender("shm", dtype=torch.bfloat16, payload="delta")
    one_rank.publish(1, trainer.full_weights(1))
    check_equal_but_for_locations(update, one_rank.publish(2, trainer.full_weights(2)))
    receiver = make_receiver("shm")
    receiver.stage(update)
    receiver.close()
    one_rank.close()
    two.send()


def test_ranks_that_race_publish_whole_versions_in_order_up_to_the_last(two):
    seen = []
    two.begin("race")
    receiver = make_receiver("shm")
    while trainer.NUM_RACED not in seen:
        update = two.update()
        assert torch.all(receiver.stage(update)["weight"] == update.version)
        seen.append(update.version)
        two.send(str(update.version))
    receiver.close()
    assert seen == sorted(set(seen))


def test_a_step_does_not_wait_for_a_gather(two):
    two.begin("step_while_a_gather_is_held_up")
    assert two.read_line() == b'"stepped"\n'
    torch.manual_seed(0)
    expected = dict(trainer.small_model().named_parameters())
    receiver = make_receiver("shm")
    for name, tensor in receiver.stage(two.update()).items():
        assert torch.equal(tensor, expected[name])
    receiver.close()
    two.send()


@pytest.mark.slow
def test_a_rank_killed_during_a_gather_is_named_and_only_whole_versions_are_left(
    tmp_path: Path, warm_fork_server
):
    with contextlib.closing(Ranks(tmp_path, 2)) as ranks:
        ranks.begin("publish_for_ever")
        updates = [ranks.update()]
        os.kill(ranks.pids[1], signal.SIGKILL)
        while b"A rank of the trainer died" not in (line := ranks.read_line()):
            updates.append(msgspec.json.decode(line, type=WeightUpdate))
        marked = sorted(path.parent.name for path in tmp_path.glob(f"weights/*/{MARKER}"))
        assert f"version_{updates[-1].version}" in marked
        received = make_receiver("disk").stage(updates[-1])["weight"]
        assert torch.all(received == float(updates[-1].version))
        ranks.send()  # continues after the error
        assert ranks.end() == [0, -signal.SIGKILL]
