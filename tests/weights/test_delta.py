import dataclasses

import psutil
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from millrace.core.errors import WeightError
from millrace.core.records import Delta, WeightUpdate
from millrace.weights import packing
from millrace.weights.transport import make_sender


def update_of(payload: torch.Tensor, *, changed: int, word_bytes: int) -> WeightUpdate:
    num_bytes = changed * (4 + word_bytes)
    short = Delta(
        base=1, num_changed=changed, word_bytes=word_bytes, num_bytes=num_bytes, location=""
    )
    return WeightUpdate(
        version=2,
        tensors=(),
        num_bytes=len(payload),
        checksum=0,
        transport="shm",
        location="",
        delta=short,
    )


def blob_of(changes: tuple[torch.Tensor, torch.Tensor], update: WeightUpdate) -> torch.Tensor:
    assert update.delta is not None
    blob = torch.zeros(update.delta.num_bytes, dtype=torch.uint8)
    packing.write_delta(changes, into=blob)
    return blob


@settings(deadline=None)
@given(
    old=st.binary(min_size=64, max_size=64),
    edits=st.dictionaries(st.integers(0, 63), st.integers(0, 255), max_size=5),
    word_bytes=st.sampled_from([2, 4]),
)
def test_delta_applied_to_its_base_gives_the_new_payload(
    old: bytes, edits: dict[int, int], word_bytes: int
):
    base = torch.tensor(list(old), dtype=torch.uint8)
    new = base.clone()
    for position, value in edits.items():
        new[position] = value
    changes = packing.find_delta(new, base, word_bytes=word_bytes)
    assert changes is not None  # at most 5 of 16 or 32 words
    update = update_of(new, changed=len(changes[0]), word_bytes=word_bytes)
    assert update.delta is not None
    assert update.delta.num_bytes < len(new)
    packing.check_delta(update, update.delta)
    result = torch.full_like(base, 7)
    packing.apply_delta(
        blob_of(changes, update), delta=update.delta, base=base, into=result, version=2
    )
    assert torch.equal(result, new)


def test_delta_is_smaller_than_the_full_payload():
    base = torch.zeros(60, dtype=torch.uint8)  # 30 words of 2 bytes; a change takes 6
    new = base.clone()
    new[: 9 * 2 : 2] = 1
    assert packing.find_delta(new, base, word_bytes=2) is not None
    new[9 * 2] = 1
    assert packing.find_delta(new, base, word_bytes=2) is None


@pytest.mark.parametrize("index", [-1, 32, 2**31 - 1])
def test_index_outside_the_payload_is_refused_before_anything_is_written(index: int):
    base = torch.zeros(64, dtype=torch.uint8)
    update = update_of(base, changed=1, word_bytes=2)
    changes = torch.tensor([index], dtype=torch.int32), torch.ones(1, dtype=torch.int16)
    into = torch.full_like(base, 7)
    assert update.delta is not None
    with pytest.raises(WeightError, match="has an index outside its payload"):
        packing.apply_delta(
            blob_of(changes, update), delta=update.delta, base=base, into=into, version=2
        )
    assert torch.all(into == 7)


@pytest.mark.parametrize("change", [{"num_bytes": 5}, {"num_changed": -1}, {"word_bytes": 3}])
def test_a_delta_of_an_impossible_size_is_refused(change: dict[str, int]):
    update = update_of(torch.zeros(64, dtype=torch.uint8), changed=1, word_bytes=2)
    assert update.delta is not None
    with pytest.raises(WeightError, match="impossible size"):
        packing.check_delta(update, dataclasses.replace(update.delta, **change))


def test_a_version_that_is_published_again_takes_the_memory_that_it_had():
    """As for an engine that joins late, when all others are done with the newest version."""
    sender, process = make_sender("shm", dtype=torch.bfloat16, payload="delta"), psutil.Process()
    num_open: list[int] = []  # file descriptors
    for _ in range(5):
        sender.publish(1, {"weight": torch.ones(1000)})
        sender.release(1)
        num_open.append(process.num_fds())
    sender.close()
    assert len(set(num_open[1:])) == 1
