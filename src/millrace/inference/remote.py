"""An engine in a worker process: the engine that the pool calls, and the replica that restarts it.

Promise: cancelling generate() aborts its request in the engine. A process that fails a call with an
unknown error, or does not answer in time, is killed and every call raises EngineLost. A restarted
engine gets no request before it holds the newest weights.

Runs on the controller's event loop; torch-free.
"""

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field

from millrace.cluster import messages
from millrace.cluster.messages import Message
from millrace.cluster.supervision.replica import WorkerReplica
from millrace.cluster.worker import Worker
from millrace.core.errors import EngineLost, MillraceError, WorkerError
from millrace.core.protocols import Capability, Engine, OnCompletion, OnTokens
from millrace.core.records import Completion, Request, ScoreRequest, TokenLogprobs, WeightUpdate
from millrace.inference.backend import EmbeddedBackend
from millrace.inference.pool import EnginePool

# For a weight update, sequences that finish first included. Pauses do not count: an engine may be
# paused for a whole step of the trainer, and some updates wait for its end.
SWAP_TIMEOUT_S = 600.0


@dataclass(eq=False)
class RemoteEngine:
    """An Engine whose calls go to a worker process."""

    worker: Worker
    _: KW_ONLY
    swap_timeout_s: float | None = None
    capabilities: frozenset[Capability] = EmbeddedBackend.capabilities
    _aborting: set[asyncio.Task[None]] = field(default_factory=set, init=False)
    _paused_at_s: float | None = field(default=None, init=False)  # None = it is not paused
    _paused_s: float = field(default=0.0, init=False)  # in all pauses that are over

    async def generate(
        self,
        request: Request,
        on_tokens: OnTokens | None = None,
        on_completion: OnCompletion | None = None,
    ) -> list[Completion]:
        received: dict[int, Completion] = {}  # by member

        def receive(part: Message) -> None:
            if isinstance(part, messages.TokensSampled):
                assert on_tokens is not None
                for chunk in part.pieces:
                    on_tokens(chunk)
                return
            assert isinstance(part, messages.Completed | messages.GenerateDone), type(part)
            received.update(part.completions)
            if on_completion is not None:
                for member, completion in part.completions.items():
                    on_completion(member, completion)

        message = messages.Generate(request=request, stream=on_tokens is not None)
        try:
            receive(await self.worker.call(message, expect_progress=True, on_part=receive))
            return [received[member] for member in range(request.n)]
        except WorkerError as error:
            raise self._lost(error) from error
        except MillraceError:  # the engine refused the request
            raise
        except BaseException:  # cancelled, or a callback raised
            self._abort_later(request.id)
            raise

    async def score(self, requests: Sequence[ScoreRequest]) -> list[TokenLogprobs]:
        reply = await self._call(messages.ScoreTokens(requests=list(requests)))
        assert isinstance(reply, messages.TokensScored)
        return reply.logprobs

    async def swap(self, update: WeightUpdate) -> int:
        # No progress expected: an engine reports none while it fetches and lays out weights.
        call = self._call(messages.SwapWeights(update=update), expect_progress=False)
        swapping = asyncio.create_task(call)
        try:
            if self.swap_timeout_s is not None:
                await self._kill_late(swapping, timeout_s=self.swap_timeout_s)
            reply = await swapping
        finally:
            swapping.cancel()
        assert isinstance(reply, messages.Swapped)
        return reply.version

    async def abort(self, ids: Sequence[str]) -> None:
        await self._call(messages.AbortRequests(ids=list(ids)))

    async def expire(self, before: int, adapters: Mapping[str, int] | None = None) -> None:
        await self._call(messages.Expire(before=before, adapters=dict(adapters or {})))

    async def pause(self, *, sleep: bool = False) -> None:
        if self._paused_at_s is None:
            self._paused_at_s = time.monotonic()
        await self._call(messages.Pause(sleep=sleep))

    async def resume(self) -> None:
        if self._paused_at_s is not None:
            self._paused_s += time.monotonic() - self._paused_at_s
            self._paused_at_s = None
        await self._call(messages.Resume())

    @property
    def _unpaused_s(self) -> float:
        """A clock that stands still while the engine is paused."""
        now_s = time.monotonic() if self._paused_at_s is None else self._paused_at_s
        return now_s - self._paused_s

    async def _kill_late(self, call: asyncio.Task[Message], *, timeout_s: float) -> None:
        """Returns when the call has ended, which it does if the process is killed."""
        end_s = self._unpaused_s + timeout_s
        while not call.done():
            if (left_s := end_s - self._unpaused_s) <= 0:
                await self.worker.fail_hung(f"did not answer SwapWeights within {timeout_s} s")
                return
            await asyncio.wait({call}, timeout=left_s)

    async def _call(self, message: Message, *, expect_progress: bool = True) -> Message:
        try:
            return await self.worker.call(message, expect_progress=expect_progress)
        except WorkerError as error:
            raise self._lost(error) from error

    def _lost(self, error: WorkerError) -> EngineLost:
        self.worker.kill()
        return EngineLost(str(error))

    def _abort_later(self, request_id: str) -> None:
        async def abort() -> None:
            # A dead engine has nothing left to abort; its supervisor reports the death.
            with contextlib.suppress(EngineLost):
                await self.abort([request_id])

        task = asyncio.create_task(abort())
        self._aborting.add(task)
        task.add_done_callback(self._aborting.discard)


@dataclass(eq=False, kw_only=True)
class EngineReplica(WorkerReplica):
    """A supervised engine process that is a member of a pool while it serves."""

    pool: EnginePool
    launcher: Callable[[bool], Awaitable[Worker]]  # is late -> a process with any weights
    # Sends the newest weights to a late engine, which joins a run under way or restarts; None if
    # the weights never change.
    load_newest: Callable[[Engine], Awaitable[None]] | None
    joins_late: bool = False
    is_lent: bool = False  # it computes on a device of the trainer
    capabilities: frozenset[Capability] = EmbeddedBackend.capabilities
    on_lost: Callable[[], object] = lambda: None
    _engine: RemoteEngine | None = None

    async def launch(self, *, is_restart: bool) -> Worker:
        return await self.launcher(is_restart or self.joins_late)

    async def attach(self, worker: Worker, *, is_restart: bool) -> None:
        engine = RemoteEngine(worker, swap_timeout_s=SWAP_TIMEOUT_S, capabilities=self.capabilities)
        prepare = self.load_newest if is_restart or self.joins_late else None
        try:
            await self.pool.join(
                engine, prepare=prepare, is_lent=self.is_lent, load_newest=self.load_newest
            )
        except EngineLost as error:
            # Raise the WorkerError: it says whether a signal killed the process.
            raise error.__cause__ or error from None
        self._engine = engine

    def detach(self) -> None:
        if self._engine is not None:
            self.pool.lose(self._engine)
            self._engine = None
        self.on_lost()

    async def stop(self) -> None:
        """Let the engine finish its sequences, then stop its process."""
        if self._engine is not None:
            await self.pool.leave(self._engine)
        await super().stop()
