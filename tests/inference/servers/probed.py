"""Updates that an engine probes after the swap."""

from collections.abc import Mapping

import torch
from architectures import tiny_model
from engine_rig import weights

from millrace.core.records import TensorSpec, WeightUpdate
from millrace.weights.probe import ProbeReference


def update_of(reference: ProbeReference, tensors: Mapping[str, torch.Tensor]) -> WeightUpdate:
    return WeightUpdate(
        version=1,
        tensors=(TensorSpec(name="w", dtype="float32", shape=(), offset=0),),
        num_bytes=0,
        checksum=0,
        transport="shm",
        location="",
        probe=reference(tensors),
    )


def probed_update() -> WeightUpdate:
    return update_of(ProbeReference(tiny_model("qwen3")), weights(seed=1))
