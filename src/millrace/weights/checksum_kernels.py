"""The word sums of packing.py in one pass, as a Triton kernel.

Imported on machines with CUDA only. R = rows, C = columns of the table of words.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

_ROWS = 64  # of one program


@triton.jit
def _sums_kernel(
    table,  # [R, C] int32
    by_row,  # [programs] int64; sum of the words, each times 2 * its row + 1
    by_column,  # [programs] int64; likewise by column
    num_rows,
    COLUMNS: tl.constexpr,
    ROWS: tl.constexpr,
):
    program = tl.program_id(0)
    columns = tl.arange(0, COLUMNS)
    sums = tl.zeros([COLUMNS], tl.int64)
    weighted = tl.full([], 0, tl.int64)
    for i in range(ROWS):
        row = program.to(tl.int64) * ROWS + i
        words = tl.load(table + row * COLUMNS + columns, mask=row < num_rows, other=0).to(tl.int64)
        sums += words
        weighted += tl.sum(words, 0) * (2 * row + 1)
    tl.store(by_row + program, weighted)
    tl.store(by_column + program, tl.sum(sums * (2 * columns + 1).to(tl.int64), 0))


def weighted_sums(table: Tensor) -> tuple[Tensor, Tensor]:
    """Sums of words [R, C] int32, C a power of two, weighted by row and by column, mod 2**64."""
    num_rows, num_columns = table.shape
    num_programs = triton.cdiv(num_rows, _ROWS)
    by_row = torch.empty(num_programs, dtype=torch.int64, device=table.device)
    by_column = torch.empty_like(by_row)
    if num_programs:
        _sums_kernel[(num_programs,)](
            table, by_row, by_column, num_rows, COLUMNS=num_columns, ROWS=_ROWS, num_warps=8
        )
    return by_row.sum(), by_column.sum()
