"""What an Engine promises for each capability that it states. See engine_contract.py."""

import asyncio
import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch
from architectures import MIXTURE, tiny_model
from engine_contract import (
    MAX_CONTEXT,
    TRUNCATED,
    EngineContract,
    OpenEngine,
    endless,
    until_started,
)
from engine_rig import (
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
from peft import PeftModel
from tokenizers import decoders

from millrace.config import LoraConfig
from millrace.core.errors import TaskError
from millrace.core.protocols import Capability, Engine
from millrace.core.records import Completion, ScoreRequest
from millrace.models.lora.folders import read_checkpoint
from millrace.models.lora.trained import TrainedAdapter
from millrace.weights.backends import PackingSender


def save_adapter(folder: Path, lora: LoraConfig, *, seed: int) -> Path:
    """A PEFT folder with random weights."""
    adapter = TrainedAdapter(tiny_model("qwen3"), lora, model_path="tiny")
    torch.manual_seed(seed)
    for weight in adapter.named_weights().values():
        weight.normal_(std=0.3)
    folder.mkdir()
    adapter.write(adapter.named_weights(), folder)
    return folder


class KeptIdsPart(EngineContract):
    capability = Capability.KEPT_IDS

    async def test_truncated_sampling_comes_with_kept_ids(self, engine: Engine):
        await self.check_sampling(engine, TRUNCATED)

    async def test_streamed_chunks_carry_kept_ids(self, engine: Engine):
        await self.check_streaming(engine, TRUNCATED)


class RoutesPart(EngineContract):
    capability = Capability.ROUTES

    async def test_tokens_of_a_mixture_come_with_their_expert_routes(
        self, open_engine: OpenEngine, tmp_path: Path
    ):
        save_model(tmp_path / "mixture", MIXTURE)
        request = make_request(prompt=9, n=2, routes_from=3)
        async with open_engine(tmp_path / "mixture") as engine:
            completions = await engine.generate(request)
        for completion in completions:
            expected = plain_routes(np.concatenate([request.prompt, completion.tokens]))
            np.testing.assert_array_equal(completion.routes, expected[3:-1])


class SeedsPart(EngineContract):
    capability = Capability.SEEDS

    async def test_each_completion_is_delivered_once_as_soon_as_it_has_ended(self, engine: Engine):
        completed: list[tuple[int, Completion]] = []
        is_completed = asyncio.Event()

        def on_completion(member: int, completion: Completion) -> None:
            completed.append((member, completion))
            is_completed.set()

        # With this seed the second ends after a few tokens, and the first has many.
        request = make_request("pair", n=2, seed=1, max_new_tokens=MAX_CONTEXT)
        generating = asyncio.create_task(engine.generate(request, on_completion=on_completion))
        await is_completed.wait()
        await engine.abort(["pair"])
        first, second = await generating
        assert (first.finish, second.finish) == ("abort", "stop")
        assert completed == [(1, second), (0, first)]

    async def test_completion_does_not_depend_on_batch(self, engine: Engine):
        request = make_request(n=2, seed=4)
        expected = await engine.generate(request)
        mates = [make_request(str(i), prompt=3 + i, seed=i, n=2) for i in range(10)]
        crowd = [engine.generate(each) for each in [*mates[:5], request, *mates[5:]]]
        done = await asyncio.gather(*crowd)
        for completion, same in zip(done[5], expected, strict=True):
            assert_same(completion, same)

    async def test_stop_string_shortens_the_same_completion(self, engine: Engine):
        (free,) = await engine.generate(make_request(temperature=3.0, seed=1))
        stop = free.text[3:5]
        assert free.text.find(stop) == 3
        (stopped,) = await engine.generate(make_request(temperature=3.0, seed=1, stop=(stop,)))
        assert (stopped.finish, stopped.text) == ("stop", free.text[:3])
        np.testing.assert_array_equal(stopped.tokens, free.tokens[:5])


class ReproduciblePart(EngineContract):
    capability = Capability.REPRODUCIBLE

    async def test_bits_of_a_version_do_not_depend_on_what_was_served_before(
        self, open_engine: OpenEngine, model_path: Path, sender: PackingSender
    ):
        update, found = sender.publish(1, weights(seed=0)), list[list[list[Completion]]]()
        batch = [make_request(str(i), prompt=prompt_of(6, seed=i), temperature=0.0) for i in (0, 1)]
        for earlier in ([], batch):  # which an engine could take drafts of the same text from
            async with open_engine(model_path, reproducible=True) as engine:
                for request in earlier:
                    await engine.generate(request)
                await engine.swap(update)
                found.append(await asyncio.gather(*map(engine.generate, batch)))
        for alone, after in zip(*found, strict=True):
            for ours, theirs in zip(alone, after, strict=True):
                np.testing.assert_array_equal(ours.tokens, theirs.tokens)
                np.testing.assert_array_equal(ours.logprobs, theirs.logprobs)


class PartialsPart(EngineContract):
    capability = Capability.PARTIALS

    async def test_resumed_request_streams_only_new_tokens(self, engine: Engine):
        request, listener = endless("r"), Listener()
        task = asyncio.create_task(engine.generate(request, listener))
        await until_started(engine)
        await engine.abort(["r"])
        (partial,) = await task
        listener.assert_received([partial])
        rest = Listener()
        (whole,) = await engine.generate(dataclasses.replace(request, partial=partial), rest)
        rest.assert_received([whole], after=len(partial.tokens))
        again = Listener()
        await engine.generate(dataclasses.replace(request, partial=whole), again)
        again.assert_received([whole], after=len(whole.tokens))

    async def test_aborted_request_can_be_resumed(self, engine: Engine):
        request = endless("r", seed=2)
        (whole,) = await engine.generate(request)
        assert len(whole.tokens) > 100
        task = asyncio.create_task(engine.generate(request))
        await until_started(engine)
        await engine.abort(["r", "no such request"])
        (partial,) = await task
        assert partial.finish == "abort"
        assert len(partial.tokens) > 0 < len(whole.tokens)
        np.testing.assert_array_equal(partial.tokens, whole.tokens[: len(partial.tokens)])
        (resumed,) = await engine.generate(dataclasses.replace(request, partial=partial))
        assert_same(resumed, whole)
        assert resumed.finish == whole.finish

    async def test_truncated_request_can_be_resumed(self, engine: Engine):
        """Also where completions have no kept ids."""
        request = make_request("r", max_new_tokens=MAX_CONTEXT, top_k=2)
        task = asyncio.create_task(engine.generate(request))
        await until_started(engine)
        await engine.abort(["r"])
        (partial,) = await task
        assert len(partial.tokens) > 0
        (resumed,) = await engine.generate(dataclasses.replace(request, partial=partial))
        np.testing.assert_array_equal(resumed.tokens[: len(partial.tokens)], partial.tokens)
        assert resumed.finish in ("stop", "length")


class TokenVersionsPart(EngineContract):
    capability = Capability.TOKEN_VERSIONS

    async def test_running_requests_continue_across_swaps(
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

    async def test_expiring_request_ends_once_tokens_are_too_old(
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

    async def test_paused_engine_accepts_swaps_and_continues_after_resume(
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


class SleepPart(EngineContract):
    capability = Capability.SLEEP

    async def test_sleeping_does_not_change_a_completion(self, engine: Engine):
        (whole,) = await engine.generate(endless("whole"))
        task = asyncio.create_task(engine.generate(endless("asleep")))
        await until_started(engine)
        for _ in range(2):
            await engine.pause(sleep=True)
            assert not task.done()
            await engine.resume()
        (slept,) = await task
        assert_same(slept, whole)


class ScoringPart(EngineContract):
    capability = Capability.SCORING

    async def test_scores_equal_the_logprobs_and_entropies_of_plain_transformers(
        self, engine: Engine
    ):
        tokens = prompt_of(20)
        request = ScoreRequest(
            tokens=tokens,
            positions=np.arange(4, 20, dtype=np.int32),
            temperature=0.7,
            wants_entropies=True,
        )
        (scored,) = await engine.score([request])
        with torch.no_grad():
            logits = tiny_model("qwen3")(torch.from_numpy(tokens).long()[None]).logits[0, 3:-1]
        expected = (logits / 0.7).log_softmax(-1)
        chosen = expected.gather(1, torch.from_numpy(tokens[4:]).long()[:, None]).squeeze(1)
        np.testing.assert_allclose(scored.logprobs, chosen, rtol=0, atol=1e-5)
        entropies = torch.special.entr(expected.exp()).sum(-1)
        np.testing.assert_allclose(scored.entropies, entropies, rtol=0, atol=1e-4)
        assert scored.version == 0


class LoraPart(EngineContract):
    capability = Capability.LORA

    async def test_updates_bring_adapters(
        self, open_engine: OpenEngine, model_path: Path, tmp_path: Path, sender: PackingSender
    ):
        lora = LoraConfig(rank=4, alpha=8.0)
        folder = save_adapter(tmp_path / "adapter", lora, seed=1)
        request = make_request()
        async with open_engine(model_path, lora=lora) as engine:
            assert await engine.swap(sender.publish(1, read_checkpoint(folder))) == 1
            (completion,) = await engine.generate(request)
        assert set(completion.versions) == {1}
        model = PeftModel.from_pretrained(tiny_model("qwen3"), folder).eval()
        logits = plain_logits(model, request.prompt, completion)
        assert_sampled_from(logits, completion, request.sampling)


class AdaptersPart(EngineContract):
    capability = Capability.ADAPTERS

    async def test_requests_choose_adapters_by_name(
        self, open_engine: OpenEngine, model_path: Path, tmp_path: Path
    ):
        folder = save_adapter(tmp_path / "judge", LoraConfig(rank=4, alpha=8.0), seed=1)
        plain, judged = make_request("plain"), make_request("judged")
        judged = dataclasses.replace(judged, adapter="judge")
        async with open_engine(model_path, adapters={"judge": str(folder)}) as engine:
            (own,), (other,) = await asyncio.gather(engine.generate(plain), engine.generate(judged))
            with pytest.raises(TaskError, match="'unknown'"):
                await engine.generate(dataclasses.replace(judged, adapter="unknown"))
        logits = plain_logits(tiny_model("qwen3"), plain.prompt, own)
        assert_sampled_from(logits, own, plain.sampling)
        model = PeftModel.from_pretrained(tiny_model("qwen3"), folder).eval()
        assert_sampled_from(plain_logits(model, judged.prompt, other), other, judged.sampling)


class LogitsPart(EngineContract):
    capability = Capability.LOGITS

    async def test_biases_and_top_logprobs_apply_to_the_requests_that_have_them(
        self, engine: Engine
    ):
        plain = make_request("plain", top_logprobs=2)
        biased = make_request("biased", logit_bias=((5, 100.0),), presence_penalty=0.5)
        (own,), (other,) = await asyncio.gather(engine.generate(plain), engine.generate(biased))
        assert set(other.tokens) == {5}
        assert other.top is None
        assert own.top is not None
        assert own.top.ids.shape == own.top.logprobs.shape == (len(own.tokens), 2)
        logits = plain_logits(tiny_model("qwen3"), plain.prompt, own)
        likeliest = torch.tensor(logits).log_softmax(-1).topk(2)
        np.testing.assert_allclose(own.top.logprobs, likeliest.values, atol=1e-4)


class GrammarsPart(EngineContract):
    capability = Capability.GRAMMARS

    async def test_completions_follow_the_grammar(self, open_engine: OpenEngine, model_path: Path):
        llguidance = pytest.importorskip("llguidance")
        tokenizer = letter_tokenizer()
        tokenizer.backend_tokenizer.decoder = decoders.ByteLevel()  # llguidance knows this one
        tokenizer.save_pretrained(model_path)
        grammar = llguidance.LLMatcher.grammar_from_lark("start: /[0-3]{4}/")
        async with open_engine(model_path) as engine:
            completions = await engine.generate(make_request(n=4, grammar=grammar))
        for completion in completions:
            assert len(completion.text) == 4
            assert set(completion.text) <= set("0123")
