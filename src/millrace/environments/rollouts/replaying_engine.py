"""An engine whose requests resume from the tokens that were saved before a crash.

Promise: it is a SupportsGenerate like the engine itself. Completions that had ended are returned as
they were. Others resume after their last saved token; since each draw depends on its request alone,
they become what they would have become under the same weights.
"""

import asyncio
from collections.abc import Awaitable, Iterable
from dataclasses import dataclass, replace

from millrace.core.completions import TokenLog, chunk_of, cut, is_complete, resume_request
from millrace.core.protocols import OnCompletion, OnTokens, SupportsGenerate
from millrace.core.records import Completion, CompletionChunk, Request
from millrace.environments.rollouts.attempt import PartialRollout


class ReplayingEngine:
    def __init__(
        self, engine: SupportsGenerate, *, partial: PartialRollout, model: str | None = None
    ) -> None:
        """`model`: the engine's model, if it is not the policy."""
        self._engine = engine
        self._partial = partial
        self._model = model

    async def generate(
        self,
        request: Request,
        on_tokens: OnTokens | None = None,
        on_completion: OnCompletion | None = None,
    ) -> list[Completion]:
        log = self._partial.log(request, model=self._model)
        call = _ReplayedCall(
            engine=self._engine,
            request=request,
            log=log,
            on_tokens=on_tokens,
            on_completion=on_completion,
        )
        if all(known is None for known in log.known):
            return await call.generate(request)
        return await _all_unless_expired(call.resume(member) for member in range(request.n))


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _ReplayedCall:
    """A call of generate(), with the callbacks of its caller."""

    engine: SupportsGenerate
    request: Request
    log: TokenLog
    on_tokens: OnTokens | None
    on_completion: OnCompletion | None

    async def generate(self, request: Request, *, first: int = 0) -> list[Completion]:
        """Sample the whole request, or the completion `first` of it."""

        def receive(chunk: CompletionChunk) -> None:
            chunk = replace(chunk, member=first + chunk.member)
            self.log.append(chunk)
            if self.on_tokens is not None:
                self.on_tokens(chunk)

        def complete(member: int, completion: Completion) -> None:
            self._finish(first + member, completion)
            assert self.on_completion is not None
            self.on_completion(first + member, completion)

        if self.on_tokens is None:
            request = replace(request, coalesce=True)
        completions = await self.engine.generate(
            request, receive, None if self.on_completion is None else complete
        )
        for member, completion in enumerate(completions, start=first):
            self._finish(member, completion)
        return completions

    async def resume(self, member: int) -> Completion:
        """Send the saved tokens to the caller, and sample the rest."""
        known = self.log.known[member]
        if known is not None:
            self._send_known(known, member=member)
            if is_complete(known):
                if self.on_completion is not None:
                    self.on_completion(member, known)
                return known
        rest = resume_request(self.request, member=member, known=known)
        (completion,) = await self.generate(rest, first=member)
        return completion

    def _finish(self, member: int, completion: Completion) -> None:
        if is_complete(completion):
            self.log.finish(member, completion)

    def _send_known(self, known: Completion, *, member: int) -> None:
        """The caller has the tokens of the request's own partial."""
        if self.on_tokens is None:
            return
        partial = self.request.partial
        rest = cut(known, 0 if partial is None else len(partial.tokens))
        finish = known.finish if is_complete(known) else None
        self.on_tokens(chunk_of(rest, member=member, finish=finish))


async def _all_unless_expired(each: Iterable[Awaitable[Completion]]) -> list[Completion]:
    """All completions. If one is too stale, the others are useless: they are cancelled, and only
    those that have ended are returned."""
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
