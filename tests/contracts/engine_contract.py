"""What every Engine promises: a core part, and a part for each capability.

Subclass EngineContract and the parts (engine_contract_parts.py) of all capabilities that the engine
states, and provide `open_engine`. The engine serves the model directory it is given, as version 0,
with a context of 128 tokens (MAX_CONTEXT), and receives updates through shared memory.
"""

import asyncio
import dataclasses
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager
from pathlib import Path

import numpy as np
import pytest
import torch
from architectures import tiny_model
from engine_rig import (
    EOS,
    assert_same,
    assert_sampled_from,
    letter_tokenizer,
    make_request,
    plain_logits,
    prompt_of,
    save_model,
    weights,
)
from fakes import Listener

from millrace.core.errors import TaskError, WeightError
from millrace.core.protocols import Engine
from millrace.core.records import Completion, Request
from millrace.weights.backends import PackingSender
from millrace.weights.transport import make_sender

MAX_CONTEXT = 128
OpenEngine = Callable[..., AbstractAsyncContextManager[Engine]]
"""Called with a model directory, and with `lora`, `adapters` or `reproducible` where a part needs
them."""

WHOLE_DISTRIBUTION = [{}, {"temperature": 0.7}, {"temperature": 0.0}]
TRUNCATED = [
    {"top_k": 5},
    {"top_p": 0.8, "temperature": 1.5},
    {"top_k": 20, "top_p": 0.9, "min_p": 0.02},
]


def endless(id: str, *, seed: int = 0) -> Request:
    """As long as the context allows: greedy tokens of a random model repeat themselves."""
    return make_request(
        id, prompt=prompt_of(6, seed=seed), max_new_tokens=MAX_CONTEXT, temperature=0.0
    )


async def until_started(engine: Engine) -> None:
    """Let an engine sample some tokens of earlier requests: short requests run beside them. The
    first may be sent before them."""
    for id in ("before", "beside"):
        await engine.generate(make_request(id, max_new_tokens=3))


class EngineContract:
    """The core: every engine passes it."""

    @pytest.fixture
    def open_engine(self) -> OpenEngine:
        raise NotImplementedError

    @pytest.fixture
    def model_path(self, tmp_path: Path) -> Path:
        save_model(tmp_path)
        return tmp_path

    @pytest.fixture
    async def engine(self, open_engine: OpenEngine, model_path: Path) -> AsyncIterator[Engine]:
        async with open_engine(model_path) as engine:
            yield engine

    @pytest.fixture
    def sender(self) -> Iterator[PackingSender]:
        sender = make_sender("shm", dtype=torch.float32)
        yield sender
        sender.close()

    def test_engine_passes_the_contract_part_of_each_capability(self, engine: Engine):
        parts = {vars(part).get("capability") for part in type(self).__mro__}
        assert engine.capabilities == parts - {None}

    async def test_each_token_comes_with_logprob_and_version(self, engine: Engine):
        await self.check_sampling(engine, WHOLE_DISTRIBUTION)

    async def check_sampling(self, engine: Engine, settings: list[dict[str, float]]) -> None:
        requests = [
            make_request(str(i), prompt=prompt_of(2 + 7 * i, seed=i), n=3, seed=i, **each)
            for i, each in enumerate(settings)
        ]
        groups = await asyncio.gather(*(engine.generate(request) for request in requests))
        model = tiny_model("qwen3")
        for request, completions in zip(requests, groups, strict=True):
            assert len(completions) == 3
            for completion in completions:
                self.check_form(completion, request)
                assert set(completion.versions) == {0}
                logits = plain_logits(model, request.prompt, completion)
                assert_sampled_from(logits, completion, request.sampling)

    async def test_streamed_chunks_add_up_to_the_completion(self, engine: Engine):
        await self.check_streaming(engine, WHOLE_DISTRIBUTION)

    async def check_streaming(self, engine: Engine, settings: list[dict[str, float]]) -> None:
        requests = [
            make_request(str(i), prompt=2 + 7 * i, n=3, seed=i, **each)
            for i, each in enumerate(settings)
        ]
        listeners = [Listener() for _ in requests]
        silent = make_request("silent", n=2)
        *groups, _ = await asyncio.gather(
            *(engine.generate(*each) for each in zip(requests, listeners, strict=True)),
            engine.generate(silent),
        )
        for listener, completions in zip(listeners, groups, strict=True):
            listener.assert_received(completions)
            assert len(listener.chunks) > len(completions)

    async def test_each_completion_is_delivered_once(self, engine: Engine):
        delivered: dict[int, Completion] = {}

        def deliver(member: int, completion: Completion) -> None:
            assert member not in delivered
            delivered[member] = completion

        completions = await engine.generate(make_request(n=4), on_completion=deliver)
        assert [delivered[member] for member in range(4)] == completions

    async def test_aborted_request_returns_and_streams_its_tokens(self, engine: Engine):
        listener = Listener()
        task = asyncio.create_task(engine.generate(endless("r"), listener))
        await until_started(engine)
        await engine.abort(["r", "no such request"])
        (partial,) = await task
        assert partial.finish == "abort"
        assert 0 < len(partial.tokens) < MAX_CONTEXT - 6
        listener.assert_received([partial])

    async def test_stop_string_ends_completion_and_is_not_in_its_text(self, engine: Engine):
        (free,) = await engine.generate(make_request(temperature=0.0))
        stop = free.text[3:5]
        end = free.text.find(stop)
        (stopped,) = await engine.generate(make_request(temperature=0.0, stop=(stop,)))
        assert (stopped.finish, stopped.text) == ("stop", free.text[:end])
        np.testing.assert_array_equal(stopped.tokens, free.tokens[: end + 2])

    async def test_request_expires_once_its_tokens_are_too_old(self, engine: Engine):
        old = dataclasses.replace(endless("old"), expires=True)
        expiring = asyncio.create_task(engine.generate(old))
        lasting = asyncio.create_task(engine.generate(endless("lasting", seed=2)))
        await until_started(engine)
        await engine.expire(0)
        assert not expiring.done()
        await engine.expire(1)
        (completion,) = await expiring
        assert completion.finish == "expire"
        (completion,) = await lasting
        assert completion.finish in ("stop", "length")

    async def test_paused_engine_accepts_requests_and_aborts(self, engine: Engine):
        running = asyncio.create_task(engine.generate(endless("running")))
        aborted = asyncio.create_task(engine.generate(endless("aborted", seed=2)))
        await until_started(engine)
        await engine.pause()
        queued = asyncio.create_task(engine.generate(make_request("queued")))
        await engine.abort(["aborted"])
        (partial,) = await aborted
        assert partial.finish == "abort"
        assert not running.done()
        assert not queued.done()
        await engine.resume()
        assert len(await queued) == len(await running) == 1

    def check_form(self, completion: Completion, request: Request) -> None:
        count = len(completion.tokens)
        assert 1 <= count <= request.sampling.max_new_tokens
        assert completion.tokens.dtype == np.int32
        assert completion.logprobs.dtype == np.float32
        assert completion.versions.dtype == np.int32
        assert completion.logprobs.shape == completion.versions.shape == (count,)
        if completion.kept is not None:
            assert completion.kept.ids.dtype == np.int32
            assert completion.kept.offsets.dtype == np.int64
        stopped = completion.tokens[-1] == EOS
        assert completion.finish == ("stop" if stopped else "length")
        spoken = completion.tokens[:-1] if stopped else completion.tokens
        assert completion.text == letter_tokenizer().decode(spoken.tolist())

    async def test_swap_is_visible_once_it_returns(self, engine: Engine, sender: PackingSender):
        assert await engine.swap(sender.publish(1, weights(seed=1))) == 1
        request = make_request()
        (completion,) = await engine.generate(request)
        assert set(completion.versions) == {1}
        logits = plain_logits(tiny_model("qwen3", seed=1), request.prompt, completion)
        assert_sampled_from(logits, completion, request.sampling)

    async def test_damaged_update_is_refused_and_old_version_stays(
        self, engine: Engine, sender: PackingSender
    ):
        update = sender.publish(1, weights(seed=1))
        with pytest.raises(WeightError):
            await engine.swap(dataclasses.replace(update, checksum=update.checksum ^ 1))
        with pytest.raises(WeightError):
            await engine.swap(dataclasses.replace(update, tensors=update.tensors[1:]))
        (completion,) = await engine.generate(make_request())
        assert set(completion.versions) == {0}
        assert await engine.swap(update) == 1

    async def test_pausing_does_not_change_a_completion(self, engine: Engine):
        (whole,) = await engine.generate(endless("whole"))
        task = asyncio.create_task(engine.generate(endless("paused")))
        await until_started(engine)
        for _ in range(5):
            await engine.pause()
            await engine.resume()
        (paused,) = await task
        assert_same(paused, whole)

    async def test_resuming_an_engine_that_is_not_paused_is_no_error(self, engine: Engine):
        await engine.resume()
        assert len(await engine.generate(make_request())) == 1

    async def test_aborting_unknown_requests_is_no_error(self, engine: Engine):
        await engine.abort([])
        await engine.abort(["no such request"])
        (completion,) = await engine.generate(make_request("after"))
        assert completion.finish != "abort"

    async def test_prompt_that_fills_context_is_refused_alone(self, engine: Engine):
        other = asyncio.create_task(engine.generate(make_request("other")))
        with pytest.raises(TaskError, match=f"has {MAX_CONTEXT} tokens"):
            await engine.generate(make_request(prompt=MAX_CONTEXT))
        (completion,) = await engine.generate(make_request(prompt=MAX_CONTEXT - 1))
        assert len(completion.tokens) == 1
        assert len(await other) == 1
