"""The server against its own description: schemathesis sends valid and invalid requests to every
endpoint and checks the answers. Real sockets and a tiny model."""

import asyncio
import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path

import pytest
import requests
import schemathesis
import torch
from chat_model import chat_tokenizer, make_chat_model
from hypothesis import HealthCheck, given, settings
from in_process_engine import InProcessEngine
from schemathesis import GenerationMode

from millrace.config import EngineConfig
from millrace.environments.tools.calls import FORMATS
from millrace.inference.backend import EmbeddedBackend, EngineSpec
from millrace.inference.embedded.build import build_engine
from millrace.serving.api.openapi import Health, describe
from millrace.serving.metrics import ServerMetrics
from millrace.serving.options import ServerLimits
from millrace.serving.served_model import ServedModel
from millrace.serving.server import http_listener, make_app

KEY = "a-key"
HEALTH = Health(status="ok", engines=1, serving=1)
CONTEXT = 48  # tokens; small, so that answers are quick


async def serve(model: Path, *, ready: "Future[tuple[str, asyncio.Event]]") -> None:
    config = EngineConfig(max_sequences=128)
    spec = EngineSpec(config=config, device="cpu", model_path=str(model), version=0)
    engine = build_engine(spec, options=EmbeddedBackend(block_tokens=8))
    remote = InProcessEngine(engine, receiver=None)  # type: ignore[arg-type]
    served = ServedModel(
        remote,
        tokenizer=chat_tokenizer(),
        name="tiny",
        max_context=CONTEXT,
        tool_format=FORMATS["hermes"],
        metrics=ServerMetrics(),
    )
    app = make_app(served, keys=[KEY], limits=ServerLimits(), health=lambda: HEALTH)
    over = asyncio.Event()
    running = asyncio.create_task(remote.run())
    async with http_listener(app, host="127.0.0.1", port=0) as url:
        ready.set_result((url, over))
        ended = asyncio.create_task(over.wait())
        await asyncio.wait({ended, running}, return_when=asyncio.FIRST_COMPLETED)
    served.close()
    if running.done():  # the server failed, and its waiters notice
        running.result()
    running.cancel()


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    torch.set_num_threads(1)
    model = make_chat_model(tmp_path_factory.mktemp("model"), max_context=CONTEXT)
    ready: Future[tuple[str, asyncio.Event]] = Future()
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_until_complete, args=(serve(model, ready=ready),))
    thread.start()
    url, over = ready.result(60)
    yield url
    loop.call_soon_threadsafe(over.set)
    thread.join(20)
    assert not thread.is_alive()
    loop.close()


HEADERS = {"Authorization": f"Bearer {KEY}"}
API = schemathesis.openapi.from_dict(describe(needs_key=True))
OPERATIONS = [found.ok() for found in API.get_all_operations()]
# Valid fields may not fit together; such requests are refused.
EXCLUDED = [schemathesis.checks.positive_data_acceptance]


def as_it_comes(case: schemathesis.Case) -> schemathesis.Case:
    return case


def to_this_model(case: schemathesis.Case) -> schemathesis.Case:
    """Makes more of the generated requests answerable."""
    body = case.body
    if isinstance(body, dict):
        body["model"] = "tiny"
        if case.operation.path == "/v1/responses":
            body["input"] = "Count."
            for name in ("tools", "store", "previous_response_id", "conversation", "prompt"):
                body.pop(name, None)
        else:
            body["n"] = 2
        if "messages" in body:
            body["messages"] = [{"role": "user", "content": repr(body["messages"])[:20]}]
            body.pop("tools", None)
            body.pop("chat_template_kwargs", None)
        if "stream_options" in body:
            body["stream"] = True
        if case.operation.path == "/v1/completions":
            body["prompt"] = ["Count.", "Go on."]
    return case


def try_out(operation: schemathesis.APIOperation, address: str, *, max_examples: int) -> None:
    positive, negative = GenerationMode.POSITIVE, GenerationMode.NEGATIVE
    attempts = [(positive, as_it_comes)]
    if operation.method.upper() == "POST":
        attempts += [(positive, to_this_model), (negative, as_it_comes)]
    statuses: Counter[int] = Counter()
    for mode, adjust in attempts:

        @settings(max_examples=max_examples, deadline=None, suppress_health_check=list(HealthCheck))
        @given(operation.as_strategy(generation_mode=mode).map(adjust))
        def every_answer_is_as_described(case: schemathesis.Case) -> None:
            response = case.call_and_validate(
                base_url=address, headers=HEADERS, excluded_checks=EXCLUDED, timeout=100
            )
            statuses[response.status_code] += 1

        every_answer_is_as_described()
    if "{" not in operation.path:
        assert statuses[200] > 0, statuses


@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda operation: operation.label)
def test_every_answer_matches_the_description(operation, address: str):
    try_out(operation, address, max_examples=6)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda operation: operation.label)
def test_every_answer_matches_the_description_with_many_examples(operation, address: str):
    try_out(operation, address, max_examples=80)


def test_description_requires_the_key(address: str):
    url = f"{address}/openapi.json"
    assert requests.get(url, headers=HEADERS, timeout=20).json() == describe(needs_key=True)
    assert requests.get(url, timeout=20).status_code == 401
