"""The disk keeps the transport contract, and nothing stays behind on it."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest
import torch
from fault_weights import hash_of
from full_disk import files_of_at_most
from safetensors.torch import load_file
from transport_contract import DeltaContract, TransportContract, assert_arrived, some_tensors
from transport_faults import Damage, FaultContract, location_of

from millrace.core.errors import WeightError
from millrace.core.records import WeightUpdate
from millrace.weights.backends import NoSpace, PackingSender, StagingReceiver
from millrace.weights.gathering import WeightSender
from millrace.weights.transports.disk import (
    DELTA_FILE,
    MARKER,
    MODEL_FILE,
    DiskRecvBackend,
    DiskSendBackend,
)


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return tmp_path / "weights"


@pytest.fixture
def make_sender(directory: Path) -> Callable[..., PackingSender]:
    return lambda dtype, **arguments: PackingSender(
        DiskSendBackend(directory), dtype=dtype, **arguments
    )


@pytest.fixture
def sender(make_sender: Callable[..., PackingSender]) -> Iterator[PackingSender]:
    sender = make_sender(torch.float32)
    yield sender
    sender.close()


@pytest.fixture
def receiver() -> StagingReceiver:
    return StagingReceiver({"disk": lambda: DiskRecvBackend(patience_s=0)})


class TestDisk(DeltaContract, FaultContract, TransportContract):
    transport = "disk"

    @pytest.fixture
    def make_sender(self, directory: Path) -> Callable[..., PackingSender]:
        return lambda dtype, **arguments: PackingSender(
            DiskSendBackend(directory), dtype=dtype, **arguments
        )

    @pytest.fixture
    def make_receiver(self) -> Callable[..., StagingReceiver]:
        return lambda payload="full", **arguments: StagingReceiver(
            {"disk": lambda: DiskRecvBackend(patience_s=0)},
            keep_base=payload == "delta",
            **arguments,
        )

    def corrupt(self, sender: WeightSender, update: WeightUpdate) -> None:
        flip_last_byte(Path(update.location))

    def damaged(
        self, sender: WeightSender, update: WeightUpdate, *, is_delta: bool, how: Damage
    ) -> WeightUpdate:
        path = Path(location_of(update, is_delta=is_delta))
        if how == "corrupted":
            flip_last_byte(path)
        else:
            os.truncate(path, path.stat().st_size - 64)
        return update


def flip_last_byte(path: Path) -> None:
    with path.open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        byte = file.read(1)[0]
        file.seek(-1, os.SEEK_END)
        file.write(bytes([byte ^ 1]))


def test_published_files_are_plain_safetensors(sender: PackingSender, directory: Path):
    sent = some_tensors()
    update = sender.publish(7, sent)
    assert_arrived({name: load_file(update.location)[name] for name in sent}, sent, torch.float32)
    marker = (directory / "version_7" / MARKER).read_bytes()
    assert msgspec.json.decode(marker, type=WeightUpdate) == update


def test_a_released_version_is_removed_and_close_leaves_nothing(
    make_sender: Callable[..., PackingSender], directory: Path
):
    sender = make_sender(torch.float32, payload="delta")
    sender.publish(1, {"weight": torch.zeros(1000)})
    sender.publish(2, {"weight": torch.eye(1000)[0]})
    assert sorted(p.name for p in directory.iterdir()) == ["version_1", "version_2"]
    assert (directory / "version_2" / DELTA_FILE).is_file()
    sender.release(1)
    assert [p.name for p in directory.iterdir()] == ["version_2"]
    sender.close()
    assert not directory.exists()


def test_version_without_its_marker_is_refused(
    sender: PackingSender, receiver: StagingReceiver, directory: Path
):
    update = sender.publish(1, some_tensors())
    (directory / "version_1" / MARKER).unlink()
    with pytest.raises(WeightError, match="Version 1 is not complete"):
        receiver.stage(update)


@pytest.mark.parametrize("num_bytes", [0, 7, 300])
def test_a_truncated_file_is_named(
    sender: PackingSender, receiver: StagingReceiver, num_bytes: int
):
    update = sender.publish(1, some_tensors())
    os.truncate(update.location, num_bytes)
    with pytest.raises(WeightError, match=rf"{MODEL_FILE}' are damaged or missing"):
        receiver.stage(update)


def test_new_sender_removes_versions_of_a_killed_one_and_nothing_else(
    make_sender: Callable[..., PackingSender], directory: Path
):
    for name in ("version_3/.model.safetensors", "version_4/update.json", "notes.txt"):
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        (directory / name).write_text("left behind")
    sender = make_sender(torch.float32)
    assert [p.name for p in directory.iterdir()] == ["notes.txt"]
    sender.close()
    assert directory.is_dir()


def test_full_disk_is_one_error_and_leaves_no_files(
    sender: PackingSender, receiver: StagingReceiver, directory: Path
):
    first, second = {"weight": torch.zeros(10_000)}, {"weight": torch.ones(10_000)}
    held = receiver.stage(sender.publish(1, first))
    with files_of_at_most(20_000), pytest.raises(NoSpace) as caught:
        sender.publish(2, second)
    sentence = str(caught.value)
    assert sentence.startswith(f"Version 2 could not be written to '{directory}' (")
    assert "file too large" in sentence.lower()
    assert "it needs 0.04 MB" in sentence
    assert "\n" not in sentence
    assert [p.name for p in directory.iterdir()] == ["version_1"]
    assert hash_of(held) == hash_of(first)
    assert_arrived(receiver.stage(sender.publish(2, second)), second, torch.float32)
