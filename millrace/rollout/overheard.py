"""An engine whose tokens someone else hears, too, as they are sampled."""

from collections.abc import Callable

from millrace.core.protocols import Generator, OnTokens
from millrace.core.records import Completion, Piece, Request

Listen = Callable[[Request], OnTokens | None]  # who hears what a request samples, if anybody


class Overheard:
    def __init__(self, engine: Generator, *, listen: Listen) -> None:
        self._engine = engine
        self._listen = listen

    async def generate(
        self, request: Request, on_tokens: OnTokens | None = None
    ) -> list[Completion]:
        listener = self._listen(request)
        if listener is None or on_tokens is None:
            return await self._engine.generate(request, on_tokens or listener)

        def tell_both(piece: Piece) -> None:
            on_tokens(piece)
            listener(piece)

        return await self._engine.generate(request, tell_both)
