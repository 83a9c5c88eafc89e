"""Completions: cut and joined with everything that belongs to their tokens, and resumed.

A token log collects the streamed tokens of a request. From it the engine pool resumes the requests
of a lost engine on another one. The journal saves the tokens of unfinished groups, as
StreamedTokens, across a crash of the controller; a resumed group replays them and samples only the
rest.

Promise: tokens, logprobs, versions and kept ids are joined as they were sampled. Expert routes come
with the end of a completion only: the engine that resumes it records its own.

An array of routes is [rows, layers, top_k], uint8 for up to 255 experts and uint16 for more. A row
of the largest number of its type stands for a token whose experts are unknown. Torch-free.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import msgspec
import numpy as np
import xxhash

from millrace.core.records import (
    Completion,
    CompletionChunk,
    FinishReason,
    Kept,
    Request,
    TopTokens,
)


def joined(parts: Sequence[Completion | CompletionChunk], *, truncates: bool) -> Completion:
    """The parts in order, as one completion to be resumed, without text and KV origin.

    `truncates`: sampling truncates, so the tokens have kept ids.
    """
    no_ids, no_logprobs = np.empty(0, np.int32), np.empty(0, np.float32)
    # The last part with routes has those of all earlier parts, too.
    routed = [part for part in parts if isinstance(part, Completion) and part.routes is not None]
    return Completion(
        tokens=np.concatenate([no_ids, *(part.tokens for part in parts)]),
        logprobs=np.concatenate(
            [no_logprobs, *(part.logprobs for part in parts)], dtype=np.float32
        ),
        versions=np.concatenate([no_ids, *(part.versions for part in parts)]),
        kept=join_kept([part.kept for part in parts if part.kept]) if truncates else None,
        top=join_top([part.top for part in parts if part.top]),
        routes=routed[-1].routes if routed else None,
        finish="interrupt",
        text="",
    )


def cut(completion: Completion, begin: int, end: int | None = None) -> Completion:
    """The tokens from `begin` to `end`, by default to the last, as one completion to be resumed.

    Routes begin in the prompt, so they are cut at the end only."""
    stop = len(completion.tokens) if end is None else end
    routes, kept, top = completion.routes, completion.kept, completion.top
    if routes is not None:
        routes = routes[: max(0, len(routes) - (len(completion.tokens) - stop))]
    if kept is not None:
        offsets = kept.offsets[begin : stop + 1]
        kept = Kept(ids=kept.ids[offsets[0] : offsets[-1]], offsets=offsets - offsets[0])
    return Completion(
        tokens=completion.tokens[begin:stop],
        logprobs=completion.logprobs[begin:stop],
        versions=completion.versions[begin:stop],
        kept=kept,
        top=top and TopTokens(ids=top.ids[begin:stop], logprobs=top.logprobs[begin:stop]),
        routes=routes,
        finish="interrupt",
        text="",
    )


def chunk_of(
    completion: Completion, *, member: int, finish: FinishReason | None = None
) -> CompletionChunk:
    """All tokens of a completion, as its stream callback receives them."""
    return CompletionChunk(
        member=member,
        tokens=completion.tokens,
        logprobs=completion.logprobs,
        versions=completion.versions,
        kept=completion.kept,
        top=completion.top,
        finish=finish,
    )


def join_kept(parts: Sequence[Kept]) -> Kept:
    no_ids, nothing = np.empty(0, dtype=np.int32), np.zeros(1, dtype=np.int64)
    sizes = np.concatenate([nothing, *(np.diff(part.offsets) for part in parts)])
    return Kept(
        ids=np.concatenate([no_ids, *(part.ids for part in parts)]),
        offsets=np.cumsum(sizes).astype(np.int64),
    )


def kept_row(kept: Kept, index: int) -> np.ndarray:  # [kept ids] int32
    """The ids of one row, which may be a bit mask; none = all."""
    ids = kept.ids[kept.offsets[index] : kept.offsets[index + 1]]
    if len(ids) == 0 or ids[0] >= 0:
        return ids
    bits = np.unpackbits(ids[1:].astype("<i4").view(np.uint8), bitorder="little")
    return np.flatnonzero(bits).astype(np.int32)


def kept_counts(kept: Kept) -> np.ndarray:  # [rows] int64
    """The number of ids that each row keeps; 0 = all."""
    sizes = np.diff(kept.offsets)
    first = kept.ids[np.minimum(kept.offsets[:-1], len(kept.ids) - 1)] if len(kept.ids) else 0
    return np.where((sizes > 0) & (first < 0), np.negative(first), sizes)


def join_top(parts: Sequence[TopTokens]) -> TopTokens | None:
    if not parts:
        return None
    return TopTokens(
        ids=np.concatenate([part.ids for part in parts]),
        logprobs=np.concatenate([part.logprobs for part in parts]),
    )


def unknown_id(dtype: np.dtype) -> int:
    """The expert id that fills the rows of tokens with unknown routes."""
    return int(np.iinfo(dtype).max)


def unknown_routes(num_rows: int, *, like: np.ndarray) -> np.ndarray:  # [num_rows, layers, top_k]
    return np.full((num_rows, *like.shape[1:]), unknown_id(like.dtype), like.dtype)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class StreamedTokens:
    """The next tokens of one completion of a request."""

    request: str  # id; names the group, the attempt, the episode and the turn
    digest: str  # see request_digest()
    member: int  # which of the request's completions
    start: int  # tokens of the completion before these
    part: Completion
    """finish "interrupt" = more may follow; else these are the last tokens, with the whole text."""


class TokenLog:
    """The tokens of one request so far, by completion."""

    def __init__(
        self,
        request: Request,
        *,
        known: Sequence[Completion | None] | None = None,
        digest: str = "",
        save: Callable[[StreamedTokens], None] | None = None,
    ) -> None:
        """`known`: the saved part of each completion. `save` receives all other tokens, with the
        `digest` of the request."""
        self.known = [None] * request.n if known is None else known
        self._request = request
        self._digest = digest
        self._save = save
        self._saved = [0 if one is None else len(one.tokens) for one in self.known]
        self._parts: list[list[Completion | CompletionChunk]] = [
            [part for part in (one or request.partial,) if part is not None] for one in self.known
        ]
        self._ended = {
            member: one
            for member, one in enumerate(self.known)
            if one is not None and is_complete(one)
        }

    def append(self, chunk: CompletionChunk) -> None:
        parts = self._parts[chunk.member]
        parts.append(chunk)
        if self._save is not None:
            is_first = self._saved[chunk.member] == 0  # then the partial is saved with it
            self._save_part(chunk.member, self._joined(parts if is_first else [chunk]))

    def finish(self, member: int, completion: Completion) -> None:
        """Record the end of a completion and tokens that were not streamed; later calls for the
        same completion have no effect."""
        if member in self._ended:
            return
        self._ended[member] = completion
        if self._save is not None:
            end = {"finish": completion.finish, "text": completion.text, "kv": completion.kv}
            self._save_part(member, replace(cut(completion, self._saved[member]), **end))

    def completion(self, member: int) -> Completion:
        """The known part of it; finish "interrupt" = it can be resumed."""
        return self._ended.get(member) or self._joined(self._parts[member])

    def unstreamed(self, member: int, completion: Completion) -> CompletionChunk:
        """The tokens of a completion that the log does not have."""
        num_tokens = sum(len(part.tokens) for part in self._parts[member])
        return chunk_of(cut(completion, num_tokens), member=member)

    def _joined(self, parts: Sequence[Completion | CompletionChunk]) -> Completion:
        return joined(parts, truncates=self._request.sampling.truncates)

    def _save_part(self, member: int, part: Completion) -> None:
        assert self._save is not None
        request, digest, start = self._request.id, self._digest, self._saved[member]
        self._saved[member] += len(part.tokens)
        place = {"member": member, "start": start}
        self._save(StreamedTokens(request=request, digest=digest, **place, part=part))


def is_complete(completion: Completion) -> bool:
    """True if the model ended it; what was ended for another reason can be resumed."""
    return completion.finish in ("stop", "length")


def resume_request(request: Request, *, member: int, known: Completion | None) -> Request:
    """A request for the rest of one completion, or all of it if nothing is known."""
    return replace(
        request,
        id=f"{request.id}:{member}",
        n=1,
        index=request.index + member,
        partial=known if known is not None and len(known.tokens) else request.partial,
    )


def request_digest(request: Request, *, model: str | None) -> str:
    """A digest of everything that the completions depend on: a resumed environment may send
    another request under the same id. `model`: the model that answers, if it is not the policy."""
    sampled = (request.sampling, request.seed, request.index, request.adapter)
    settings = (*sampled, request.routes_from, model)
    digest = xxhash.xxh3_128(msgspec.json.encode(settings))
    digest.update(request.prompt.astype("<i4").tobytes())
    if request.partial is not None:
        digest.update(b"then")
        digest.update(request.partial.tokens.astype("<i4").tobytes())
    return digest.hexdigest()


def join_streamed(tokens: Iterable[StreamedTokens]) -> dict[tuple[str, int], StreamedTokens]:
    """All tokens of each completion, by request and member; parts after a gap are left out."""
    parts: dict[tuple[str, int], list[StreamedTokens]] = {}
    for one in tokens:
        key = (one.request, one.member)
        before = parts.get(key, [])
        if one.start == 0:
            parts[key] = [one]  # sampled again from the beginning
            continue
        end = before[-1].start + len(before[-1].part.tokens) if before else None
        if one.start == end and one.digest == before[0].digest:
            before.append(one)
    return {key: _joined(streamed) for key, streamed in parts.items()}


def _joined(streamed: list[StreamedTokens]) -> StreamedTokens:
    last = streamed[-1].part
    whole = joined([one.part for one in streamed], truncates=last.kept is not None)
    return replace(streamed[0], part=replace(whole, finish=last.finish, text=last.text, kv=last.kv))
