"""The KV tensors: one per layer, in blocks.

Keys and values lie side by side, so that one gather per layer and forward pass fetches both.

An FP8 cache holds bytes: an entry, of one token and head, is its key and its value in FP8, padded
to 16 bytes, and 16 bytes with their two float32 scales, so that every entry is aligned. Every pass
attends to what the cache holds, also for tokens that it has just computed: how a prompt is divided
into chunks, or which prefix is reused, does not change what a token sees.

H = KV heads, Dk and Dv = dimensions of a key and of a value, T = tokens, B = blocks, W = numbers of
an entry. The engine's thread calls everything.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from millrace.inference.embedded.fp8 import FP8, quantize_rows

ALIGN_BYTES = 16  # of entries in FP8
SCALE_BYTES = 16  # of an entry in FP8


@dataclass(frozen=True, kw_only=True, slots=True)
class KVShape:
    """What one layer caches per token."""

    num_heads: int
    key_dim: int
    value_dim: int
    is_capped: bool = False  # its attention softcaps scores

    def width(self, dtype: torch.dtype) -> int:
        """W, of a cache in this dtype."""
        numbers = self.key_dim + self.value_dim
        if dtype == FP8:
            return numbers + -numbers % ALIGN_BYTES + SCALE_BYTES
        return numbers


def block_bytes(shapes: Mapping[int, KVShape], *, block_tokens: int, dtype: torch.dtype) -> int:
    numbers = sum(shape.num_heads * shape.width(dtype) for shape in shapes.values())
    return block_tokens * dtype.itemsize * numbers


def to_entries(keys: Tensor, values: Tensor, like: Tensor) -> Tensor:
    """Keys [..., Dk] and values [..., Dv] as entries [..., W] of a cache such as `like`."""
    if like.dtype != torch.uint8:
        return torch.cat([keys, values], dim=-1)
    parts = [quantize_rows(keys), quantize_rows(values)]
    numbers = torch.cat([part.view(torch.uint8) for part, _ in parts], dim=-1)
    scales = torch.cat([scale.contiguous() for _, scale in parts], dim=-1).view(torch.uint8)
    gap = numbers.new_zeros(*numbers.shape[:-1], -numbers.shape[-1] % ALIGN_BYTES)
    rest = numbers.new_zeros(*numbers.shape[:-1], SCALE_BYTES - scales.shape[-1])
    return torch.cat([numbers, gap, scales, rest], dim=-1)


def from_entries(
    entries: Tensor, *, key_dim: int, value_dim: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Keys [..., Dk] and values [..., Dv] of entries [..., W]."""
    stop = key_dim + value_dim
    keys, values = entries[..., :key_dim], entries[..., key_dim:stop]
    if entries.dtype != torch.uint8:
        return keys, values
    scales = entries[..., -SCALE_BYTES:][..., :8].contiguous().view(torch.float32)
    parts = zip((keys, values), scales.split(1, dim=-1), strict=True)
    keys, values = ((part.view(FP8).float() * scale).to(dtype) for part, scale in parts)
    return keys, values


class KVCache:
    def __init__(
        self,
        shapes: Mapping[int, KVShape],
        *,
        num_blocks: int,
        block_tokens: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """`dtype`: of keys and values, or FP8."""
        self.block_tokens, self.device = block_tokens, device
        self.shapes = dict(shapes)
        widths = {layer: shape.width(dtype) for layer, shape in shapes.items()}
        dtype = torch.uint8 if dtype == FP8 else dtype  # many operations do not take FP8
        # Zeros, not empty: masked entries are multiplied by 0, and 0 * NaN is NaN.
        self._blocks = {
            layer: torch.zeros(
                num_blocks,
                block_tokens * shape.num_heads * widths[layer],
                dtype=dtype,
                device=device,
            )
            for layer, shape in shapes.items()
        }
        self.copied_along: list[Tensor] = []  # [blocks, ...] each; rows are copied with the blocks
        # The same memory by token: [slots, H, W] of each layer. The KV slot of a token is
        # block * block_tokens + offset.
        self.layers = {
            layer: self._blocks[layer].view(-1, shape.num_heads, widths[layer])
            for layer, shape in shapes.items()
        }

    def gather(
        self, layer: int, *, blocks: Tensor, num_rows: int, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        """Contents of blocks [num_rows * B] as keys [num_rows, H, B * block_tokens, Dk], values;
        in FP8, they become `dtype`."""
        shape = self.shapes[layer]
        found = self._blocks[layer].index_select(0, blocks)
        found = found.view(num_rows, -1, *self.layers[layer].shape[1:]).transpose(1, 2)
        dims = {"key_dim": shape.key_dim, "value_dim": shape.value_dim}
        return from_entries(found, **dims, dtype=dtype)

    def saved(self, blocks: np.ndarray) -> dict[int, Tensor]:
        """Host copies of these blocks, by layer; on a GPU complete once it is synchronized."""
        found, index = {}, self._index(blocks)
        for layer, tensor in self._blocks.items():
            rows = tensor[index]
            host = torch.empty_like(rows, device="cpu", pin_memory=rows.is_cuda)
            found[layer] = host.copy_(rows, non_blocking=True)
        return found

    def write(self, saved: Mapping[int, Tensor], blocks: np.ndarray) -> None:
        """Undo saved()."""
        index = self._index(blocks)
        for layer, tensor in self._blocks.items():
            tensor.index_copy_(0, index, saved[layer].to(tensor.device))

    def _index(self, blocks: np.ndarray) -> Tensor:
        return torch.from_numpy(blocks).to(self.device)

    def copy(self, sources: np.ndarray, targets: np.ndarray) -> None:
        if not len(sources):
            return
        source, target = self._index(sources), self._index(targets)
        for tensor in (*self._blocks.values(), *self.copied_along):
            tensor.index_copy_(0, target, tensor.index_select(0, source))
