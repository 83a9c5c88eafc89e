"""An engine whose tokens someone else hears, too, as they are sampled."""

from collections.abc import Callable
from dataclasses import replace

from millrace.core.protocols import Generator, OnCompletion, OnTokens
from millrace.core.records import Completion, Piece, Request

PIECE_TOKENS = 32  # telling every single one would cost a small model as much as sampling it
Listen = Callable[[Request], OnTokens | None]  # who hears what a request samples, if anybody


class Overheard:
    def __init__(self, engine: Generator, *, listen: Listen) -> None:
        self._engine = engine
        self._listen = listen

    async def generate(
        self,
        request: Request,
        on_tokens: OnTokens | None = None,
        on_completion: OnCompletion | None = None,
    ) -> list[Completion]:
        listener = self._listen(request)
        if listener is None:
            return await self._engine.generate(request, on_tokens, on_completion)
        if on_tokens is None:
            request = replace(request, piece_tokens=PIECE_TOKENS)
            return await self._engine.generate(request, listener, on_completion)

        def tell_both(piece: Piece) -> None:
            on_tokens(piece)
            listener(piece)

        return await self._engine.generate(request, tell_both, on_completion)
