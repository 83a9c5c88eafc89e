"""Finds KV that earlier sequences left behind, so that a prefix is computed once.

A sequence that gives up its lane leaves its whole blocks on the pool's shelves, where they count as
free; the next one whose tokens begin alike takes them instead of computing them. A block's key is
the digest (128 bits) of all tokens up to its end and of its lineage: which weights computed them.

Promise: a request finds only KV that the weights served now computed, from the first token to the
last. There are two exceptions, both for kv = "keep" alone, and both mean what keep means: that
sequences go on with the KV of older weights. A preempted sequence finds its own KV, and a request
that names a session finds the KV that earlier requests of this session left.

Nothing here grows beyond one entry per block. Tokens are hashed when a sequence leaves (while the
device works) and when it comes, never while it decodes. Called by the engine's thread.
"""

from collections import OrderedDict
from dataclasses import dataclass, replace

import numpy as np
import xxhash

from millrace.core.records import Request
from millrace.inference.embedded.kv.blocks import BlockPool
from millrace.inference.embedded.kv.lineage import Lineage, Origin, cut, go_on
from millrace.inference.embedded.scheduling.sequence import Sequence

_BRANCHES = 4  # lineages remembered per session; they differ only if weights change between them


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Prefix:
    """What was found of a sequence."""

    blocks: np.ndarray  # [B] int64; whole, and not yet shared
    num_tokens: int
    lineage: Lineage


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Leaving:
    """Blocks not yet in the index."""

    tokens: np.ndarray  # [B * block_tokens] int32
    lineage: Lineage
    blocks: np.ndarray  # [B] int64
    fillings: np.ndarray  # [B] int64; of these blocks, when they were left


class PrefixCache:
    def __init__(
        self, pool: BlockPool, *, block_tokens: int, version: int, keeps: bool, is_on: bool = True
    ) -> None:
        """`keeps`: sequences go on with their KV when weights change (kv = "keep")."""
        self._pool = pool
        self._block_tokens = block_tokens
        self._keeps = keeps
        self._is_on = is_on
        self._origin = Origin(version=version, swap=0)
        self._index: dict[bytes, tuple[int, int]] = {}  # digest -> block, its filling
        self._digests: list[bytes | None] = [None] * len(pool.references)  # by block
        self._leaving: list[_Leaving] = []
        # By session, least recent first: lineages it left, and of how many tokens.
        self._sessions: OrderedDict[str, dict[Lineage, int]] = OrderedDict()
        self._searched: tuple[np.ndarray, dict[Lineage, list[bytes]]] | None = None

    def origin_of(self, request: Request) -> Origin:
        """What computes this request's tokens now."""
        if request.adapter is None:
            return self._origin
        return replace(self._origin, adapter=request.adapter)

    def begin(self, version: int) -> None:
        """Other weights are served from now on."""
        self._origin = Origin(version=version, swap=self._origin.swap + 1)
        self._pool.expire()

    def leave(self, sequence: Sequence, *, blocks: np.ndarray, num_cached: int, ends: bool) -> None:
        """Take over a sequence's references to its blocks, which hold `num_cached` tokens' KV.

        What nobody could find is given up: after `ends`, the sequence itself will not look.
        """
        session = sequence.request.session if self._keeps else None
        is_for_others = sequence.lineage == self._fresh(sequence.request)
        is_wanted = is_for_others or session is not None or not ends
        count = num_cached // self._block_tokens if self._is_on and is_wanted else 0
        self._pool.release(blocks[count:])
        if count == 0:
            return
        blocks, num_tokens = blocks[:count], count * self._block_tokens
        self._pool.shelve(blocks, lasting=session is not None)
        left = _Leaving(
            tokens=sequence.tokens[:num_tokens],
            lineage=cut(sequence.lineage, num_tokens),
            blocks=blocks,
            fillings=self._pool.fillings[blocks],
        )
        self._leaving.append(left)
        if session is not None:
            self._remember(session, left.lineage, num_tokens=num_tokens)

    def settle(self) -> None:
        """Index what was left since the last call."""
        leaving, self._leaving = self._leaving, []
        for left in leaving:
            digests = _digests(left.tokens, left.lineage, block_tokens=self._block_tokens)
            still = self._pool.fillings[left.blocks] == left.fillings
            rows = zip(digests, left.blocks.tolist(), left.fillings.tolist(), strict=True)
            for (digest, block, filling), is_there in zip(rows, still.tolist(), strict=True):
                if is_there:
                    self._enter(digest, block, filling)

    def find(self, sequence: Sequence) -> Prefix:
        """The longest known prefix; one token at least is left to compute, for its logits."""
        best = Prefix(blocks=np.empty(0, dtype=np.int64), num_tokens=0, lineage=())
        if not self._is_on:
            return best
        self.settle()
        for lineage, digests in self._search_keys(sequence).items():
            blocks = self._known(digests)
            if len(blocks) > len(best.blocks):
                num_tokens = len(blocks) * self._block_tokens
                best = Prefix(
                    blocks=blocks, num_tokens=num_tokens, lineage=cut(lineage, num_tokens)
                )
        return best

    def _search_keys(self, sequence: Sequence) -> dict[Lineage, list[bytes]]:
        """Digests of the sequence's blocks under each lineage it may go on from.

        Remembered, because the first sequence in line is looked up before every pass.
        """
        lineages = dict.fromkeys([self._fresh(sequence.request), *self._own(sequence)])
        if self._searched is not None:
            tokens, keys = self._searched
            if tokens is sequence.tokens and keys.keys() == lineages.keys():
                return keys
        count = (len(sequence.tokens) - 1) // self._block_tokens
        tokens = sequence.tokens[: count * self._block_tokens]
        keys = {
            lineage: _digests(tokens, lineage, block_tokens=self._block_tokens)
            for lineage in lineages
        }
        self._searched = (sequence.tokens, keys)
        return keys

    def _fresh(self, request: Request) -> Lineage:
        """That of KV which was computed by what is served now, all of it."""
        return go_on((), at=0, origin=self.origin_of(request))

    def _own(self, sequence: Sequence) -> list[Lineage]:
        """Those of KV which this sequence and its session left, whatever computed it."""
        if not self._keeps:
            return []
        own = [sequence.lineage] if sequence.lineage else []
        session = sequence.request.session
        return own if session is None else [*own, *self._sessions.get(session, {})]

    def _known(self, digests: list[bytes]) -> np.ndarray:
        """[B] blocks of the longest run of these digests, from the first one, that is there."""
        entries = []
        for digest in digests:
            entry = self._index.get(digest)
            if entry is None:
                break
            entries.append(entry)
        blocks, fillings = np.array(entries, dtype=np.int64).reshape(-1, 2).T
        gone = np.flatnonzero(self._pool.fillings[blocks] != fillings)
        return blocks[: gone[0]] if len(gone) else blocks

    def _enter(self, digest: bytes, block: int, filling: int) -> None:
        entry = self._index.get(digest)
        if entry is not None and self._pool.fillings[entry[0]] == entry[1]:
            return  # this block was known, or another holds the same
        earlier = self._digests[block]
        if earlier is not None and self._index.get(earlier, (-1, 0))[0] == block:
            del self._index[earlier]
        self._index[digest] = (block, filling)
        self._digests[block] = digest

    def _remember(self, session: str, lineage: Lineage, *, num_tokens: int) -> None:
        earlier = self._sessions.pop(session, {})
        # One that this one merely goes on from needs no entry of its own.
        branches = [item for item in earlier.items() if cut(lineage, item[1]) != item[0]]
        self._sessions[session] = dict([*branches, (lineage, num_tokens)][-_BRANCHES:])
        if len(self._sessions) > len(self._digests):
            self._sessions.popitem(last=False)


def _digests(tokens: np.ndarray, lineage: Lineage, *, block_tokens: int) -> list[bytes]:
    """One per whole block: of everything up to its end."""
    data = memoryview(np.ascontiguousarray(tokens, dtype="<i4").tobytes())
    spans: dict[int, bytes] = {}  # by block: those that begin in it
    for span in lineage:
        # No token is -1, so that a span is never taken for tokens.
        mark = np.array([-1, span.start], dtype="<i4").tobytes()
        origin = xxhash.xxh3_128_digest(repr(span.origin).encode())
        block = span.start // block_tokens
        spans[block] = spans.get(block, b"") + mark + origin
    running, size = xxhash.xxh3_128(), 4 * block_tokens
    digests = []
    for block in range(len(data) // size):
        if block in spans:
            running.update(spans[block])
        running.update(data[block * size : (block + 1) * size])
        digests.append(running.digest())
    return digests
