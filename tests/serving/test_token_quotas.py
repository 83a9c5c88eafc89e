"""Quotas of tokens: what requests reserve, and what they are charged in the end."""

import asyncio
from typing import Any

import openai
import pytest
from writing_engine import WritingEngine, served, until

from millrace.core.protocols import OnTokens
from millrace.core.records import Completion, Request
from millrace.serving.api.errors import ApiError
from millrace.serving.clients import Client, TokenQuotas

PROMPT = "abc"  # three tokens
NUM_PROMPT = len(PROMPT)


def quotas(per_minute: int) -> TokenQuotas:
    """They are never full again."""
    return TokenQuotas(per_minute, now_s=lambda: 0.0)


async def complete(client: openai.AsyncOpenAI, **more: Any) -> Any:
    return await client.completions.create(model="tiny", prompt=PROMPT, **more)


class HoldingEngine(WritingEngine):
    """Writes a number of tokens, then waits for the gate."""

    def __init__(self, text: str, *, num_free: int) -> None:
        super().__init__(text)
        self.num_free, self.is_holding = num_free, False

    async def generate(
        self, request: Request, on_tokens: OnTokens | None = None
    ) -> list[Completion]:
        num_written = 0
        assert on_tokens is not None

        def receive(chunk: Any) -> None:
            nonlocal num_written
            on_tokens(chunk)
            num_written += len(chunk.tokens)
            if num_written == self.num_free:
                self.is_holding = True
                self.gate.clear()

        return await super().generate(request, receive)


@pytest.mark.parametrize(("num_free", "is_refused"), [(20, True), (10, False)])
@pytest.mark.parametrize("streams", [True, False])
async def test_a_reply_that_its_client_breaks_off_is_charged_what_was_sampled(
    num_free: int, is_refused: bool, streams: bool
):
    engine = HoldingEngine("x" * 200, num_free=num_free)
    async with served(engine, quotas=quotas(NUM_PROMPT + 15)) as client:
        asking = asyncio.create_task(complete(client, max_tokens=150, stream=streams))
        await until(lambda: engine.is_holding)
        if streams:
            await (await asking).close()
        else:
            asking.cancel()
        await until(lambda: engine.cancelled)
        engine.num_free = -1
        engine.gate.set()
        if is_refused:
            with pytest.raises(openai.RateLimitError, match="quota of 18 tokens"):
                await complete(client, max_tokens=1)
        else:
            await complete(client, max_tokens=1)


ROUTES = {
    "completions": lambda client: complete(client, n=2, max_tokens=100),
    "stream": lambda client: read(complete(client, n=2, max_tokens=100, stream=True)),
    "chat": lambda client: client.chat.completions.create(
        model="tiny", messages=[{"role": "user", "content": "?"}], n=2, max_tokens=100
    ),
    "responses": lambda client: client.responses.create(
        model="tiny", input="?", max_output_tokens=200
    ),
}


async def read(stream: Any) -> None:
    async for _ in await stream:
        pass


@pytest.mark.parametrize("route", ROUTES)
async def test_a_request_reserves_what_it_may_sample_and_gives_back_the_rest(route: str):
    engine = WritingEngine("y")
    engine.gate.clear()
    # 200 tokens are reserved, and two are sampled for each choice. No prompt has 100 tokens.
    async with served(engine, key="one", other_key="two", quotas=quotas(150)) as client:
        ask = ROUTES[route]
        first = asyncio.create_task(ask(client))
        await until(lambda: engine.requests)
        with pytest.raises(openai.RateLimitError, match="quota of 150 tokens"):
            await ask(client)
        other = asyncio.create_task(ask(client.with_options(api_key="two")))
        engine.gate.set()
        await asyncio.gather(first, other)
        await ask(client)


async def test_a_failed_request_gives_back_what_it_reserved():
    class FailingEngine(WritingEngine):
        async def generate(self, request: Request, on_tokens: Any = None) -> list[Completion]:
            raise ApiError("No engine.", status=503)

    async with served(FailingEngine("y"), quotas=quotas(NUM_PROMPT + 1)) as client:
        with pytest.raises(openai.InternalServerError):
            await complete(client, max_tokens=100)
        with pytest.raises(openai.InternalServerError):
            await complete(client, max_tokens=100)


def test_a_quota_fills_again_but_not_beyond_its_tokens_of_a_minute():
    now = [0.0]
    quota = TokenQuotas(60, now_s=lambda: now[0]).of(Client(name="one"))

    def wait_s() -> int:
        with pytest.raises(ApiError) as refused:
            quota.take(1)
        assert refused.value.retry_after_s is not None
        return refused.value.retry_after_s

    quota.take(20, num_reserved=100)
    assert wait_s() == 1  # what is reserved may come back at any time
    quota.settle(100, num_used=70)
    assert wait_s() == 31
    now[0] += 30.5
    quota.take(100)
    now[0] += 3600.0
    quota.take(0, num_reserved=40)
    quota.settle(40, num_used=0)
    quota.take(60)
    assert wait_s() == 1
