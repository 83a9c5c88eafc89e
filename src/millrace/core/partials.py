"""What groups in flight have been told by engines: enough for another process to go on from.

A request is known by its id, which names its group, the try at it, the episode and the turn; and by
a digest of all that its answer depends on, for what is asked under the same id may be another thing
the second time.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace

import msgspec
import xxhash

from millrace.core.completions import joined
from millrace.core.records import Completion, Request


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class StreamedTokens:
    """The next tokens of one completion of a request."""

    request: str  # id
    digest: str
    member: int  # which of the request's completions
    start: int  # its tokens before these
    part: Completion
    """finish "interrupt" = it goes on; else these are its last tokens, with its whole text."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class KnownTokens:
    """A completion as far as it was told; finish "interrupt" = it goes on."""

    digest: str
    completion: Completion


def digest_of(request: Request, *, model: str | None) -> str:
    """`model`: whom it is for, if that is not the policy."""
    sampled = (request.sampling, request.seed, request.index, request.adapter)
    settings = (*sampled, request.routes_from, model)
    digest = xxhash.xxh3_128(msgspec.json.encode(settings))
    digest.update(request.prompt.astype("<i4").tobytes())
    if request.partial is not None:
        digest.update(b"then")
        digest.update(request.partial.tokens.astype("<i4").tobytes())
    return digest.hexdigest()


def put_together(told: Iterable[StreamedTokens]) -> dict[tuple[str, int], KnownTokens]:
    """By request and member. What follows nothing that is known is left out."""
    parts: dict[tuple[str, int], list[StreamedTokens]] = {}
    for one in told:
        key = (one.request, one.member)
        before = parts.get(key, [])
        if one.start == 0:
            parts[key] = [one]  # begun anew
        elif before and one.digest == before[0].digest and one.start == _end(before[-1]):
            before.append(one)
    return {key: _known(all_of_it) for key, all_of_it in parts.items()}


def _known(told: list[StreamedTokens]) -> KnownTokens:
    last = told[-1].part
    whole = joined([one.part for one in told], truncates=last.kept is not None)
    whole = replace(whole, finish=last.finish, text=last.text, kv=last.kv)
    return KnownTokens(digest=told[0].digest, completion=whole)


def _end(told: StreamedTokens) -> int:
    return told.start + len(told.part.tokens)
