"""How matrix products of few rows are divided into the programs of a kernel.

Such a product takes as long as reading its weights, if enough programs read them at the same time.
The sizes were found by trying them on an H200 (`benchmarks/decode_products.py --tilings`).

O and I = output and input size of a product.
"""

from typing import NamedTuple

# With more rows, cuBLAS is faster. Its kernels for sums in parts are slower.
_MOST_ROWS, _MOST_ROWS_IN_PARTS = 64, 128
_PROGRAM_ROWS = (16, 64, 128)  # few sizes, because a kernel is compiled for each
_PROGRAM_COLUMNS = (64, 32, 16)
_LEAST_PROGRAMS, _LEAST_PROGRAMS_IN_PARTS = 80, 64  # that occupy a GPU
_MOST_PROGRAMS_IN_PARTS = 160  # more parts only make their sum longer
_LEAST_DEPTH = 32
_READ_BYTES = 128  # of a row of weights, at least, if its size allows


class Tiling(NamedTuple):
    """What each program of a product computes."""

    columns: int  # of O
    depth: int  # of I, at a time
    num_parts: int = 1  # of the sum over I, one for each program of the same columns
    num_warps: int = 4
    num_stages: int = 4  # tiles that are read ahead
    rows: int = 64

    def shared_bytes(self, *, itemsize: int, is_gated: bool) -> int:
        """Bytes of shared memory of a program, whose weights have this itemsize."""
        num_lines = self.rows + self.columns * (2 if is_gated else 1)
        return num_lines * self.depth * itemsize * self.num_stages


def tiling_of(
    shape: tuple[int, int, int],  # rows, O, I; gated products have 2 O outputs
    *,
    itemsize: int,
    shared_bytes: int,  # of a program, at most
    is_gated: bool = False,
    max_parts: int = 1,
) -> Tiling | None:
    """The tiling of a product; None = cuBLAS computes it."""
    num_rows, num_out, num_in = shape
    if num_rows > (_MOST_ROWS_IN_PARTS if max_parts > 1 else _MOST_ROWS):
        return None
    rows = program_rows(num_rows)
    depth = (1 if is_gated else 2) * _READ_BYTES // itemsize
    while num_in % depth:
        depth //= 2
    if depth < _LEAST_DEPTH:
        return None
    found = None
    for columns in _PROGRAM_COLUMNS:
        num_tiles = -(-num_out // columns)
        num_parts = 1
        while 2 * num_parts <= max_parts and 2 * num_parts * num_tiles <= _MOST_PROGRAMS_IN_PARTS:
            if num_in % (2 * num_parts * depth):
                break
            num_parts *= 2
        found = Tiling(columns, depth, num_parts, num_stages=5 if itemsize > 1 else 4, rows=rows)
        enough = _LEAST_PROGRAMS_IN_PARTS if num_parts > 1 else _LEAST_PROGRAMS
        if num_tiles * num_parts >= enough:
            break
    assert found is not None
    return _fitting(found, itemsize=itemsize, is_gated=is_gated, shared_bytes=shared_bytes)


def program_rows(num_rows: int) -> int:
    return next(size for size in _PROGRAM_ROWS if size >= min(num_rows, _PROGRAM_ROWS[-1]))


def _fitting(tiling: Tiling, *, itemsize: int, is_gated: bool, shared_bytes: int) -> Tiling | None:
    """The tiling with fewer stages or less depth, so that it fits into shared memory."""
    while tiling.shared_bytes(itemsize=itemsize, is_gated=is_gated) > shared_bytes:
        if tiling.num_stages > 2:
            tiling = tiling._replace(num_stages=tiling.num_stages - 1)
        elif tiling.depth > _LEAST_DEPTH:
            tiling = tiling._replace(depth=tiling.depth // 2)
        else:
            return None
    return tiling
