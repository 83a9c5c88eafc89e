"""The KV tensors: one per layer, in blocks.

Keys and values lie side by side, so that one gather per layer and forward pass fetches both.
H = KV heads, Dk and Dv = dimensions of a key and of a value, T = tokens, B = blocks.
The engine's thread calls everything.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class KVShape:
    """What one layer caches per token."""

    num_heads: int
    key_dim: int
    value_dim: int
    is_capped: bool = False  # its attention softcaps scores

    @property
    def numbers(self) -> int:
        return self.num_heads * (self.key_dim + self.value_dim)


def block_bytes(shapes: Mapping[int, KVShape], *, block_tokens: int, dtype: torch.dtype) -> int:
    return block_tokens * dtype.itemsize * sum(shape.numbers for shape in shapes.values())


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
        self.block_tokens, self.device = block_tokens, device
        self.shapes = dict(shapes)
        # Zeros, not empty: masked entries are multiplied by 0, and 0 * NaN is NaN.
        self._blocks = {
            layer: torch.zeros(num_blocks, block_tokens * shape.numbers, dtype=dtype, device=device)
            for layer, shape in shapes.items()
        }
        self.copied_along: list[Tensor] = []  # [blocks, ...] each; rows are copied with the blocks
        # The same memory by token: [slots, H, Dk + Dv] of each layer. The KV slot of a token is
        # block * block_tokens + offset.
        self.layers = {
            layer: self._blocks[layer].view(-1, shape.num_heads, shape.key_dim + shape.value_dim)
            for layer, shape in shapes.items()
        }

    def gather(self, layer: int, *, blocks: Tensor, num_rows: int) -> tuple[Tensor, Tensor]:
        """Contents of blocks [num_rows * B] as keys [num_rows, H, B * block_tokens, Dk], values."""
        shape = self.shapes[layer]
        found = self._blocks[layer].index_select(0, blocks)
        found = found.view(num_rows, -1, shape.num_heads, shape.key_dim + shape.value_dim)
        found = found.transpose(1, 2)
        return found[..., : shape.key_dim], found[..., shape.key_dim :]

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
