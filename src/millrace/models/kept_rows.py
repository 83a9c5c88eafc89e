"""The ids of each token that truncated sampling kept, on the device. N = tokens."""

from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from millrace.core.records import Kept


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class KeptRows:
    """Kept ids as CSR: row i is ids[offsets[i]:offsets[i + 1]]; an empty row keeps all ids, and a
    row may be a bit mask, as in Kept."""

    ids: Tensor  # [kept ids of all rows] int64
    offsets: Tensor  # [N + 1] int64
    has_masks: bool = False

    @classmethod
    def of(cls, kept: Kept, *, device: torch.device) -> "KeptRows":
        """A copy: arrays from the wire are read-only."""
        return cls(
            ids=torch.from_numpy(kept.ids.astype(np.int64)).to(device),
            offsets=torch.from_numpy(kept.offsets.copy()).to(device),
            has_masks=bool((kept.ids < 0).any()),
        )

    def split(self, chunk: int) -> list["KeptRows"]:
        """Pieces of at most `chunk` rows, in order."""
        num_rows = len(self.offsets) - 1
        starts = list(range(0, num_rows, chunk))
        ends = torch.tensor([*starts, num_rows], device=self.offsets.device)
        bounds = self.offsets[ends].tolist()
        return [
            KeptRows(
                ids=self.ids[bounds[i] : bounds[i + 1]],
                offsets=self.offsets[start : start + chunk + 1] - bounds[i],
                has_masks=self.has_masks and bounds[i] < bounds[i + 1],
            )
            for i, start in enumerate(starts)
        ]

    def allowed(self, vocab_size: int) -> Tensor:
        """[N, V] bool; True for ids that could have been sampled."""
        sizes = self.offsets.diff()
        allowed = (sizes == 0)[:, None].repeat(1, vocab_size)
        rows = torch.repeat_interleave(
            torch.arange(len(sizes), device=sizes.device), sizes, output_size=len(self.ids)
        )
        if not self.has_masks:
            allowed[rows, self.ids] = True
            return allowed
        starts = self.offsets[:-1].clamp_max(len(self.ids) - 1)
        is_mask = (self.ids[starts] < 0) & (sizes > 0)
        is_listed = ~is_mask[rows]
        allowed[rows[is_listed], self.ids[is_listed]] = True
        words = starts[is_mask, None] + 1 + torch.arange(-(-vocab_size // 32), device=sizes.device)
        allowed[is_mask] = unpacked(self.ids[words], vocab_size)
        return allowed


def unpacked(words: Tensor, vocab_size: int) -> Tensor:
    """[N, V] bool: the bits of words [N, V / 32], the lowest first."""
    parts = words.int().view(torch.uint8)[..., None]  # bytes: a word per bit would be large
    bits = parts >> torch.arange(8, dtype=torch.uint8, device=words.device)
    return (bits & 1).bool().flatten(-2)[:, :vocab_size]


def packed(allowed: Tensor) -> Tensor:
    """[N, V / 32] int32, the inverse of unpacked()."""
    padding = -allowed.shape[1] % 32
    bits = F.pad(allowed, (0, padding)).unflatten(1, (-1, 32)).long()
    return (bits << torch.arange(32, device=allowed.device)).sum(-1).to(torch.int32)
