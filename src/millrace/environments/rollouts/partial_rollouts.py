"""Attempts at groups, and their partial rollouts: tokens that are saved every few seconds.

A running group is cancelled as soon as the staleness limit certainly rules it out. While it
generates, that is certain only if one token decides (StalenessLimit.one_token_decides): engines
know the tokens of unfinished completions, an Attempt those of finished ones.

Promise: tokens are durable about `every_s` after they were sampled, and each is saved once. After a
crash, requests that are repeated resume from the saved tokens; since each draw depends on its
request alone, they become what they would have become under the same weights. At most one save of
each group is under way, and training waits for none.

Runs on the controller's event loop; encoding and the disk belong to the journal's thread.
"""

import asyncio
import contextlib
import time
from collections import Counter, deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from typing import Any

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
from millrace.core.errors import cancel_all
from millrace.core.protocols import OnCompletion, OnTokens, SupportsGenerate
from millrace.core.records import Completion, CompletionChunk, Request
from millrace.core.spans import GroupLife, TurnLife
from millrace.core.staleness import TokenVersions
from millrace.journal import Journal, NoJournal

IsTrainable = Callable[[TokenVersions], bool]  # whether these tokens may be trained
WINDOW = 1024  # finished completions from whose lengths the saving is estimated
Clock = Callable[[], float]


class Expired(Exception):
    """The tokens of a group have become too stale. Not an error: the group is tried again."""


class Attempt:
    """One attempt at a group, with the versions of its tokens so far."""

    def __init__(self, number: int, *, tries: int = 0, now: Clock = time.monotonic) -> None:
        self.number = number
        self.tries = tries  # before this one
        self.token_versions = TokenVersions(counts={})  # of all completions that were returned
        self.given_up = TokenVersions(counts={})  # of these, those of discarded episodes
        self.finished: list[int] = []  # lengths of completions that the model ended
        self.cut: list[int] = []  # lengths of other completions
        self.partial: PartialRollout | None = None  # where partial rollouts are saved
        self.now = now
        self.life = GroupLife(number=number, tries=tries, started_s=now(), turns={})

    @property
    def known(self) -> TokenVersions:
        """All tokens that are certainly part of the group; resumed ones may count twice."""
        if self.partial is None:
            return self.token_versions
        return TokenVersions.joined([self.token_versions, self.partial.resumed])

    def add_turn(self, episode: int, start_s: float, versions: np.ndarray) -> None:
        """`versions` of its tokens."""
        first, last = (int(versions[0]), int(versions[-1])) if len(versions) else (-1, -1)
        turn = TurnLife(start_s, self.now(), len(versions), first, last)
        self.life.turns.setdefault(episode, []).append(turn)

    def ended(self, outcome: Any, reason: str = "") -> GroupLife:
        return replace(self.life, ended_s=self.now(), outcome=outcome, reason=reason)

    def record(
        self, completions: Sequence[Completion], *, num_known: int = 0, policy: str | None = None
    ) -> None:
        """Count the tokens; raises Expired if a completion was ended because it is too stale.
        `num_known`: leading tokens that were recorded with another completion."""
        for completion in completions:
            lengths = self.finished if is_complete(completion) else self.cut
            lengths.append(len(completion.tokens))
            tokens = TokenVersions.of(completion.versions[num_known:], policy=policy)
            self.token_versions = TokenVersions.joined([self.token_versions, tokens])
        if any(completion.finish == "expire" for completion in completions):
            raise Expired(f"group {self.number}")


class Cancellations:
    """Counts cancelled attempts, and estimates the tokens that need not be sampled any more."""

    def __init__(self) -> None:
        self.by_reason: Counter[str] = Counter()
        self.tokens_saved = 0.0  # estimated
        self._lengths: deque[int] = deque(maxlen=WINDOW)

    def learn(self, lengths: Iterable[int]) -> None:
        """Add the lengths of completions that the model ended."""
        self._lengths.extend(lengths)

    def count(self, reason: str, *, cut: Iterable[int] = ()) -> None:
        """`cut`: lengths of completions that were cut short. Each would have become as long as
        recent completions that were longer, on average."""
        self.by_reason[reason] += 1
        for length in cut:
            longer = [other - length for other in self._lengths if other > length]
            self.tokens_saved += float(np.mean(longer)) if longer else 0.0


class PartialRollout:
    """The tokens of one attempt at a group: saved before a crash, and new ones to be saved.
    Promise: saved tokens answer only the request that they were sampled for. Those that would break
    the staleness rule, or that no request asks for, are counted."""

    def __init__(
        self, saved: Iterable[StreamedTokens] = (), *, is_trainable: IsTrainable = lambda _: True
    ) -> None:
        self.num_resumed = 0  # saved tokens that were used
        self.resumed = TokenVersions(counts={})  # of these, those that are trained
        self.stale = TokenVersions(counts={})  # saved tokens that are too stale to be used
        self._is_trainable = is_trainable
        self._saved = join_streamed(saved)
        self._new: list[StreamedTokens] = []

    @property
    def unused(self) -> TokenVersions:
        """Saved tokens that no request has asked for so far."""
        return TokenVersions.joined(
            TokenVersions.of(one.part.versions) for one in self._saved.values()
        )

    def log(self, request: Request, *, model: str | None = None) -> TokenLog:
        """Return the log of a request, which starts with the tokens that were saved for it.
        `model` names the model that answers; None = the policy."""
        digest = request_digest(request, model=model)
        policy = model or request.adapter
        known = [self._take_saved(request, member, digest, policy) for member in range(request.n)]
        return TokenLog(request, known=known, digest=digest, save=lambda new: self._new.append(new))

    def take_new(self) -> list[StreamedTokens]:
        """Return the tokens since the last call."""
        new, self._new = self._new, []
        return new

    def _take_saved(
        self, request: Request, member: int, digest: str, policy: str | None
    ) -> Completion | None:
        saved = self._saved.get((request.id, member))
        if saved is None or saved.digest != digest:
            return None
        del self._saved[request.id, member]
        completion = saved.part
        policy = policy if request.expires else None
        tokens = TokenVersions.of(completion.versions, policy=policy)
        if request.expires and not self._is_trainable(tokens):
            self.stale = TokenVersions.joined([self.stale, tokens])
            return None
        self.num_resumed += len(completion.tokens)
        if request.expires:
            self.resumed = TokenVersions.joined([self.resumed, tokens])
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


@dataclass(frozen=True, slots=True, eq=False)
class ReplayingEngine:
    """Implements SupportsGenerate: completions that had ended are returned as they were saved, and
    others resume after their last saved token."""

    engine: SupportsGenerate
    _: KW_ONLY
    partial: PartialRollout
    model: str | None = None  # name of the engine's model; None = the policy

    async def generate(
        self,
        request: Request,
        on_tokens: OnTokens | None = None,
        on_completion: OnCompletion | None = None,
    ) -> list[Completion]:
        log = self.partial.log(request, model=self.model)

        def finish(member: int, completion: Completion) -> None:
            if is_complete(completion):
                log.finish(member, completion)

        async def sample(wanted: Request, *, first: int = 0) -> list[Completion]:
            """Sample the whole request, or the completion `first` of it."""

            def receive(chunk: CompletionChunk) -> None:
                chunk = replace(chunk, member=first + chunk.member)
                log.append(chunk)
                if on_tokens is not None:
                    on_tokens(chunk)

            def complete(member: int, completion: Completion) -> None:
                finish(first + member, completion)
                if on_completion is not None:
                    on_completion(first + member, completion)

            wanted = replace(wanted, coalesce=wanted.coalesce or on_tokens is None)
            on_each = None if on_completion is None else complete
            completions = await self.engine.generate(wanted, receive, on_each)
            for member, completion in enumerate(completions, start=first):
                finish(member, completion)
            return completions

        async def resume(member: int) -> Completion:
            """Send the saved tokens to the caller, and sample the rest."""
            known = log.known[member]
            if known is not None and on_tokens is not None:
                # The caller has the tokens of the request's own partial.
                rest = cut(known, 0 if request.partial is None else len(request.partial.tokens))
                end = known.finish if is_complete(known) else None
                on_tokens(chunk_of(rest, member=member, finish=end))
            if known is not None and is_complete(known):
                if on_completion is not None:
                    on_completion(member, known)
                return known
            remaining = resume_request(request, member=member, known=known)
            (completion,) = await sample(remaining, first=member)
            return completion

        if all(known is None for known in log.known):
            return await sample(request)
        return await _all_unless_expired(resume(member) for member in range(request.n))


async def _all_unless_expired(each: Iterable[Awaitable[Completion]]) -> list[Completion]:
    """Return all completions; if one is too stale, cancel the others and return the ended ones."""
    tasks = [asyncio.ensure_future(one) for one in each]
    try:
        for ended in asyncio.as_completed(tasks):
            if (await ended).finish == "expire":
                return [task.result() for task in tasks if task.done()]
        return [task.result() for task in tasks]
    finally:
        await cancel_all(tasks)
