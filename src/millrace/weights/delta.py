"""A version as its difference from another: indices and values of the words that changed.

Promise: apply(find(new, old), old) is new, bit for bit. A word is as wide as the engine's dtype, so
a small step, which leaves most bfloat16 values unchanged, makes a small delta.

The blob: num_changed indices (int32, or int64 from 2**31 words on), ascending; then the words.
"""

import torch

from millrace.core.errors import WeightError
from millrace.core.records import Delta, WeightUpdate

_WORDS = {2: torch.int16, 4: torch.int32}
_CHUNK_WORDS = 2**24  # compared at a time; bounds the memory of the comparison


def find(
    new: torch.Tensor, old: torch.Tensor, *, word_bytes: int
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Indices and values of the words that differ; None if they are not smaller than `new`."""
    new_words, old_words = new.view(_WORDS[word_bytes]), old.view(_WORDS[word_bytes])
    index_dtype = _index_dtype(len(new_words))
    left = (len(new) - 1) // (index_dtype.itemsize + word_bytes)  # changes before it is larger
    found: list[torch.Tensor] = []
    for start in range(0, len(new_words), _CHUNK_WORDS):
        chunk = slice(start, start + _CHUNK_WORDS)
        changed = (new_words[chunk] != old_words[chunk]).nonzero().squeeze(1)
        left -= len(changed)
        if left < 0:
            return None
        found.append((changed + start).to(index_dtype))
    indices = torch.cat(found) if found else torch.empty(0, dtype=index_dtype, device=new.device)
    return indices, new_words[indices.long()]


def write(changes: tuple[torch.Tensor, torch.Tensor], *, into: torch.Tensor) -> None:
    indices, values = changes
    end = indices.numel() * indices.itemsize
    into[:end].view(indices.dtype).copy_(indices)
    into[end:].view(values.dtype).copy_(values)


def check(update: WeightUpdate, delta: Delta) -> None:
    """Refuse a delta whose size does not fit this update."""
    if delta.word_bytes in _WORDS and delta.num_changed >= 0:
        index_bytes = _index_dtype(update.num_bytes // delta.word_bytes).itemsize
        if delta.num_bytes == delta.num_changed * (index_bytes + delta.word_bytes):
            return
    raise WeightError(f"The delta of version {update.version} has an impossible size.")


def apply(
    blob: torch.Tensor, *, delta: Delta, base: torch.Tensor, into: torch.Tensor, version: int
) -> None:
    """Make `into` the payload of `version`, from that of the delta's base."""
    words = into.view(_WORDS[delta.word_bytes])
    index_dtype = _index_dtype(len(words))
    end = delta.num_changed * index_dtype.itemsize
    indices = blob[:end].view(index_dtype).to(words.device).long()
    values = blob[end : delta.num_bytes].view(words.dtype).to(words.device)
    if len(indices) and not (int(indices.min()) >= 0 and int(indices.max()) < len(words)):
        raise WeightError(f"The delta of version {version} has an index outside its payload.")
    into.copy_(base)
    words[indices] = values


def _index_dtype(num_words: int) -> torch.dtype:
    return torch.int32 if num_words < 2**31 else torch.int64
