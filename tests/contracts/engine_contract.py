"""What every Engine promises. Subclass EngineContract and provide `open_engine`.

The engine serves the model directory it is given, as version 0, with a context of 256 tokens, and
takes updates by shared memory.
"""

import asyncio
import dataclasses
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager
from pathlib import Path

import numpy as np
import pytest
import torch
from architectures import MIXTURE, tiny_model
from engine_rig import (
    EOS,
    assert_same,
    assert_sampled_from,
    letter_tokenizer,
    make_request,
    plain_logits,
    plain_routes,
    prompt_of,
    save_model,
    weights,
)
from fakes import Listener

from millrace.core.errors import TaskError, WeightError
from millrace.core.protocols import Engine
from millrace.core.records import Completion, Request
from millrace.weights.send_backend import PackingSender
from millrace.weights.sender import make_sender

MAX_CONTEXT = 256
OpenEngine = Callable[[Path], AbstractAsyncContextManager[Engine]]

SETTINGS = [
    {},
    {"temperature": 0.7},
    {"temperature": 0.0},
    {"top_k": 5},
    {"top_p": 0.8, "temperature": 1.5},
    {"top_k": 20, "top_p": 0.9, "min_p": 0.02},
]


def endless(id: str, *, seed: int = 0) -> Request:
    """As long as the context allows: greedy tokens of a random model run in circles."""
    return make_request(
        id, prompt=prompt_of(6, seed=seed), max_new_tokens=MAX_CONTEXT, temperature=0.0
    )


async def until_started(engine: Engine) -> None:
    """Let an engine get some way into what it was given: a short request runs beside it."""
    await engine.generate(make_request("beside", max_new_tokens=3))


class EngineContract:
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

    async def test_each_token_comes_with_logprob_version_and_kept_ids(self, engine: Engine):
        requests = [
            make_request(str(i), prompt=prompt_of(2 + 7 * i, seed=i), n=3, seed=i, **settings)
            for i, settings in enumerate(SETTINGS)
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

    async def test_tokens_of_a_mixture_come_with_the_experts_they_went_to(
        self, open_engine: OpenEngine, tmp_path: Path
    ):
        save_model(tmp_path / "mixture", MIXTURE)
        request = make_request(prompt=9, n=2, routes_from=3)
        async with open_engine(tmp_path / "mixture") as engine:
            completions = await engine.generate(request)
        for completion in completions:
            expected = plain_routes(np.concatenate([request.prompt, completion.tokens]))
            np.testing.assert_array_equal(completion.routes, expected[3:-1])

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

    async def test_tokens_are_told_while_they_come_and_add_up_to_the_completion(
        self, engine: Engine
    ):
        requests = [
            make_request(str(i), prompt=2 + 7 * i, n=3, seed=i, **settings)
            for i, settings in enumerate(SETTINGS)
        ]
        listeners = [Listener() for _ in requests]
        silent = make_request("silent", n=2)
        *groups, _ = await asyncio.gather(
            *(engine.generate(*each) for each in zip(requests, listeners, strict=True)),
            engine.generate(silent),
        )
        for listener, completions in zip(listeners, groups, strict=True):
            listener.assert_heard(completions)
            assert len(listener.pieces) > len(completions)

    async def test_a_completion_is_told_as_soon_as_it_has_ended_and_once(self, engine: Engine):
        told: list[tuple[int, Completion]] = []
        heard = asyncio.Event()

        def tell(member: int, completion: Completion) -> None:
            told.append((member, completion))
            heard.set()

        # With this seed the second ends after a few tokens, and the first has many.
        request = make_request("pair", n=2, seed=1, max_new_tokens=MAX_CONTEXT)
        generating = asyncio.create_task(engine.generate(request, on_completion=tell))
        await heard.wait()
        await engine.abort(["pair"])
        first, second = await generating
        assert (first.finish, second.finish) == ("abort", "stop")
        assert told == [(1, second), (0, first)]

    async def test_an_aborted_request_tells_its_end_and_a_resumed_one_only_what_is_new(
        self, engine: Engine
    ):
        request, listener = endless("r"), Listener()
        task = asyncio.create_task(engine.generate(request, listener))
        await until_started(engine)
        await engine.abort(["r"])
        (partial,) = await task
        listener.assert_heard([partial])
        rest = Listener()
        (whole,) = await engine.generate(dataclasses.replace(request, partial=partial), rest)
        rest.assert_heard([whole], after=len(partial.tokens))
        again = Listener()
        await engine.generate(dataclasses.replace(request, partial=whole), again)
        again.assert_heard([whole], after=len(whole.tokens))

    async def test_a_completion_does_not_depend_on_what_runs_beside_it(self, engine: Engine):
        request = make_request(n=2, seed=4)
        expected = await engine.generate(request)
        mates = [make_request(str(i), prompt=3 + i, seed=i, n=2) for i in range(10)]
        crowd = [engine.generate(each) for each in [*mates[:5], request, *mates[5:]]]
        done = await asyncio.gather(*crowd)
        for completion, same in zip(done[5], expected, strict=True):
            assert_same(completion, same)

    async def test_stop_strings_end_a_completion_and_are_not_in_its_text(self, engine: Engine):
        (free,) = await engine.generate(make_request(temperature=3.0, seed=1))
        stop = free.text[3:5]
        assert free.text.find(stop) == 3
        (stopped,) = await engine.generate(make_request(temperature=3.0, seed=1, stop=(stop,)))
        assert (stopped.finish, stopped.text) == ("stop", free.text[:3])
        np.testing.assert_array_equal(stopped.tokens, free.tokens[:5])

    async def test_a_swap_is_visible_once_it_returns(self, engine: Engine, sender: PackingSender):
        assert await engine.swap(sender.publish(1, weights(seed=1))) == 1
        request = make_request()
        (completion,) = await engine.generate(request)
        assert set(completion.versions) == {1}
        logits = plain_logits(tiny_model("qwen3", seed=1), request.prompt, completion)
        assert_sampled_from(logits, completion, request.sampling)

    async def test_requests_under_way_go_on_across_swaps(
        self, engine: Engine, sender: PackingSender
    ):
        updates = [sender.publish(version, weights(seed=version)) for version in (1, 2)]
        running = [asyncio.create_task(engine.generate(endless(str(i), seed=i))) for i in range(4)]
        await until_started(engine)
        for update in updates:
            assert await engine.swap(update) == update.version
        completions = [completion for task in running for completion in await task]
        for completion in completions:
            assert (np.diff(completion.versions) >= 0).all()
            assert completion.finish in ("stop", "length")
        assert any(len(set(completion.versions)) > 1 for completion in completions)

    async def test_a_damaged_update_is_refused_and_the_engine_goes_on_with_what_it_has(
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

    async def test_an_aborted_request_returns_what_it_has_and_can_be_resumed(self, engine: Engine):
        request = endless("r", seed=2)
        (whole,) = await engine.generate(request)
        assert len(whole.tokens) > 100
        task = asyncio.create_task(engine.generate(request))
        await until_started(engine)
        await engine.abort(["r", "no such request"])
        (partial,) = await task
        assert partial.finish == "abort"
        assert 0 < len(partial.tokens) < len(whole.tokens)
        np.testing.assert_array_equal(partial.tokens, whole.tokens[: len(partial.tokens)])
        (resumed,) = await engine.generate(dataclasses.replace(request, partial=partial))
        assert_same(resumed, whole)
        assert resumed.finish == whole.finish

    async def test_a_request_that_expires_returns_once_its_tokens_are_too_old(
        self, engine: Engine, sender: PackingSender
    ):
        old = dataclasses.replace(endless("old"), expires=True)
        expiring = asyncio.create_task(engine.generate(old))
        lasting = asyncio.create_task(engine.generate(endless("lasting", seed=2)))
        await until_started(engine)
        await engine.swap(sender.publish(1, weights(seed=1)))
        await engine.expire(0)
        assert not expiring.done()
        await engine.expire(1)
        (completion,) = await expiring
        assert completion.finish == "expire"
        assert completion.versions[0] == 0
        (completion,) = await lasting
        assert completion.finish in ("stop", "length")

    async def test_a_paused_engine_takes_requests_swaps_and_aborts_but_generates_after_resume(
        self, engine: Engine, sender: PackingSender
    ):
        running = asyncio.create_task(engine.generate(endless("running")))
        aborted = asyncio.create_task(engine.generate(endless("aborted", seed=2)))
        await until_started(engine)
        await engine.pause()
        asked = asyncio.create_task(engine.generate(make_request("asked")))
        await engine.abort(["aborted"])
        (partial,) = await aborted
        assert partial.finish == "abort"
        assert await engine.swap(sender.publish(1, weights(seed=1))) == 1
        assert not running.done()
        await engine.resume()
        (completion,) = await asked
        assert set(completion.versions) == {1}  # no token was made before the swap
        assert set((await running)[0].versions) == {0, 1}

    async def test_a_completion_that_was_paused_is_the_one_that_was_not(self, engine: Engine):
        (whole,) = await engine.generate(endless("whole"))
        task = asyncio.create_task(engine.generate(endless("paused")))
        await until_started(engine)
        for _ in range(5):
            await engine.pause()
            await engine.resume()
        (paused,) = await task
        assert_same(paused, whole)

    async def test_resuming_an_engine_that_was_not_paused_is_no_error(self, engine: Engine):
        await engine.resume()
        assert len(await engine.generate(make_request())) == 1

    async def test_aborting_nothing_is_no_error(self, engine: Engine):
        await engine.abort([])
        await engine.abort(["no such request"])
        (completion,) = await engine.generate(make_request("after"))
        assert completion.finish != "abort"

    async def test_a_prompt_that_fills_the_context_is_refused_and_costs_nobody_else(
        self, engine: Engine
    ):
        other = asyncio.create_task(engine.generate(make_request("other")))
        with pytest.raises(TaskError, match=f"has {MAX_CONTEXT} tokens"):
            await engine.generate(make_request(prompt=MAX_CONTEXT))
        (completion,) = await engine.generate(make_request(prompt=MAX_CONTEXT - 1))
        assert len(completion.tokens) == 1
        assert len(await other) == 1
