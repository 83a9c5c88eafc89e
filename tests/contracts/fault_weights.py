"""Weights that the fault tests publish, for every kind of payload, and their hashes.

Every version has another hash, and a mixture of two versions has the hash of neither."""

from collections.abc import Mapping
from typing import Literal

import torch
import xxhash

Kind = Literal["full", "delta", "adapter"]
NUM_LAYERS, LAYER_VALUES = 8, 2**18  # 8 MiB of float32
CHANGED_EVERY = 64  # of a delta's values


def weights_of(version: int, kind: Kind = "full") -> dict[str, torch.Tensor]:
    if kind == "adapter":
        return {
            f"layer.{i}.lora_{factor}.weight": torch.full(shape, float(version))
            for i in range(NUM_LAYERS)
            for factor, shape in (("A", (4, 512)), ("B", (512, 4)))
        }
    weights = {f"layer.{i}": torch.zeros(LAYER_VALUES) for i in range(NUM_LAYERS)}
    for weight in weights.values():
        weight[:: 1 if kind == "full" else CHANGED_EVERY] = version
    return weights


def shapes_of(kind: Kind) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in weights_of(0, kind).items()}


def hash_of(weights: Mapping[str, torch.Tensor]) -> str:
    digest = xxhash.xxh3_64()
    for name, tensor in weights.items():
        digest.update(name.encode())
        digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def published_hash(version: int, kind: Kind) -> str:
    return hash_of(weights_of(version, kind))
