"""An engine in a worker process: the engine that the pool calls, and the replica that restarts it.

Promise: cancelling generate() aborts its request in the engine. A process that fails a call with an
unknown error, or does not answer in time, is killed and every call raises EngineLost. A restarted
engine gets no request before it holds the newest weights.

Runs on the controller's event loop; torch-free.
"""

import asyncio
import contextlib
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

SWAP_TIMEOUT_S = 600.0  # for a weight update, sequences that finish first included


@dataclass(eq=False)
class RemoteEngine:
    """An Engine whose calls go to a worker process."""

    worker: Worker
    _: KW_ONLY
    swap_timeout_s: float | None = None
    capabilities: frozenset[Capability] = EmbeddedBackend.capabilities
    _aborting: set[asyncio.Task[None]] = field(default_factory=set, init=False)

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
        message, timeout_s = messages.SwapWeights(update=update), self.swap_timeout_s
        reply = await self._call(message, timeout_s=timeout_s, expect_progress=False)
        assert isinstance(reply, messages.Swapped)
        return reply.version

    async def abort(self, ids: Sequence[str]) -> None:
        await self._call(messages.AbortRequests(ids=list(ids)))

    async def expire(self, before: int, adapters: Mapping[str, int] | None = None) -> None:
        await self._call(messages.Expire(before=before, adapters=dict(adapters or {})))

    async def pause(self, *, sleep: bool = False) -> None:
        await self._call(messages.Pause(sleep=sleep))

    async def resume(self) -> None:
        await self._call(messages.Resume())

    async def _call(
        self, message: Message, *, timeout_s: float | None = None, expect_progress: bool = True
    ) -> Message:
        try:
            return await self.worker.call(
                message, timeout_s=timeout_s, kill_on_timeout=True, expect_progress=expect_progress
            )
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
