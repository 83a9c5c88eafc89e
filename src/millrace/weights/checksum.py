"""Checksums of payloads.

Promise: both ends compute the same number for the same bytes. On the host it is xxh3_64, at memory
speed. Hashing on a GPU would first copy everything to the host, so there it is a weighted sum of
32-bit words, computed in one pass on the device.

Strength of the sum: it uses exact integers, so it is equal for equal bytes. Any change within one
word and any exchange of two words changes it; random damage goes undetected once in about 2**64.
Like xxh3, it does not protect against deliberate damage.
"""

import torch
import xxhash

_COLUMNS = 4096
_MIX = 0x9E3779B97F4A7C15  # odd: keeps the two sums from cancelling


def checksum(payload: torch.Tensor) -> int:
    """Of a flat uint8 tensor whose size is a multiple of 4."""
    if payload.is_cuda:
        return word_sum(payload)
    return xxhash.xxh3_64_intdigest(payload.numpy().data)


def word_sum(payload: torch.Tensor) -> int:
    """Sums of the words as a table of rows, weighted by row and by column."""
    words = payload.view(torch.int32)
    num_whole = len(words) // _COLUMNS * _COLUMNS
    table = words[:num_whole].view(-1, _COLUMNS)
    tail = words[num_whole:]
    # int64 wraps around, which is addition modulo 2**64, so the order does not matter.
    by_row, by_column = _weighted_sums(table)
    by_row += (2 * len(table) + 1) * tail.sum(dtype=torch.int64)
    by_column += _weighted(tail.long())
    row_sum, column_sum = torch.stack([by_row, by_column]).tolist()
    return (row_sum + _MIX * column_sum) % 2**64


def _weighted_sums(table: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    if table.is_cuda:
        from millrace.weights import checksum_kernels

        return checksum_kernels.weighted_sums(table)
    return _weighted(table.sum(1, dtype=torch.int64)), _weighted(table.sum(0, dtype=torch.int64))


def _weighted(sums: torch.Tensor) -> torch.Tensor:
    weights = torch.arange(1, 2 * len(sums) + 1, 2, device=sums.device)
    return (sums * weights).sum()
