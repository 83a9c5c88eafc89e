"""An engine without a process of its own, as the controller would see it."""

import asyncio
from collections.abc import Sequence

from millrace.config import Interrupt
from millrace.core.protocols import OnCompletion, OnTokens, WeightReceiver
from millrace.core.records import Completion, Request
from millrace.core.score_requests import ScoreRequest, TokenLogprobs
from millrace.core.weight_update import WeightUpdate
from millrace.inference.embedded.engine import EmbeddedEngine
from millrace.inference.embedded.interrupt import MODELS
from millrace.inference.embedded.scheduling.outputs import Finished


class InProcessEngine:
    """core.protocols.Engine over an EmbeddedEngine; one step per turn of the event loop."""

    def __init__(
        self,
        engine: EmbeddedEngine,
        *,
        receiver: WeightReceiver,
        interrupt: Interrupt = "swap",
    ) -> None:
        self._engine = engine
        self._interrupt = MODELS[interrupt](engine)
        self._receiver = receiver
        self._waiting: dict[str, asyncio.Future[list[Completion]]] = {}
        self._listeners: dict[str, OnTokens] = {}
        self._completed: dict[str, OnCompletion] = {}
        self._arrived = asyncio.Event()
        self._may_run = asyncio.Event()
        self._may_run.set()

    async def generate(
        self,
        request: Request,
        on_tokens: OnTokens | None = None,
        on_completion: OnCompletion | None = None,
    ) -> list[Completion]:
        singly = on_completion is not None
        self._engine.submit(request, stream=on_tokens is not None, singly=singly)
        if on_completion is not None:
            self._completed[request.id] = on_completion
        if on_tokens is not None:
            self._listeners[request.id] = on_tokens
        self._waiting[request.id] = asyncio.get_running_loop().create_future()
        self._arrived.set()
        return await self._waiting[request.id]

    async def score(self, requests: Sequence[ScoreRequest]) -> list[TokenLogprobs]:
        return self._engine.score(requests)

    async def swap(self, update: WeightUpdate) -> int:
        self._hand_out(self._interrupt.announce())
        tensors = self._receiver.stage(update)
        while not self._interrupt.may_land:  # noqa: ASYNC110 - turns of the loop, not a poll
            await asyncio.sleep(0)
        self._hand_out(self._interrupt.land())
        self._engine.swap(tensors, version=update.version)
        self._interrupt.settle()
        self._arrived.set()
        return update.version

    async def abort(self, ids: Sequence[str]) -> None:
        self._hand_out(self._engine.abort(ids))

    async def expire(self, before: int) -> None:
        self._hand_out(self._engine.expire(before))

    async def pause(self) -> None:
        self._may_run.clear()

    async def resume(self) -> None:
        self._may_run.set()

    async def run(self) -> None:
        while True:
            while self._engine.has_work:
                await self._may_run.wait()
                self._hand_out(self._engine.step())
                await asyncio.sleep(0)
            self._arrived.clear()
            await self._arrived.wait()

    def _hand_out(self, finished: list[Finished]) -> None:
        for id, pieces in {**self._engine.news(), **self._engine.news_at_leisure()}.items():
            for piece in pieces:
                self._listeners[id](piece)
        for id, completions in self._engine.singles().items():
            for member, completion in completions.items():
                self._completed[id](member, completion)
        for request in finished:
            if (tell := self._completed.pop(request.id, None)) is not None:
                for member, completion in enumerate(request.completions):
                    if member not in request.told:
                        tell(member, completion)
            self._listeners.pop(request.id, None)
            waiting = self._waiting.pop(request.id)
            if not waiting.cancelled():
                waiting.set_result(request.completions)
