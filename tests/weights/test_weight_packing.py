import dataclasses

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from millrace.core.errors import WeightError
from millrace.weights.packing import (
    ALIGN_BYTES,
    check_dtypes,
    check_manifest,
    check_shapes,
    checksum,
    lay_out,
    pack,
    unpack,
)

shapes = st.lists(st.integers(0, 5), max_size=3).map(tuple)
tensors = st.builds(
    lambda shape, dtype: torch.arange(torch.Size(shape).numel()).reshape(shape).to(dtype),
    shapes,
    st.sampled_from([torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.uint8]),
)


@settings(deadline=None)
@given(st.dictionaries(st.text(max_size=5), tensors, max_size=6))
def test_packed_tensors_are_aligned_disjoint_and_unpack_unchanged(named: dict[str, torch.Tensor]):
    specs, num_bytes = lay_out(named, dtype=torch.bfloat16)
    check_manifest(specs, num_bytes=num_bytes)
    end = 0
    for spec in specs:
        assert spec.offset % ALIGN_BYTES == 0
        assert spec.offset - end < ALIGN_BYTES
        assert spec.offset >= end
        size = 2 if named[spec.name].is_floating_point() else named[spec.name].itemsize
        end = spec.offset + named[spec.name].numel() * size
    assert num_bytes % ALIGN_BYTES == 0
    assert 0 <= num_bytes - end < ALIGN_BYTES
    payload = torch.zeros(num_bytes, dtype=torch.uint8)
    pack(named, unpack(specs, payload))
    for name, tensor in unpack(specs, payload).items():
        sent = named[name]
        assert tensor.dtype == (torch.bfloat16 if sent.is_floating_point() else sent.dtype)
        assert torch.equal(tensor, sent.to(tensor.dtype))


def test_biases_of_routers_are_not_rounded():
    bias = {"mlp.gate.e_score_correction_bias": torch.tensor([15.01, 15.02])}
    specs, num_bytes = lay_out(bias, dtype=torch.bfloat16)
    payload = torch.zeros(num_bytes, dtype=torch.uint8)
    pack(bias, unpack(specs, payload))
    check_dtypes(specs, dtype=torch.bfloat16)
    for name, sent in unpack(specs, payload).items():
        assert torch.equal(sent, bias[name])


def test_the_checksum_covers_every_byte():
    named = {"a": torch.ones(3), "b": torch.ones(5)}
    specs, num_bytes = lay_out(named, dtype=torch.float32)
    payload = torch.zeros(num_bytes, dtype=torch.uint8)
    pack(named, unpack(specs, payload))
    sound = checksum(payload)
    for position in range(num_bytes):
        payload[position] ^= 1
        assert checksum(payload) != sound
        payload[position] ^= 1
    assert checksum(payload) == sound


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"dtype": "complex64"}, "'complex64'"),
        ({"offset": -64}, "impossible offset or shape"),
        ({"offset": 3}, "impossible offset or shape"),
        ({"shape": (-1, -3)}, "impossible offset or shape"),
        ({"offset": 6400}, "exceeds the 128 bytes"),
        ({"shape": (2**62,)}, "exceeds the 128 bytes"),
        ({"name": "a"}, "twice"),
        ({"offset": 0}, "impossible offset or shape"),
        ({"shape": (0,)}, "of 128 bytes has 64 bytes of tensors"),
    ],
)
def test_manifest_that_exceeds_its_payload_is_refused(change: dict[str, object], reason: str):
    named = {"a": torch.ones(3), "b": torch.ones(4)}
    (first, second), num_bytes = lay_out(named, dtype=torch.float32)
    assert num_bytes == 128
    broken = dataclasses.replace(second, **change)
    with pytest.raises(WeightError, match=reason):
        check_manifest((first, broken), num_bytes=num_bytes)


def test_missing_extra_and_misshapen_tensors_are_named():
    given = {"a": (2, 3), "b": (1,)}
    check_shapes(given, expected={"b": (1,), "a": (2, 3)}, version=4)
    with pytest.raises(WeightError, match="Version 4 lacks 'c'"):
        check_shapes(given, expected={"a": (2, 3), "b": (1,), "c": (1,)}, version=4)
    with pytest.raises(WeightError, match="has 'b', which the model lacks"):
        check_shapes(given, expected={"a": (2, 3)}, version=4)
    with pytest.raises(WeightError, match=r"'a' as \(2, 3\); the model's is \(3, 2\)"):
        check_shapes(given, expected={"a": (3, 2), "b": (1,)}, version=4)


def test_sharded_tensor_is_refused():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        named = {"weight": distribute_tensor(torch.ones(2), mesh, [Shard(0)])}
        specs, num_bytes = lay_out(named, dtype=torch.float32)
        with pytest.raises(WeightError, match="'weight' is sharded over several ranks"):
            pack(named, unpack(specs, torch.zeros(num_bytes, dtype=torch.uint8)))
    finally:
        dist.destroy_process_group()
