"""One completion in progress, its KV history, and the plans that the scheduler makes.

The KV of a token depends on all tokens before it and on the weights that computed each of them. Two
sequences may share a block only if both agree from the first token on, so a KV history is part of
every prefix-cache key.

P = prompt tokens, N = sampled tokens so far.
"""

from concurrent.futures import Executor, Future
from dataclasses import dataclass, field
from typing import NamedTuple, TypeVar

import numpy as np

from millrace.core.completions import join_top, joined
from millrace.core.errors import TaskError
from millrace.core.records import Completion, FinishReason, Kept, KVOrigin, Request, TopTokens
from millrace.inference.embedded.adapters import AdapterBank
from millrace.inference.embedded.kv.states import SnapshotWrite
from millrace.inference.embedded.routes import SequenceRoutes
from millrace.inference.embedded.scheduling.drafts import DraftCursor
from millrace.models.grammars import GrammarCompiler, GrammarMatcher


@dataclass(frozen=True, kw_only=True, slots=True)
class KVSource:
    """What computed some KV, and for whom."""

    version: int
    adapter: str | None = None  # chosen by the request
    cache_salt: str = ""  # of the request
    swap: int  # count of swaps: a version number may return with other weights after a restart


@dataclass(frozen=True, slots=True)
class KVSpan:
    """KV of one source, from token `start` up to the next span or the end."""

    start: int
    source: KVSource


KVHistory = tuple[KVSpan, ...]  # ascending; the first begins at 0. Empty = nothing was computed


def truncate_history(kv_history: KVHistory, num_tokens: int) -> KVHistory:
    """The history of the first `num_tokens` tokens."""
    return tuple(span for span in kv_history if span.start < num_tokens)


def extend_history(kv_history: KVHistory, *, at: int, source: KVSource) -> KVHistory:
    """The history of a sequence whose tokens from `at` on are computed by `source`."""
    earlier = truncate_history(kv_history, at)
    if earlier and earlier[-1].source == source:
        return earlier
    return (*earlier, KVSpan(at, source))


Sampled = tuple[np.ndarray, np.ndarray, np.ndarray]  # tokens, logprobs and versions, [N] each


class KeptIds:
    """Kept ids of each sampled token, one row per token. They may be megabytes, so they lie in one
    array that grows: a completion takes it as it is. The engine's thread calls everything; a thread
    of an executor may still copy what append() got, and since() waits for it."""

    def __init__(self, done: Kept | None = None) -> None:
        """`done`: kept ids of tokens that the sequence already has."""
        self._ids = np.empty(0, dtype=np.int32)  # with room to spare
        self._offsets = [np.zeros(1, dtype=np.int64)]  # of each append()
        self._end = 0
        self._copied: Future[None] | None = None
        if done is not None:
            self.append(done.ids, sizes=np.diff(done.offsets))

    def append(
        self, ids: np.ndarray, *, sizes: np.ndarray, copiers: Executor | None = None
    ) -> None:
        """Add rows of these sizes, which lie in `ids` one after another; `ids` is copied."""
        self._wait()
        start, self._end = self._end, self._end + len(ids)
        self._offsets.append(start + sizes.cumsum(dtype=np.int64))
        if copiers is None:
            self._copy(ids, start)
        else:
            self._copied = copiers.submit(self._copy, ids, start)

    def since(self, start: int) -> Kept:
        """The rows from token number `start` on; a view, which append() leaves as it is."""
        self._wait()
        self._offsets = [np.concatenate(self._offsets)]
        offsets = self._offsets[0][start:]
        return Kept(ids=self._ids[offsets[0] : offsets[-1]], offsets=offsets - offsets[0])

    def _copy(self, ids: np.ndarray, start: int) -> None:
        stop = start + len(ids)
        if stop > len(self._ids):
            larger = np.empty(max(2 * len(self._ids), stop), dtype=np.int32)
            larger[:start] = self._ids[:start]
            self._ids = larger
        self._ids[start:stop] = ids

    def _wait(self) -> None:
        if self._copied is not None:
            self._copied.result()
            self._copied = None


@dataclass(kw_only=True, slots=True, eq=False)
class Sequence:
    """A completion in progress. While it has a slot, the slot's arrays are newer than these."""

    request: Request
    member: int  # 0..n-1 within its request
    arrival: int  # order of arrival in the engine; unique
    adapter_slot: int = 0  # of the request's adapter in the engine's bank, if it has one
    tokens: np.ndarray  # [P + N] int32
    logprobs: np.ndarray  # [N] float32
    versions: np.ndarray  # [N] int32
    kept: KeptIds | None  # N rows; None = the request does not truncate, or they are not recorded
    # Top logprobs, if the request reports them: of the partial completion, then of each token.
    top: list[TopTokens]
    routes: SequenceRoutes | None = None  # None = not recorded, or not wanted
    slot: int | None = None
    # Members of the same request that wait for this one's prefill, to share it.
    followers: list["Sequence"] = field(default_factory=list)
    # If it has no slot: blocks with the KV of all tokens but perhaps the last, which runs once
    # more, because its logits are needed.
    held_blocks: np.ndarray | None = None
    kv_history: KVHistory = ()  # of its KV, or of the KV it had in its last slot
    guide: GrammarMatcher | None = None  # of the request's grammar
    cursor: DraftCursor | None = None  # once there may be drafts for it
    finish: FinishReason | None = None  # once it has ended
    num_streamed: int = 0  # if it streams: sampled tokens that chunks have, or that it came with

    @property
    def num_prompt(self) -> int:
        return len(self.request.prompt)

    @property
    def num_input(self) -> int:
        """Tokens of its prompt, and of the completion that it resumes."""
        partial = self.request.partial
        return self.num_prompt + (0 if partial is None else len(partial.tokens))

    def sampled(self) -> Sampled:
        """What it has sampled, without the tokens that only its slot has."""
        return self.tokens[self.num_prompt :], self.logprobs, self.versions

    @property
    def rank(self) -> int:
        """Its place in the order in which sequences get slots and prefill."""
        return self.arrival - self.request.priority

    @property
    def has_begun(self) -> bool:
        """True if it has sampled tokens, without those in its slot."""
        return len(self.tokens) > self.num_prompt

    def completion(self, *, finish: FinishReason, text: str, block_tokens: int) -> Completion:
        spans = tuple((span.start, span.source.version) for span in self.kv_history)
        return Completion(
            tokens=self.tokens[self.num_prompt :],
            logprobs=self.logprobs,
            versions=self.versions,
            kept=None if self.kept is None else self.kept.since(0),
            top=join_top(self.top),
            routes=None if self.routes is None else self.routes.rows(),
            finish=finish,
            text=text,
            kv=KVOrigin(spans=spans, block_tokens=block_tokens) if spans else None,
        )


S = TypeVar("S", bound=Sequence)


def sequences_of(
    request: Request,
    *,
    first_arrival: int,
    kind: type[S] = Sequence,
    adapter_slot: int = 0,
    grammars: GrammarCompiler | None = None,
    records_kept: bool = True,
    records_routes: bool = False,
) -> list[S]:
    """The n sequences of a request; with a partial completion, one that resumes it."""
    prompt = np.asarray(request.prompt, dtype=np.int32)
    done = joined([], truncates=False) if request.partial is None else request.partial
    keeps = records_kept and request.sampling.truncates
    grammar, salt = request.sampling.grammar, request.cache_salt
    return [
        kind(
            request=request,
            member=member,
            arrival=first_arrival + member,
            adapter_slot=adapter_slot,
            tokens=np.concatenate([prompt, done.tokens.astype(np.int32)]),
            logprobs=done.logprobs,
            versions=done.versions,
            num_streamed=len(done.tokens),
            kept=KeptIds(done.kept) if keeps else None,
            top=[] if done.top is None else [done.top],
            routes=_routes_of(request) if records_routes else None,
            guide=None if grammars is None else grammars.matcher(grammar, cache_salt=salt),
        )
        for member in range(request.n)
    ]


def _routes_of(request: Request) -> SequenceRoutes | None:
    """The routes of a partial completion, except those of its last token, which is fed next."""
    start, partial = request.routes_from, request.partial
    if start is None or partial is None or partial.routes is None:
        return None if start is None else SequenceRoutes(start)
    num_fed = len(request.prompt) + len(partial.tokens) - 1 - start
    return SequenceRoutes(start, done=partial.routes[:num_fed])


BlockCopies = tuple[np.ndarray, np.ndarray]  # (sources, targets), [C] int64 each


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class BatchPlan:
    """One forward pass. Each slot computes `counts` tokens, starting after its cached tokens."""

    slots: np.ndarray  # [R] int64; first the slots with one token, shortest context first
    counts: np.ndarray  # [R] int64
    num_single: int  # slots with one token
    copies: BlockCopies  # of blocks, before the pass
    # [R] int64; of the counts, draft tokens. All rows then need logits. None = there are none.
    drafts: np.ndarray | None = None
    snapshots: tuple[SnapshotWrite, ...] = ()  # of recurrent states, during the pass


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class DecodePlan:
    """Several steps of one token for each slot; blocks for all of them are allocated."""

    slots: np.ndarray  # [R] int64
    num_steps: int
    copies: BlockCopies  # of blocks, before the first step


NO_TOKEN = -1  # in place of a token: the row had ended


class DecodeResult(NamedTuple):
    """The tokens of a launch: the first `counts` entries of each column. N = steps, R = slots."""

    tokens: np.ndarray  # [N, R] int32
    logprobs: np.ndarray  # [N, R] float32
    counts: np.ndarray  # [R] int64
    # If some slots truncate: kept ids [K] int32, slot after slot and in each step after step, and
    # how many of them belong to each token, [R, N] int32; 0 = no id was ruled out.
    kept: np.ndarray | None = None
    num_kept: np.ndarray | None = None
    # If some slots report top logprobs: ids int32 and logprobs [N, R or the first of them, K].
    top: tuple[np.ndarray, np.ndarray] | None = None


def check_request(
    request: Request, *, max_context: int, vocab_size: int, records_kept: bool = True
) -> None:
    """Refuse a request that can never be served. `records_kept`: completions have kept ids."""
    num_prompt, sampling = len(request.prompt), request.sampling
    if num_prompt == 0:
        raise TaskError(f"Request {request.id!r} has an empty prompt.")
    if num_prompt >= max_context:
        raise TaskError(
            f"The prompt of request {request.id!r} has {num_prompt} tokens, and the context of"
            f" {max_context} has no room for one more; shorten it or raise"
            " engine.max_context (and engine.options.kv_bytes, if that bounds it)."
        )
    if request.prompt.min() < 0 or request.prompt.max() >= vocab_size:
        raise TaskError(
            f"The prompt of request {request.id!r} has token ids outside"
            f" 0..{vocab_size - 1}; is its tokenizer the model's own?"
        )
    if request.n < 1 or sampling.max_new_tokens < 1 or "" in sampling.stop:
        raise TaskError(
            f"Request {request.id!r} needs n and max_new_tokens of at least 1, and no empty"
            f" stop string; it has {request.n}, {sampling.max_new_tokens}, {sampling.stop}."
        )
    if any(not 0 <= id < vocab_size for id, _ in sampling.logit_bias):
        raise TaskError(f"logit_bias has a token id outside 0..{vocab_size - 1}.")
    if (partial := request.partial) is None:
        return
    if request.n != 1:
        raise TaskError(f"Request {request.id!r} resumes one completion but asks {request.n}.")
    has_kept = partial.kept is not None
    if records_kept and sampling.truncates != has_kept and len(partial.tokens):
        raise TaskError(
            f"Request {request.id!r} resumes a completion that was sampled with other"
            " truncation; resume it with the settings it began with."
        )


def adapter_slot(request: Request, bank: AdapterBank | None) -> int:
    """The slot of the request's adapter; refuses an unknown adapter."""
    if bank is not None:
        return bank.slot_of(request.adapter)
    if request.adapter is not None:
        raise TaskError(
            f"There is no adapter {request.adapter!r}; this engine has only the policy. Name"
            " others in engine.adapters, or set lora.apply to 'unmerged' for 'base'."
        )
    return 0
