"""Prefix cache: finds KV that earlier sequences left, so that a prefix is computed once.

A sequence that frees its slot releases its whole blocks as reusable; they count as free. The next
sequence with the same prefix takes them instead of computing them. The key of a block is a 128-bit
digest of all tokens up to its end and of their KV history: the weights that computed them.

Promise: a request finds only KV that the served weights computed, from the first token to the last.
With kv = "keep" there are two exceptions, because sequences then continue with the KV of older
weights: a preempted sequence finds its own KV, and a request with a session finds the KV that
earlier requests of the session left.

The index holds at most one entry per block. Tokens are hashed when a sequence leaves, while the
device works, and when it arrives, never while it decodes. The engine's thread calls everything.
"""

from collections import OrderedDict
from dataclasses import dataclass, replace

import numpy as np
import xxhash

from millrace.core.records import Request
from millrace.inference.embedded.kv.blocks import BlockPool
from millrace.inference.embedded.scheduling.sequence import (
    KVHistory,
    KVSource,
    Sequence,
    extend_history,
    truncate_history,
)

_BRANCHES = 4  # histories remembered per session; they differ only if weights change between them


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Prefix:
    """What was found of a sequence."""

    blocks: np.ndarray  # [B] int64; whole, and not yet shared
    num_tokens: int
    kv_history: KVHistory


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Leaving:
    """Blocks not yet in the index."""

    tokens: np.ndarray  # [B * block_tokens] int32
    kv_history: KVHistory
    blocks: np.ndarray  # [B] int64
    content_ids: np.ndarray  # [B] int64; of these blocks, when they were left


class PrefixCache:
    def __init__(
        self, pool: BlockPool, *, block_tokens: int, version: int, keeps: bool, is_on: bool = True
    ) -> None:
        """`keeps`: sequences go on with their KV when weights change (kv = "keep")."""
        self._pool = pool
        self._block_tokens = block_tokens
        self._keeps = keeps
        self._is_on = is_on
        self._source = KVSource(version=version, swap=0)
        self._index: dict[bytes, tuple[int, int]] = {}  # digest -> block, its content_id
        self._digests: list[bytes | None] = [None] * len(pool.references)  # by block
        self._leaving: list[_Leaving] = []
        # By session, least recent first: histories it left, and of how many tokens.
        self._sessions: OrderedDict[str, dict[KVHistory, int]] = OrderedDict()
        self._searched: tuple[np.ndarray, dict[KVHistory, list[bytes]]] | None = None

    def source_for(self, request: Request) -> KVSource:
        """What computes this request's tokens now."""
        if request.adapter is None:
            return self._source
        return replace(self._source, adapter=request.adapter)

    def begin(self, version: int) -> None:
        """Other weights are served from now on."""
        self._source = KVSource(version=version, swap=self._source.swap + 1)
        self._pool.expire()

    def leave(self, sequence: Sequence, *, blocks: np.ndarray, num_cached: int, ends: bool) -> None:
        """Take over a sequence's references to its blocks, which hold `num_cached` tokens' KV.

        What nobody could find is given up: after `ends`, the sequence itself will not look.
        """
        session = sequence.request.session if self._keeps else None
        is_for_others = sequence.kv_history == self._fresh(sequence.request)
        is_wanted = is_for_others or session is not None or not ends
        count = num_cached // self._block_tokens if self._is_on and is_wanted else 0
        self._pool.release(blocks[count:])
        if count == 0:
            return
        blocks, num_tokens = blocks[:count], count * self._block_tokens
        self._pool.release_reusable(blocks, survives_swaps=session is not None)
        left = _Leaving(
            tokens=sequence.tokens[:num_tokens],
            kv_history=truncate_history(sequence.kv_history, num_tokens),
            blocks=blocks,
            content_ids=self._pool.content_ids[blocks],
        )
        self._leaving.append(left)
        if session is not None:
            self._remember(session, left.kv_history, num_tokens=num_tokens)

    def settle(self) -> None:
        """Index what was left since the last call."""
        leaving, self._leaving = self._leaving, []
        for left in leaving:
            digests = _digests(left.tokens, left.kv_history, block_tokens=self._block_tokens)
            still = self._pool.content_ids[left.blocks] == left.content_ids
            rows = zip(digests, left.blocks.tolist(), left.content_ids.tolist(), strict=True)
            for (digest, block, content_id), is_there in zip(rows, still.tolist(), strict=True):
                if is_there:
                    self._enter(digest, block, content_id)

    def find(self, sequence: Sequence) -> Prefix:
        """The longest known prefix; one token at least is left to compute, for its logits."""
        best = Prefix(blocks=np.empty(0, dtype=np.int64), num_tokens=0, kv_history=())
        if not self._is_on:
            return best
        self.settle()
        for kv_history, digests in self._search_keys(sequence).items():
            blocks = self._known(digests)
            if len(blocks) > len(best.blocks):
                num_tokens = len(blocks) * self._block_tokens
                best = Prefix(
                    blocks=blocks,
                    num_tokens=num_tokens,
                    kv_history=truncate_history(kv_history, num_tokens),
                )
        return best

    def _search_keys(self, sequence: Sequence) -> dict[KVHistory, list[bytes]]:
        """Digests of the sequence's blocks under each kv_history it may go on from.

        Remembered, because the first sequence in line is looked up before every pass.
        """
        histories = dict.fromkeys([self._fresh(sequence.request), *self._own(sequence)])
        if self._searched is not None:
            tokens, keys = self._searched
            if tokens is sequence.tokens and keys.keys() == histories.keys():
                return keys
        count = (len(sequence.tokens) - 1) // self._block_tokens
        tokens = sequence.tokens[: count * self._block_tokens]
        keys = {
            kv_history: _digests(tokens, kv_history, block_tokens=self._block_tokens)
            for kv_history in histories
        }
        self._searched = (sequence.tokens, keys)
        return keys

    def _fresh(self, request: Request) -> KVHistory:
        """That of KV which was computed by what is served now, all of it."""
        return extend_history((), at=0, source=self.source_for(request))

    def _own(self, sequence: Sequence) -> list[KVHistory]:
        """Those of KV which this sequence and its session left, whatever computed it."""
        if not self._keeps:
            return []
        own = [sequence.kv_history] if sequence.kv_history else []
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
        blocks, content_ids = np.array(entries, dtype=np.int64).reshape(-1, 2).T
        gone = np.flatnonzero(self._pool.content_ids[blocks] != content_ids)
        return blocks[: gone[0]] if len(gone) else blocks

    def _enter(self, digest: bytes, block: int, content_id: int) -> None:
        entry = self._index.get(digest)
        if entry is not None and self._pool.content_ids[entry[0]] == entry[1]:
            return  # this block was known, or another holds the same
        earlier = self._digests[block]
        if earlier is not None and self._index.get(earlier, (-1, 0))[0] == block:
            del self._index[earlier]
        self._index[digest] = (block, content_id)
        self._digests[block] = digest

    def _remember(self, session: str, kv_history: KVHistory, *, num_tokens: int) -> None:
        earlier = self._sessions.pop(session, {})
        # One that this one merely goes on from needs no entry of its own.
        branches = [
            item for item in earlier.items() if truncate_history(kv_history, item[1]) != item[0]
        ]
        self._sessions[session] = dict([*branches, (kv_history, num_tokens)][-_BRANCHES:])
        if len(self._sessions) > len(self._digests):
            self._sessions.popitem(last=False)


def _digests(tokens: np.ndarray, kv_history: KVHistory, *, block_tokens: int) -> list[bytes]:
    """One per whole block: of everything up to its end."""
    data = memoryview(np.ascontiguousarray(tokens, dtype="<i4").tobytes())
    spans: dict[int, bytes] = {}  # by block: those that begin in it
    for span in kv_history:
        # No token is -1, so that a span is never taken for tokens.
        mark = np.array([-1, span.start], dtype="<i4").tobytes()
        source = xxhash.xxh3_128_digest(repr(span.source).encode())
        block = span.start // block_tokens
        spans[block] = spans.get(block, b"") + mark + source
    running, size = xxhash.xxh3_128(), 4 * block_tokens
    digests = []
    for block in range(len(data) // size):
        if block in spans:
            running.update(spans[block])
        running.update(data[block * size : (block + 1) * size])
        digests.append(running.digest())
    return digests
