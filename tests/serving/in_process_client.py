"""The official OpenAI client, connected to an engine of this process."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import openai
from in_process_engine import InProcessEngine
from talking_model import TOKENIZER

from millrace.environments.tools.calls import FORMATS
from millrace.inference.embedded.engine import EmbeddedEngine
from millrace.serving.api.openapi import Health
from millrace.serving.metrics import ServerMetrics
from millrace.serving.options import ServerLimits
from millrace.serving.served_model import ServedModel
from millrace.serving.server import http_listener, make_app


@asynccontextmanager
async def client_of(
    engine: EmbeddedEngine, *, form: str = "hermes"
) -> AsyncIterator[openai.AsyncOpenAI]:
    remote = InProcessEngine(engine, receiver=None)  # type: ignore[arg-type]
    running = asyncio.create_task(remote.run())
    model = ServedModel(
        remote,
        tokenizer=TOKENIZER,
        name="tiny",
        max_context=2048,
        tool_format=FORMATS[form],
        metrics=ServerMetrics(),
    )
    health = Health(status="ok", engines=1, serving=1)
    app = make_app(model, limits=ServerLimits(), health=lambda: health)
    async with (
        http_listener(app, host="127.0.0.1", port=0) as url,
        openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client,
    ):
        yield client
    model.close()
    running.cancel()
