"""The ids of each token that truncated sampling kept, on the device. N = tokens."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from millrace.core.records import Kept


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class KeptRows:
    """Kept ids as CSR: row i is ids[offsets[i]:offsets[i + 1]]; an empty row keeps all ids."""

    ids: Tensor  # [kept ids of all rows] int64
    offsets: Tensor  # [N + 1] int64

    @classmethod
    def of(cls, kept: Kept, *, device: torch.device) -> "KeptRows":
        """A copy: arrays from the wire are read-only."""
        return cls(
            ids=torch.from_numpy(kept.ids.astype(np.int64)).to(device),
            offsets=torch.from_numpy(kept.offsets.copy()).to(device),
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
        allowed[rows, self.ids] = True
        return allowed
