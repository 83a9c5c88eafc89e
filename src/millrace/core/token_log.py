"""Token logs: the streamed tokens of requests, from which unfinished completions resume.

One log serves every resumption. The engine pool resumes the requests of a lost engine on another
one. The journal saves the tokens of unfinished groups, as StreamedTokens, across a crash of the
controller. A resumed group replays the saved tokens to its callers and samples only the rest.

Promise: tokens, logprobs, versions and kept ids are joined as they were sampled. Expert routes come
with the end of a completion only: the engine that resumes it records its own. Torch-free.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import msgspec
import xxhash

from millrace.core.completions import chunk_of, cut, joined
from millrace.core.records import Completion, CompletionChunk, Request


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
        """`known`: each completion as far as it was saved before. `save` receives all tokens that
        are not among them, with the `digest` of the request."""
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
        """Record the end of a completion, with tokens that were not streamed. Only the first call
        for a completion has an effect."""
        if member in self._ended:
            return
        self._ended[member] = completion
        if self._save is not None:
            end = {"finish": completion.finish, "text": completion.text, "kv": completion.kv}
            self._save_part(member, replace(cut(completion, self._saved[member]), **end))

    def completion(self, member: int) -> Completion:
        """As far as it is known; finish "interrupt" = it can be resumed."""
        return self._ended.get(member) or self._joined(self._parts[member])

    def unstreamed(self, member: int, completion: Completion) -> CompletionChunk:
        """The tokens of a completion that the log does not have."""
        num_tokens = sum(len(part.tokens) for part in self._parts[member])
        return chunk_of(cut(completion, num_tokens), member=member)

    def _joined(self, parts: Sequence[Completion | CompletionChunk]) -> Completion:
        return joined(parts, truncates=self._request.sampling.truncates)

    def _save_part(self, member: int, part: Completion) -> None:
        assert self._save is not None
        start = self._saved[member]
        self._saved[member] += len(part.tokens)
        self._save(
            StreamedTokens(
                request=self._request.id,
                digest=self._digest,
                member=member,
                start=start,
                part=part,
            )
        )


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
    """A digest of everything that the answer depends on: a resumed environment may ask something
    else under the same id. `model`: the model that answers, if it is not the policy."""
    sampled = (request.sampling, request.seed, request.index, request.adapter)
    settings = (*sampled, request.routes_from, model)
    digest = xxhash.xxh3_128(msgspec.json.encode(settings))
    digest.update(request.prompt.astype("<i4").tobytes())
    if request.partial is not None:
        digest.update(b"then")
        digest.update(request.partial.tokens.astype("<i4").tobytes())
    return digest.hexdigest()


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class SavedCompletion:
    digest: str
    completion: Completion  # finish "interrupt" = it can be resumed


def join_streamed(tokens: Iterable[StreamedTokens]) -> dict[tuple[str, int], SavedCompletion]:
    """Completions by request and member. Parts that do not follow a known one are left out."""
    parts: dict[tuple[str, int], list[StreamedTokens]] = {}
    for one in tokens:
        key = (one.request, one.member)
        before = parts.get(key, [])
        if one.start == 0:
            parts[key] = [one]  # sampled again from the beginning
        elif before and one.digest == before[0].digest and one.start == _end(before[-1]):
            before.append(one)
    return {key: _joined(streamed) for key, streamed in parts.items()}


def _joined(streamed: list[StreamedTokens]) -> SavedCompletion:
    last = streamed[-1].part
    whole = joined([one.part for one in streamed], truncates=last.kept is not None)
    whole = replace(whole, finish=last.finish, text=last.text, kv=last.kv)
    return SavedCompletion(digest=streamed[0].digest, completion=whole)


def _end(streamed: StreamedTokens) -> int:
    return streamed.start + len(streamed.part.tokens)
