"""Which weights computed a sequence's KV: the part of a cached prefix's key that is not its tokens.

The KV of a token depends on all tokens before it and on the weights each of them ran through, so
two sequences may share a block only if both agree, from the first token on.
"""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Origin:
    """What computed some KV."""

    version: int
    adapter: str | None = None  # that the request chose
    swap: int  # by count: a version's number may come back with other values, as after a restart


@dataclass(frozen=True, slots=True)
class KVSpan:
    """From token `start` to the next span, or to the end."""

    start: int
    origin: Origin


Lineage = tuple[KVSpan, ...]  # ascending; the first begins at 0. Empty = nothing was computed


def cut(lineage: Lineage, num_tokens: int) -> Lineage:
    """That of the first `num_tokens`."""
    return tuple(span for span in lineage if span.start < num_tokens)


def go_on(lineage: Lineage, *, at: int, origin: Origin) -> Lineage:
    """That of a sequence whose tokens from `at` on are computed by `origin`."""
    earlier = cut(lineage, at)
    if earlier and earlier[-1].origin == origin:
        return earlier
    return (*earlier, KVSpan(at, origin))
