"""An engine that generates given texts token by token, and an HTTP client for it."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import numpy as np
from aiohttp import web
from chat_model import IM_END, chat_tokenizer
from fakes import ScriptedEngine, make_chunk
from openai import AsyncOpenAI

from millrace.core.protocols import OnTokens, SupportsGenerate
from millrace.core.records import Completion, Request
from millrace.environments.tools.calls import FORMATS
from millrace.serving.api.openapi import Health
from millrace.serving.clients import TokenQuotas
from millrace.serving.metrics import ServerMetrics
from millrace.serving.options import ServerLimits
from millrace.serving.served_model import ServedModel
from millrace.serving.server import http_listener, make_app

WELL = Health(status="ok", engines=1, serving=1)


class WritingEngine(ScriptedEngine):
    """Completions take turns, token by token, while the gate is open."""

    def __init__(self, *texts: str) -> None:
        super().__init__(*texts)
        self.gate = asyncio.Event()
        self.gate.set()
        self.cancelled: list[str] = []

    async def generate(
        self, request: Request, on_tokens: OnTokens | None = None
    ) -> list[Completion]:
        self.requests.append(request)
        done = [written(self.texts[i % len(self.texts)]) for i in range(request.n)]
        try:
            for place in range(max(len(completion.tokens) for completion in done)):
                await self.gate.wait()
                await asyncio.sleep(0)
                for member, completion in enumerate(done if on_tokens else []):
                    if place < len(completion.tokens):
                        on_tokens(cut_out(completion, place, member))  # pyright: ignore
        except asyncio.CancelledError:
            self.cancelled.append(request.id)
            raise
        return done


async def until(condition: Callable[[], object]) -> None:
    while not condition():  # noqa: ASYNC110 - what is waited for is on the other side of a socket
        await asyncio.sleep(0.01)


def written(text: str) -> Completion:
    """Tokens of the text, followed by the end token."""
    tokens = np.array([*map(ord, text), IM_END], np.int32)
    return Completion(
        tokens=tokens,
        logprobs=-np.arange(len(tokens), dtype=np.float32) / 8,
        versions=np.full(len(tokens), 3, np.int32),
        finish="stop",
        text=text,
    )


def cut_out(completion: Completion, place: int, member: int):
    whole = make_chunk(completion, member=member)
    own = slice(place, place + 1)
    return replace(
        whole,
        tokens=whole.tokens[own],
        logprobs=whole.logprobs[own],
        versions=whole.versions[own],
        finish=whole.finish if place == len(whole.tokens) - 1 else None,
    )


@asynccontextmanager
async def served(
    engine: SupportsGenerate,
    *,
    key: str | None = None,
    other_key: str | None = None,
    hosts: Sequence[str] = (),
    limits: ServerLimits | None = None,
    form: str = "hermes",
    tokenizer: Any = None,
    max_context: int = 512,
    health: Callable[[], Health] = lambda: WELL,
    quotas: TokenQuotas | None = None,
    extend: Callable[[web.Application], None] = lambda _: None,
) -> AsyncIterator[AsyncOpenAI]:
    """A client of a server with this engine."""
    model = ServedModel(
        engine,
        tokenizer=tokenizer or chat_tokenizer(),
        name="tiny",
        adapters=("side",),
        max_context=max_context,
        tool_format=FORMATS[form],
        metrics=ServerMetrics(),
        quotas=quotas or TokenQuotas(None),
    )
    limits = limits or ServerLimits()
    keys = [each for each in (key, other_key) if each]
    app = make_app(model, keys=keys, hosts=hosts, limits=limits, health=health)
    extend(app)
    async with (
        http_listener(app, host="127.0.0.1", port=0, limits=limits) as url,
        AsyncOpenAI(base_url=f"{url}/v1", api_key=key or "none", max_retries=0) as client,
    ):
        yield client
    model.close()
