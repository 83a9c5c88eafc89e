"""An engine that is not asked again for what it told before a crash of the controller.

Promise: it is a SupportsGenerate like the engine itself. Completions that had ended are told as
they were; those that had begun go on from there, and since each draw depends on its request alone,
they come to what they would have come to under the same weights.
"""

import asyncio
from collections.abc import Awaitable, Iterable
from dataclasses import dataclass, replace

from millrace.core.completions import chunk_of, cut
from millrace.core.protocols import OnCompletion, OnTokens, SupportsGenerate
from millrace.core.records import Completion, CompletionChunk, Request
from millrace.environments.rollouts.attempt import PartialCall, PartialRollout, has_ended


class ReplayingEngine:
    def __init__(
        self, engine: SupportsGenerate, *, course: PartialRollout, model: str | None = None
    ) -> None:
        """`model`: whose engine it is, if not the policy's."""
        self._engine = engine
        self._course = course
        self._model = model

    async def generate(
        self,
        request: Request,
        on_tokens: OnTokens | None = None,
        on_completion: OnCompletion | None = None,
    ) -> list[Completion]:
        asked = self._course.ask(request, model=self._model)
        call = _ReplayedCall(
            engine=self._engine,
            request=request,
            asked=asked,
            on_tokens=on_tokens,
            on_completion=on_completion,
        )
        if all(known is None for known in asked.known):
            return await call.generate(request)
        return await _all_unless_expired(call.go_on(member) for member in range(request.n))


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _ReplayedCall:
    """A call of generate(), and who listens to it."""

    engine: SupportsGenerate
    request: Request
    asked: PartialCall
    on_tokens: OnTokens | None
    on_completion: OnCompletion | None

    async def generate(self, request: Request, *, first: int = 0) -> list[Completion]:
        """Of the request, or of one of its completions, whose number is `first`."""

        def hear(piece: CompletionChunk) -> None:
            self.asked.hear(replace(piece, member=first + piece.member))
            self._tell(replace(piece, member=first + piece.member))

        def hear_end(member: int, completion: Completion) -> None:
            self.asked.hear_end(first + member, completion)
            self._tell_end(first + member, completion)

        if self.on_tokens is None:
            request = replace(request, coalesce=True)
        completions = await self.engine.generate(
            request, hear, None if self.on_completion is None else hear_end
        )
        for member, completion in enumerate(completions):
            self.asked.hear_end(first + member, completion)
        return completions

    async def go_on(self, member: int) -> Completion:
        """From what is known of a completion to its end."""
        request, known = self.request, self.asked.known[member]
        if known is not None:
            self._tell_known(known, member=member)
            if has_ended(known):
                self._tell_end(member, known)
                return known
        rest = replace(
            request,
            id=f"{request.id}:{member}",
            n=1,
            index=request.index + member,
            partial=request.partial if known is None else known,
        )
        (completion,) = await self.generate(rest, first=member)
        return completion

    def _tell_known(self, known: Completion, *, member: int) -> None:
        """But for what the request itself began with."""
        num_begun = 0 if self.request.partial is None else len(self.request.partial.tokens)
        finish = known.finish if has_ended(known) else None
        self._tell(chunk_of(cut(known, num_begun), member=member, finish=finish))

    def _tell(self, piece: CompletionChunk) -> None:
        if self.on_tokens is not None:
            self.on_tokens(piece)

    def _tell_end(self, member: int, completion: Completion) -> None:
        if self.on_completion is not None:
            self.on_completion(member, completion)


async def _all_unless_expired(each: Iterable[Awaitable[Completion]]) -> list[Completion]:
    """Once one has become too old, the others are of no use, either: only what has ended by then is
    returned."""
    tasks = [asyncio.ensure_future(one) for one in each]
    try:
        for ended in asyncio.as_completed(tasks):
            if (await ended).finish == "expire":
                return [task.result() for task in tasks if task.done()]
        return [task.result() for task in tasks]
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
