"""Damaged bytes for tests: the same in every run."""

import random
import tracemalloc
from collections.abc import Callable, Iterator

import pytest

FEW, MANY = 1_000, pytest.param(10_000, marks=pytest.mark.slow)
MOST_BYTES = 8 * 2**20  # of memory, to read a few kilobytes that were damaged
INTERESTING = (b"\x00", b"\x01", b"\x7f", b"\x80", b"\xc1", b"\xff", b"\xdd\xff\xff\xff\xff")


def mutations(data: bytes, *, count: int, seed: int) -> Iterator[bytes]:
    """The bytes after one to four changes: flipped bits, cut, repeated, inserted, overwritten."""
    chance = random.Random(seed)
    for _ in range(count):
        changed = bytearray(data)
        for _ in range(chance.randint(1, 4)):
            start = chance.randrange(len(changed) + 1)
            end = min(len(changed), start + chance.choice([1, 2, 4, 8, 64]))
            match chance.randrange(6):
                case 0 if start < len(changed):
                    changed[start] ^= 1 << chance.randrange(8)
                case 1:
                    del changed[start:end]
                case 2:
                    changed[start:start] = changed[start:end]
                case 3:
                    changed[start:start] = chance.choice(INTERESTING)
                case 4:
                    changed[start:end] = chance.randbytes(end - start)
                case _:
                    piece = chance.choice(INTERESTING)
                    changed[start : start + len(piece)] = piece
        yield bytes(changed)


def costs_little(read: Callable[[], object], *, most_bytes: int = MOST_BYTES) -> None:
    tracemalloc.start()
    try:
        read()
        assert tracemalloc.get_traced_memory()[1] < most_bytes
    finally:
        tracemalloc.stop()
