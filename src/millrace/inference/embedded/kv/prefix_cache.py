"""Prefix cache: finds KV that earlier sequences left, so that a prefix is computed once.

A sequence that frees its slot releases its whole blocks as reusable; they count as free. The key of
a block is a 128-bit digest of all tokens up to its end and of their KV history: the weights that
computed them.

Promise: a request finds only KV that the served weights computed, from the first token to the last.
With kv = "keep" there are two exceptions, because sequences then continue with the KV of older
weights: a preempted sequence finds its own KV, and a request with a session finds the KV that
earlier requests of the session left. Exact mode has neither, because the versions of the tokens of
a rollout need not show that older weights computed their context. A request finds KV of requests
with its own cache_salt only.
With recurrent states, it finds KV only up to a block whose end has a snapshot of the state.

The index holds at most one entry per block. Tokens are hashed when a sequence leaves, while the
device works, and when it arrives, never while it decodes. The engine's thread calls everything.
"""

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import KW_ONLY, InitVar, dataclass, replace
from itertools import takewhile
from typing import NamedTuple

import numpy as np
import xxhash

from millrace.core.records import Request
from millrace.inference.embedded.kv.blocks import BlockPool
from millrace.inference.embedded.kv.states import StateSnapshots
from millrace.inference.embedded.scheduling.sequence import (
    KVHistory,
    KVSource,
    Sequence,
    extend_history,
    truncate_history,
)

_BRANCHES = 4  # histories remembered per session; they differ only if weights change between them


class Prefix(NamedTuple):
    """The cached KV of a sequence's first tokens."""

    blocks: np.ndarray  # [B] int64; whole, and not yet shared
    num_tokens: int
    kv_history: KVHistory
    num_known: int = 0  # tokens whose KV is cached, though perhaps there is no state at their end


@dataclass(eq=False)
class PrefixCache:
    pool: BlockPool
    _: KW_ONLY
    block_tokens: int
    version: InitVar[int]
    keeps: bool  # sequences and sessions find their KV of older weights (kv = "keep")
    is_on: bool = True
    # Adapters with versions of their own; None = the first policy.
    policies: InitVar[Iterable[str | None]] = (None,)
    snapshots: StateSnapshots | None = None  # of recurrent states, if the model has some

    def __post_init__(self, version: int, policies: Iterable[str | None]) -> None:
        # By adapter; one that is no policy has the version of the first.
        self._sources = dict.fromkeys([None, *policies], KVSource(version=version, swap=0))
        self._index: dict[bytes, tuple[int, int]] = {}  # digest -> block, its content_id
        self._digests: list[bytes | None] = [None] * len(self.pool.references)  # by block
        # Blocks [B] that are not in the index yet, their content_ids [B] when they were released,
        # and their tokens [B * block_tokens] and KV history.
        self._leaving: list[tuple[np.ndarray, np.ndarray, np.ndarray, KVHistory]] = []
        # By session, least recent first: the KV histories that it left, with their token counts.
        self._sessions: OrderedDict[str, dict[KVHistory, int]] = OrderedDict()
        self._searched: tuple[np.ndarray, dict[KVHistory, list[bytes]]] | None = None

    def source_for(self, request: Request) -> KVSource:
        """What computes this request's tokens now."""
        source = self._sources.get(request.adapter, self._sources[None])
        if request.adapter is None and not request.cache_salt:
            return source
        return replace(source, adapter=request.adapter, cache_salt=request.cache_salt)

    def begin(self, version: int, *, policy: str | None = None) -> None:
        """Other weights serve from now on."""
        swap = self._sources[policy].swap + 1
        self._sources[policy] = KVSource(version=version, swap=swap)
        self.pool.expire()

    def leave(self, sequence: Sequence, *, blocks: np.ndarray, num_cached: int, ends: bool) -> None:
        """Take over a sequence's blocks, which hold the KV of `num_cached` tokens. Blocks that no
        request could find are freed. A sequence that `ends` will not look for them."""
        session = sequence.request.session if self.keeps else None
        is_current = sequence.kv_history == self._current_history(sequence.request)
        is_wanted = is_current or session is not None or not ends
        count = num_cached // self.block_tokens if self.is_on and is_wanted else 0
        self.pool.release(blocks[count:])
        if count == 0:
            return
        blocks, num_tokens = blocks[:count], count * self.block_tokens
        self.pool.release_reusable(blocks, survives_swaps=session is not None)
        history = self.offer(sequence, blocks)
        if session is not None:
            self._remember(session, history, num_tokens=num_tokens)

    def offer(self, sequence: Sequence, blocks: np.ndarray) -> KVHistory:
        """Let others find a sequence's first blocks, all of them whole; returns their history."""
        num_tokens = len(blocks) * self.block_tokens
        history = truncate_history(sequence.kv_history, num_tokens)
        content_ids = self.pool.content_ids[blocks]
        self._leaving.append((blocks, content_ids, sequence.tokens[:num_tokens], history))
        return history

    def settle(self) -> None:
        """Index the blocks that were offered since the last call."""
        leaving, self._leaving = self._leaving, []
        for blocks, content_ids, tokens, kv_history in leaving:
            digests = _digests(tokens, kv_history, block_tokens=self.block_tokens)
            is_there = self.pool.content_ids[blocks] == content_ids
            for row in np.flatnonzero(is_there).tolist():
                self._enter(digests[row], int(blocks[row]), int(content_ids[row]))

    def find(self, sequence: Sequence) -> Prefix:
        """The longest cached prefix; at least one token remains to be computed, for its logits."""
        best = Prefix(np.empty(0, dtype=np.int64), 0, ())
        if not self.is_on:
            return best
        self.settle()
        num_known = 0
        for kv_history, digests in self._search_keys(sequence).items():
            blocks = self._known(digests)
            num_known = max(num_known, len(blocks) * self.block_tokens)
            if self.snapshots is not None:
                blocks = blocks[: self.snapshots.num_usable(blocks)]
            if len(blocks) > len(best.blocks):
                num_tokens = len(blocks) * self.block_tokens
                best = Prefix(blocks, num_tokens, truncate_history(kv_history, num_tokens))
        return best._replace(num_known=num_known)

    def _search_keys(self, sequence: Sequence) -> dict[KVHistory, list[bytes]]:
        """Digests of the sequence's blocks under each KV history that it may continue. The last
        result is kept, because the first waiting sequence is looked up before every pass."""
        histories = {self._current_history(sequence.request): None}
        if self.keeps:  # KV that this sequence and its session left, under any weights
            own = (sequence.kv_history,) if sequence.kv_history else ()
            session = sequence.request.session
            of_session = {} if session is None else self._sessions.get(session, {})
            histories |= dict.fromkeys((*own, *of_session))
        if self._searched is not None:
            tokens, keys = self._searched
            if tokens is sequence.tokens and keys.keys() == histories.keys():
                return keys
        count = (len(sequence.tokens) - 1) // self.block_tokens
        tokens = sequence.tokens[: count * self.block_tokens]
        keys = {h: _digests(tokens, h, block_tokens=self.block_tokens) for h in histories}
        self._searched = (sequence.tokens, keys)
        return keys

    def _current_history(self, request: Request) -> KVHistory:
        """The history of KV that the served weights computed from the first token on."""
        return extend_history((), at=0, source=self.source_for(request))

    def _known(self, digests: list[bytes]) -> np.ndarray:
        """[B] blocks of the longest cached run of these digests, from the first one on."""
        entries = list(takewhile(bool, map(self._index.get, digests)))
        blocks, content_ids = np.array(entries, dtype=np.int64).reshape(-1, 2).T
        gone = np.flatnonzero(self.pool.content_ids[blocks] != content_ids)
        return blocks[: gone[0]] if len(gone) else blocks

    def _enter(self, digest: bytes, block: int, content_id: int) -> None:
        entry = self._index.get(digest)
        if entry is not None and self.pool.content_ids[entry[0]] == entry[1]:
            # This block was indexed before, or another one holds the same KV.
            has_more = self._has_snapshot(block) and not self._has_snapshot(entry[0])
            if not has_more:
                return
        earlier = self._digests[block]
        if earlier is not None and self._index.get(earlier, (-1, 0))[0] == block:
            del self._index[earlier]
        self._index[digest] = (block, content_id)
        self._digests[block] = digest

    def _has_snapshot(self, block: int) -> bool:
        return self.snapshots is not None and self.snapshots.num_usable(np.array([block])) > 0

    def _remember(self, session: str, kv_history: KVHistory, *, num_tokens: int) -> None:
        earlier = self._sessions.pop(session, {})
        # A history that this one extends needs no entry of its own.
        branches = [(h, n) for h, n in earlier.items() if truncate_history(kv_history, n) != h]
        self._sessions[session] = dict([*branches, (kv_history, num_tokens)][-_BRANCHES:])
        if len(self._sessions) > len(self._digests):
            self._sessions.popitem(last=False)


def _digests(tokens: np.ndarray, kv_history: KVHistory, *, block_tokens: int) -> list[bytes]:
    """One digest per whole block, of everything up to its end."""
    data = memoryview(np.ascontiguousarray(tokens, dtype="<i4").tobytes())
    spans: dict[int, bytes] = {}  # by the block in which they begin
    for span in kv_history:
        # No token is -1, so a span cannot equal tokens.
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
