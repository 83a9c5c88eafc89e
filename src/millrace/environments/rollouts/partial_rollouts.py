"""Partial rollouts: the tokens of unfinished groups, saved to the journal every few seconds.

Promise: tokens are durable about `every_s` after they were sampled, and each is saved once. After a
crash, requests that are repeated resume from the saved tokens; since each draw depends on its
request alone, they become what they would have become under the same weights. At most one save of
each group is under way, and training waits for none.

Runs on the controller's event loop; encoding and the disk belong to the journal's thread.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from dataclasses import dataclass, replace

import numpy as np

from millrace.core.completions import (
    StreamedTokens,
    TokenLog,
    chunk_of,
    cut,
    is_complete,
    join_streamed,
    request_digest,
    resume_request,
)
from millrace.core.protocols import OnCompletion, OnTokens, SupportsGenerate
from millrace.core.records import Completion, CompletionChunk, Request
from millrace.core.staleness import Stamps
from millrace.environments.rollouts.attempt import Attempt
from millrace.journal import Journal, NoJournal

IsTrainable = Callable[[np.ndarray], bool]  # whether tokens of these versions [N] may be trained


class PartialRollout:
    """The tokens of one attempt at a group: saved before a crash, and new ones to be saved.
    Promise: saved tokens answer only the request that they were sampled for. Those that would break
    the staleness rule, or that no request asks for, are counted."""

    def __init__(
        self,
        saved: Iterable[StreamedTokens] = (),
        *,
        is_trainable: IsTrainable = lambda _: True,
    ) -> None:
        self.num_resumed = 0  # saved tokens that were used
        self.resumed = Stamps(counts={})  # of these, those that are trained
        self.stale = Stamps(counts={})  # saved tokens that are too stale to be used
        self._is_trainable = is_trainable
        self._saved = join_streamed(saved)
        self._new: list[StreamedTokens] = []

    @property
    def unused(self) -> Stamps:
        """Saved tokens that no request has asked for so far."""
        return Stamps.joined(Stamps.of(one.part.versions) for one in self._saved.values())

    def log(self, request: Request, *, model: str | None = None) -> TokenLog:
        """Return the log of a request, which starts with the tokens that were saved for it.
        `model` names the model that answers; None = the policy."""
        digest = request_digest(request, model=model)
        known = [self._take_saved(request, member, digest) for member in range(request.n)]
        return TokenLog(request, known=known, digest=digest, save=lambda new: self._new.append(new))

    def take_new(self) -> list[StreamedTokens]:
        """Return the tokens since the last call."""
        new, self._new = self._new, []
        return new

    def _take_saved(self, request: Request, member: int, digest: str) -> Completion | None:
        saved = self._saved.get((request.id, member))
        if saved is None or saved.digest != digest:
            return None
        del self._saved[request.id, member]
        completion = saved.part
        stamps = Stamps.of(completion.versions)
        if request.expires and not self._is_trainable(completion.versions):
            self.stale = Stamps.joined([self.stale, stamps])
            return None
        self.num_resumed += len(completion.tokens)
        if request.expires:
            self.resumed = Stamps.joined([self.resumed, stamps])
        return completion


class PartialRollouts:
    """The partial rollouts of all unfinished groups."""

    def __init__(self, journal: Journal | NoJournal, *, every_s: float) -> None:
        """`every_s` = 0 disables saving and resuming."""
        self._journal = journal
        self._every_s = every_s
        self._open: list[tuple[Attempt, PartialRollout]] = []
        self._num_resumed = 0  # tokens, in attempts that are over

    @property
    def num_resumed(self) -> int:
        """Tokens so far that were not sampled again after a crash."""
        return self._num_resumed + sum(partial.num_resumed for _, partial in self._open)

    @contextlib.asynccontextmanager
    async def open(self, attempt: Attempt, *, is_trainable: IsTrainable) -> AsyncIterator[None]:
        """Enclose the sampling and scoring of a group; sets `attempt.partial`."""
        if not self._every_s:
            yield
            return
        saved = await self._journal.read_tokens(attempt.number)
        partial = attempt.partial = PartialRollout(saved, is_trainable=is_trainable)
        self._open.append((attempt, partial))
        try:
            yield
        finally:
            self._open.remove((attempt, partial))
            self._num_resumed += partial.num_resumed

    async def run(self) -> None:
        """Save new tokens every `every_s`. Ends only by cancellation."""
        while self._every_s:
            await asyncio.sleep(self._every_s)
            await self.save()

    async def save(self) -> None:
        """Return when all tokens so far are durable."""
        append = self._journal.append_tokens
        await asyncio.gather(
            *(
                append(attempt.number, tries=attempt.tries, tokens=tokens)
                for attempt, partial in self._open
                if (tokens := partial.take_new())
            )
        )


class ReplayingEngine:
    """Implements SupportsGenerate: completions that had ended are returned as they were saved, and
    others resume after their last saved token."""

    def __init__(
        self, engine: SupportsGenerate, *, partial: PartialRollout, model: str | None = None
    ) -> None:
        """`model`: name of the engine's model; None = the policy."""
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
        call = _ReplayedCall(self._engine, request, log, on_tokens, on_completion)
        if all(known is None for known in log.known):
            return await call.generate(request)
        return await _all_unless_expired(call.resume(member) for member in range(request.n))


@dataclass(frozen=True, slots=True, eq=False)
class _ReplayedCall:
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
        """Stream the saved tokens, except those of the request's own partial."""
        if self.on_tokens is None:
            return
        partial = self.request.partial
        rest = cut(known, 0 if partial is None else len(partial.tokens))
        finish = known.finish if is_complete(known) else None
        self.on_tokens(chunk_of(rest, member=member, finish=finish))


async def _all_unless_expired(each: Iterable[Awaitable[Completion]]) -> list[Completion]:
    """Return all completions; if one is too stale, cancel the others and return the ended ones."""
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
