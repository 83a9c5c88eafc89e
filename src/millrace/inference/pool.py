"""Routes requests to engines: the least loaded engine first.

Turns of one session go to the engine that served the session last, because it holds their KV. The
exception is an engine that is clearly more loaded: it runs more than twice the sequences of the
least loaded engine, plus 8. A pinned request ignores load.

Promise: generate() returns whole completions, or those that the caller aborted. A completion that a
weight update interrupted is resumed on the least loaded engine. Where lost engines are replaced,
sequences resume on another engine from their last streamed token; on a backend that cannot resume
partial completions they are sampled again. An engine that stays asleep hands its sequences over in
the same way. Requests wait while no engine serves: requests that were placed before wait without
limit, new ones for at most max_wait_s. While some engines are paused, requests go to the others.

Runs on the controller's event loop; torch-free.
"""

import asyncio
import contextlib
from collections import OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, InitVar, dataclass, field, replace
from typing import Literal, TypeVar

from millrace.core.completions import TokenLog, chunk_of, cut, resume_request
from millrace.core.errors import EngineLost, EnginesDown
from millrace.core.protocols import Capability, Engine, OnCompletion, OnTokens
from millrace.core.records import (
    Completion,
    CompletionChunk,
    Request,
    ScoreRequest,
    TokenLogprobs,
    WeightUpdate,
)

T = TypeVar("T")
Ended = TypeVar("Ended", Completion, CompletionChunk)

_SPARE_SEQUENCES = 8  # so that a few sequences do not move a session to an idle engine


@dataclass(kw_only=True, slots=True, eq=False)
class _PoolEntry:
    engine: Engine
    num_sequences: int = 0  # in flight
    serves: bool = True  # False until it holds the newest weights, and while it drains
    is_lent: bool = False  # it computes on a device of the trainer, in turn with it
    is_paused: bool = False
    is_held: bool = False  # it sleeps until resume() and gets no new weights before
    num_scores: int = 0  # calls of score() in flight, which cannot be handed over
    load_newest: Callable[[Engine], Awaitable[object]] | None = None


@dataclass(kw_only=True, slots=True)
class _OpenRequest:
    """A request without an answer yet, and its caller's callbacks. They receive each token once and
    each end once, even if completions change their engine."""

    on_tokens: OnTokens | None
    on_completion: OnCompletion | None
    placed: dict[str, _PoolEntry] = field(default_factory=dict[str, _PoolEntry])  # by request id
    was_placed: bool = False  # on some engine, at least once
    is_aborted: bool = False
    ended: set[int] = field(default_factory=set[int])  # members whose end was sent

    def send(self, chunk: CompletionChunk) -> None:
        if self.on_tokens is None or chunk.member in self.ended:
            return
        finish = None if chunk.finish == "interrupt" else chunk.finish  # it will be resumed
        if finish is not None:
            self.ended.add(chunk.member)
        if len(chunk.tokens) or finish is not None:
            self.on_tokens(replace(chunk, finish=finish))

    def send_completion(self, completion: Completion, *, member: int) -> None:
        if self.on_completion is not None:
            self.on_completion(member, completion)


@dataclass(eq=False)
class EnginePool:
    """Several engines as one."""

    engines: InitVar[Sequence[Engine]] = ()
    _: KW_ONLY
    replaces: bool = False  # lost engines are replaced through join(); otherwise a loss is raised
    # A request that was never placed waits this long for an engine, then raises EnginesDown.
    max_wait_s: float | None = None
    max_sessions: int = 65536  # whose engine is remembered; the others are routed by load

    def __post_init__(self, engines: Sequence[Engine]) -> None:
        assert engines or self.replaces
        # Sequences of lost engines: those that another one resumed, the tokens that these had by
        # then, and those without a known token, which were sampled again.
        self.num_resumed = self.num_resumed_tokens = self.num_restarted = 0
        self._entries = [_PoolEntry(engine=engine) for engine in engines]
        self._joined = asyncio.Event()  # set when an engine starts to serve
        self._answered = asyncio.Event()  # set when a request is answered
        self._homes: OrderedDict[str, _PoolEntry] = OrderedDict()  # by session; last = latest
        self._open: dict[str, _OpenRequest] = {}  # by the caller's request id
        self._paused: Literal["all", "lent"] | None = None
        self._is_asleep = False
        self._expired: tuple[int, Mapping[str, int] | None] = 0, None  # as in expire()

    @property
    def num_engines(self) -> int:
        """Engines that serve."""
        return sum(entry.serves for entry in self._entries)

    @property
    def can_spare_lent(self) -> bool:
        """Whether some engines are lent, and others serve."""
        return {entry.is_lent for entry in self._entries if entry.serves} == {True, False}

    @property
    def capabilities(self) -> frozenset[Capability]:
        """What every engine of the pool offers."""
        offered = [entry.engine.capabilities for entry in self._entries]
        return frozenset(Capability).intersection(*offered)

    async def join(
        self,
        engine: Engine,
        *,
        prepare: Callable[[Engine], Awaitable[object]] | None,
        is_lent: bool = False,
        load_newest: Callable[[Engine], Awaitable[object]] | None = None,
    ) -> None:
        """Add an engine. It gets requests once `prepare`, if any, has sent the newest weights.
        `is_lent`, and `load_newest` for an engine that may be held: see pause()."""
        entry = _PoolEntry(engine=engine, serves=False, is_lent=is_lent, load_newest=load_newest)
        self._entries.append(entry)
        try:
            if self._paused == "all" or (self._paused and is_lent):
                entry.is_paused = True
                await engine.pause(sleep=self._is_asleep)
            await engine.expire(*self._expired)
            if prepare is not None:
                await prepare(engine)
        except BaseException:
            self.lose(engine)
            raise
        entry.serves = entry in self._entries
        self._joined.set()

    async def leave(self, engine: Engine) -> None:
        """Send this engine no more requests; returns once its last one is answered."""
        for entry in [entry for entry in self._entries if entry.engine is engine]:
            entry.serves = False
            while entry.num_sequences and entry in self._entries:
                self._answered.clear()
                await self._answered.wait()
        self.lose(engine)

    def lose(self, engine: Engine) -> None:
        """Remove an engine that is dead or treated as dead; no error if it was removed before."""
        self._entries = [entry for entry in self._entries if entry.engine is not engine]

    async def generate(
        self,
        request: Request,
        on_tokens: OnTokens | None = None,
        on_completion: OnCompletion | None = None,
    ) -> list[Completion]:
        assert request.id not in self._open, f"{request.id!r} is already under way"
        opened = _OpenRequest(on_tokens=on_tokens, on_completion=on_completion)
        self._open[request.id] = opened
        try:
            completions = await self._place(request, opened)
            # Its engine was lost before it sent a token.
            while not opened.is_aborted and all(
                c.finish == "interrupt" and not len(c.tokens) for c in completions
            ):
                completions = await self._place(request, opened)
            if all(completion.finish != "interrupt" for completion in completions):
                return completions
            whole = (
                self._complete(request, opened, member=member, completion=completion)
                for member, completion in enumerate(completions)
            )
            return list(await asyncio.gather(*whole))
        finally:
            del self._open[request.id]

    async def _complete(
        self, request: Request, opened: _OpenRequest, *, member: int, completion: Completion
    ) -> Completion:
        """Resume one completion of a request as often as it is interrupted."""
        while completion.finish == "interrupt":
            if opened.is_aborted:  # its engine interrupted it before the abort arrived
                completion = replace(completion, finish="abort")
                opened.send_completion(completion, member=member)
                no_tokens = cut(completion, len(completion.tokens))  # they were sent before
                opened.send(chunk_of(no_tokens, member=member, finish="abort"))
                return completion
            rest = resume_request(request, member=member, known=completion)
            (completion,) = await self._place(rest, opened, first=member)
        if completion.finish == "expire":  # the group is dropped, so the others are useless
            await self.abort([request.id])
        return completion

    async def _place(
        self, request: Request, opened: _OpenRequest, *, first: int = 0
    ) -> list[Completion]:
        await self._until_served(max_wait_s=None if opened.was_placed else self.max_wait_s)
        opened.was_placed = True
        entry = self._choose(request.session, pinned=request.pinned)
        log, wants_tokens = TokenLog(request), opened.on_tokens is not None
        # A lost sequence that cannot be resumed is sampled again, so its tokens are not sent before
        # its end.
        resumes = Capability.PARTIALS in entry.engine.capabilities
        streams = resumes and (wants_tokens or self.replaces)
        if streams and not wants_tokens:
            request = replace(request, coalesce=True)

        def resumable(ended: Ended) -> Ended:
            is_handed_over = ended.finish == "abort" and entry.is_held and not opened.is_aborted
            return replace(ended, finish="interrupt") if is_handed_over else ended

        def receive(chunk: CompletionChunk) -> None:
            chunk = resumable(chunk)
            log.append(chunk)
            opened.send(replace(chunk, member=first + chunk.member))

        def complete(member: int, completion: Completion) -> None:
            if resumable(completion).finish != "interrupt":  # it will be resumed
                log.finish(member, completion)
                opened.send_completion(completion, member=first + member)

        entry.num_sequences += request.n
        opened.placed[request.id] = entry
        try:
            answered = await entry.engine.generate(
                request,
                receive if streams else None,
                None if opened.on_completion is None else complete,
            )
            completions = [resumable(completion) for completion in answered]
            if wants_tokens and request.coalesce:
                for member, completion in enumerate(completions):
                    if completion.finish == "interrupt":  # the next engine streams what follows
                        receive(log.unstreamed(member, completion))
        except EngineLost:
            if not self.replaces:
                raise
            self.lose(entry.engine)
            completions = [log.completion(member) for member in range(request.n)]
            for num_tokens in (len(c.tokens) for c in completions if c.finish == "interrupt"):
                self.num_resumed += num_tokens > 0
                self.num_resumed_tokens += num_tokens
                self.num_restarted += num_tokens == 0
        finally:
            entry.num_sequences -= request.n
            del opened.placed[request.id]
            self._answered.set()
        if not resumes and not request.coalesce:
            for member, completion in enumerate(completions, start=first):
                if completion.finish != "interrupt":
                    opened.send(chunk_of(completion, member=member, finish=completion.finish))
        return completions

    async def _until_served(self, *, max_wait_s: float | None) -> None:
        """Wait for an engine. Never yields if one serves, which together() relies on."""
        try:
            async with asyncio.timeout(max_wait_s):
                while not self.num_engines:
                    self._joined.clear()
                    await self._joined.wait()
        except TimeoutError:
            raise EnginesDown(f"No engine was up for {max_wait_s:g} s; try again later.") from None

    def _choose(self, session: str | None, *, pinned: bool) -> _PoolEntry:
        serving = [entry for entry in self._entries if entry.serves]
        awake = [entry for entry in serving if not (entry.is_paused or entry.is_held)] or serving
        least_loaded = min(awake, key=lambda entry: entry.num_sequences)
        if session is None:
            return least_loaded
        home = self._homes.pop(session, least_loaded)
        is_overloaded = home.num_sequences > 2 * least_loaded.num_sequences + _SPARE_SEQUENCES
        may_stay = home in serving and not home.is_held if pinned else home in awake
        stays = may_stay and (pinned or not is_overloaded)
        chosen = home if stays else least_loaded
        self._homes[session] = chosen
        if len(self._homes) > self.max_sessions:
            self._homes.popitem(last=False)
        return chosen

    async def score(self, requests: Sequence[ScoreRequest]) -> list[TokenLogprobs]:
        while True:
            await self._until_served(max_wait_s=self.max_wait_s)
            entry = self._choose(None, pinned=False)
            entry.num_scores += 1
            try:
                for logprobs in await self._ask(entry, entry.engine.score(requests)):
                    return logprobs
            finally:
                entry.num_scores -= 1

    async def swap(self, update: WeightUpdate) -> int:
        """Swap all engines concurrently; returns the oldest version now visible."""
        swapped = [entry for entry in self._entries if not entry.is_held]
        versions = await self._each(lambda engine: engine.swap(update), entries=swapped)
        return min(versions, default=update.version)  # engines that join later start with it

    async def abort(self, ids: Sequence[str]) -> None:
        found = [self._open[id] for id in ids if id in self._open]
        for opened in found:
            opened.is_aborted = True
        await self._abort_placed(found, self._entries)

    async def _abort_placed(
        self, requests: Iterable[_OpenRequest], entries: Sequence[_PoolEntry]
    ) -> None:
        by_entry: dict[_PoolEntry, list[str]] = {}
        for opened in requests:
            for placed_id, entry in opened.placed.items():
                if entry in entries:
                    by_entry.setdefault(entry, []).append(placed_id)
        await asyncio.gather(
            *(self._ask(entry, entry.engine.abort(ids)) for entry, ids in by_entry.items())
        )

    async def expire(self, before: int, adapters: Mapping[str, int] | None = None) -> None:
        self._expired = before, adapters
        await self._each(lambda engine: engine.expire(*self._expired))

    async def pause(
        self, *, sleep: bool = False, which: Literal["all", "lent"] = "all", keeps: bool = False
    ) -> None:
        """Returns when the last engine has finished its pass. `which`: "lent" engines compute on
        devices of the trainer; the others continue. With `keeps`, the lent ones are held: the
        others take over their sequences, and versions are visible without them."""
        self._paused, self._is_asleep = which, sleep
        chosen = (entry for entry in self._entries if which == "all" or entry.is_lent)
        paused = [entry for entry in chosen if not entry.is_held]
        for entry in paused:
            entry.is_paused = True
            resumes = Capability.PARTIALS in entry.engine.capabilities
            entry.is_held = keeps and resumes and not entry.num_scores
        held = [entry for entry in paused if entry.is_held]
        await self._abort_placed(self._open.values(), held)
        await self._each(lambda engine: engine.pause(sleep=sleep), entries=paused)

    async def resume(self, *, held: bool = True) -> None:
        """`held`: also engines that are held, which load the newest weights before they serve."""
        self._paused, self._is_asleep = None, False
        paused = [entry for entry in self._entries if entry.is_paused and not entry.is_held]
        woken = [entry for entry in self._entries if entry.is_held] if held else []
        for entry in (*paused, *woken):
            entry.is_paused = False
        await self._each(lambda engine: engine.resume(), entries=[*paused, *woken])
        for entry in woken:
            if entry.load_newest is not None:
                await self._ask(entry, entry.load_newest(entry.engine))
            entry.is_held = False

    @contextlib.asynccontextmanager
    async def together(self) -> AsyncIterator[None]:
        """Have the engines start together, in order, all requests of tasks that are created or
        woken inside and that send their request without waiting for anything else."""
        await self.pause()
        yield
        # One turn of the loop for those tasks, and one for the tasks they create. Messages keep
        # their order, so resume() arrives after their requests.
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        await self.resume(held=False)

    async def _each(
        self, ask: Callable[[Engine], Awaitable[T]], *, entries: Sequence[_PoolEntry] | None = None
    ) -> list[T]:
        """The answers of these engines, by default of all, that are not lost before they answer."""
        chosen = self._entries if entries is None else entries
        asked = (self._ask(entry, ask(entry.engine)) for entry in chosen)
        return [answer for answers in await asyncio.gather(*asked) for answer in answers]

    async def _ask(self, entry: _PoolEntry, answer: Awaitable[T]) -> list[T]:
        """A list with the engine's answer; empty if the engine is lost."""
        try:
            return [await answer]
        except EngineLost:
            if not self.replaces:
                raise
            self.lose(entry.engine)
            return []
