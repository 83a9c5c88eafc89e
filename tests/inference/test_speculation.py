"""Speculation: drafts decide how many passes a completion takes, and nothing else about it."""

import dataclasses

import numpy as np
import pytest
import talking_model
import torch
from architectures import MIXTURE
from engine_rig import (
    assert_same,
    finish_all,
    make_engine,
    make_request,
    prompt_of,
    weights,
)
from person_schema import FORMAT

from millrace.config import LoraConfig
from millrace.core.records import Completion, Request
from millrace.inference.embedded.engine import EmbeddedEngine
from millrace.inference.embedded.scheduling.drafts import DraftCursor, NgramIndex
from millrace.inference.embedded.scheduling.speculation import (
    MAX_LIVE,
    DraftProposer,
    PassTimes,
)
from millrace.models.grammars import grammar_of

Done = dict[str, list[Completion]]


class OracleDrafts(DraftProposer):
    """Drafts of 0 to 5 tokens from the completions of plain decoding; every fifth token of a
    completion is wrong."""

    def __init__(self, engine: EmbeddedEngine, done: Done) -> None:
        super().__init__(engine._slots)
        self._done = done

    def propose(self, chosen: np.ndarray) -> list[list[int]]:
        slots, drafts = self._slots, []
        single = slots.is_guided | slots.adjusts_logits | (slots.num_top > 0)
        for slot in chosen.tolist():
            sequence, num_tokens = slots.sequence(slot), int(slots.num_tokens[slot])
            completion = self._done[sequence.request.id][sequence.member].tokens.astype(int)
            wrong = np.arange(len(completion)) % 5 == 4
            completion = np.where(wrong, (completion + 1) % 60, completion)
            start = num_tokens - sequence.num_prompt
            room = 0 if single[slot] else int(slots.limits[slot]) - num_tokens - 1
            drafts.append(completion[start : start + min(num_tokens % 6, room)].tolist())
        return drafts if any(drafts) else []


def with_oracle(engine: EmbeddedEngine, done: Done) -> EmbeddedEngine:
    engine._scheduler.drafts = OracleDrafts(engine, done)
    return engine


def assert_equal(done: Done, expected: Done) -> None:
    assert done.keys() == expected.keys()
    for id, completions in expected.items():
        for ours, theirs in zip(done[id], completions, strict=True):
            assert_same(ours, theirs)
            np.testing.assert_array_equal(ours.versions, theirs.versions)
            assert (ours.finish, ours.text) == (theirs.finish, theirs.text)
            assert ours.kv == theirs.kv
            for left, right in ((ours.routes, theirs.routes), (ours.top, theirs.top)):
                assert (left is None) == (right is None)
            if ours.routes is not None:
                np.testing.assert_array_equal(ours.routes, theirs.routes)
            if ours.top is not None and theirs.top is not None:
                np.testing.assert_array_equal(ours.top.ids, theirs.top.ids)


def assert_drafts_change_nothing(
    requests: list[Request], architecture: str = "qwen3", **settings
) -> EmbeddedEngine:
    """Returns the engine that had drafts."""
    plain = make_engine(architecture, **settings)
    expected = finish_all(plain, requests)
    engine = with_oracle(make_engine(architecture, **settings), expected)
    assert_equal(finish_all(engine, requests), expected)
    stats = engine.stats()
    assert 0 < stats.accepted_tokens < stats.drafted_tokens
    assert stats.generated_tokens == plain.stats().generated_tokens
    assert stats.prefill_tokens == plain.stats().prefill_tokens
    return engine


SAMPLING = (
    {"temperature": 0.0},
    {"temperature": 1.3},
    {"top_k": 7},
    {"top_p": 0.8},
    {"min_p": 0.01, "temperature": 0.7},
)


def mixed_requests(**more) -> list[Request]:
    return [
        make_request(str(i), prompt=prompt_of(3 + 5 * i, seed=i), n=2, seed=i, **{**each, **more})
        for i, each in enumerate(SAMPLING)
    ]


@pytest.mark.parametrize("sampling", SAMPLING, ids=str)
def test_completions_are_those_of_plain_decoding(sampling):
    assert_drafts_change_nothing([make_request(n=4, max_new_tokens=40, **sampling)], eos_ids=())


@pytest.mark.parametrize("architecture", ["qwen3", "gemma3", "gpt_oss"])
def test_sequences_with_other_settings_share_passes_with_drafts(architecture):
    assert_drafts_change_nothing(mixed_requests(), architecture, max_sequences=16)


def test_drafts_end_where_completions_end():
    """By EOS, by a stop string within a draft, by length and by the end of the context."""
    requests = [make_request("length", n=3, max_new_tokens=9), make_request("eos", n=4, seed=2)]
    free = finish_all(make_engine(), [make_request("stop", seed=3, max_new_tokens=30)])["stop"][0]
    stop = free.text[5:7]
    requests += [make_request("stop", seed=3, max_new_tokens=30, stop=(stop,))]
    engine = assert_drafts_change_nothing(requests)
    full = [make_request("full", prompt=prompt_of(20), max_new_tokens=500)]
    assert_drafts_change_nothing(full, max_context=48, eos_ids=())
    assert engine.stats().running == 0


def test_penalties_and_top_logprobs_have_no_drafts_beside_those_that_do():
    requests = mixed_requests()
    requests += [make_request("top", n=2, top_logprobs=3, seed=8)]
    requests += [make_request("penalty", n=2, frequency_penalty=0.8, seed=9)]
    assert_drafts_change_nothing(requests, max_sequences=14)


def test_grammars_have_no_drafts_beside_those_that_do():
    pytest.importorskip("llguidance")
    prompt = np.array(talking_model.TOKENIZER.encode("Who is it?"), np.int32)
    guided = make_request("guided", prompt=prompt, n=2, max_new_tokens=60)
    sampling = dataclasses.replace(guided.sampling, grammar=grammar_of(FORMAT))
    free = make_request("free", prompt=prompt, n=2, max_new_tokens=60, temperature=0.0)
    requests = [dataclasses.replace(guided, sampling=sampling), free]
    expected = finish_all(talking_model.make_engine(), requests)
    engine = with_oracle(talking_model.make_engine(), expected)
    assert_equal(finish_all(engine, requests), expected)
    assert engine.stats().accepted_tokens > 0


def test_routes_are_those_of_plain_decoding():
    requests = [make_request(n=4, routes_from=0, max_new_tokens=30, temperature=0.9)]
    settings = {"records_routes": True, "eos_ids": ()}
    assert_drafts_change_nothing(requests, MIXTURE, **settings)


def test_adapters_of_requests_are_those_of_plain_decoding():
    def bank_engine() -> EmbeddedEngine:
        engine = make_engine(lora=LoraConfig(rank=4, alpha=8.0, apply="unmerged"), eos_ids=())
        torch.manual_seed(0)
        shapes = engine.parameter_shapes()
        engine.swap({n: 0.3 * torch.randn(s) for n, s in shapes.items()}, version=1)
        return engine

    requests = [make_request(str(name), n=3, temperature=0.5) for name in (None, "base")]
    requests[1] = dataclasses.replace(requests[1], adapter="base")
    expected = finish_all(bank_engine(), requests)
    engine = with_oracle(bank_engine(), expected)
    assert_equal(finish_all(engine, requests), expected)
    assert engine.stats().accepted_tokens > 0


def test_preempted_sequences_are_those_of_plain_decoding():
    requests = mixed_requests(max_new_tokens=24)
    settings = {"num_blocks": 24, "prefill_tokens": 10, "max_sequences": 10}
    expected = finish_all(make_engine(max_sequences=10), requests)
    engine = with_oracle(make_engine(**settings), expected)
    done = finish_all(engine, requests)
    for id, completions in expected.items():
        for ours, theirs in zip(done[id], completions, strict=True):
            assert_same(ours, theirs)
    assert engine.stats().preemptions > 0
    assert engine.stats().accepted_tokens > 0
    assert engine.stats().free_blocks == 24


def test_prefix_cache_holds_only_accepted_tokens():
    request = make_request(n=2, prompt=prompt_of(9), max_new_tokens=30)
    engine = assert_drafts_change_nothing([request], eos_ids=())
    first = finish_all(make_engine(eos_ids=()), [request])["r"][0]
    longer = make_request("longer", prompt=np.concatenate([request.prompt, first.tokens]))
    expected = finish_all(make_engine(eos_ids=()), [longer])
    before = engine.stats().cached_tokens
    engine._scheduler.drafts = OracleDrafts(engine, expected)
    assert_equal(finish_all(engine, [longer]), expected)
    assert engine.stats().cached_tokens - before >= 36


@pytest.mark.parametrize("kv", ["keep", "recompute"])
def test_weights_swapped_between_passes_are_those_of_plain_decoding(kv):
    request = make_request(max_new_tokens=40, temperature=0.8)
    settings = {"eos_ids": (), "kv": kv}
    engine = with_oracle(make_engine(**settings), finish_all(make_engine(**settings), [request]))
    engine.add_request(request)
    for _ in range(4):
        engine.step()
    num_before = engine.stats().generated_tokens
    assert num_before > 4
    engine.swap(weights(seed=1), version=1)
    done = finish_all(engine)
    plain = make_engine(**settings)
    plain.add_request(request)
    for _ in range(num_before):
        plain.step()
    plain.swap(weights(seed=1), version=1)
    assert_equal(done, finish_all(plain))
    assert done["r"][0].versions.tolist() == [0] * num_before + [1] * (40 - num_before)


def test_exact_mode_gives_the_same_bits():
    requests = [make_request(n=3, max_new_tokens=30, top_p=0.9)]
    expected = finish_all(make_engine(exact=True, eos_ids=()), requests)
    engine = with_oracle(make_engine(exact=True, eos_ids=()), expected)
    done = finish_all(engine, requests)
    assert engine.stats().accepted_tokens > 0
    for ours, theirs in zip(done["r"], expected["r"], strict=True):
        np.testing.assert_array_equal(ours.tokens, theirs.tokens)
        np.testing.assert_array_equal(ours.logprobs, theirs.logprobs)


def test_streams_have_every_token_once():
    request = make_request(n=2, max_new_tokens=30)
    expected = finish_all(make_engine(eos_ids=()), [request])
    engine = with_oracle(make_engine(eos_ids=()), expected)
    engine.add_request(request, stream=True)
    streamed: list[list[int]] = [[], []]
    while engine.has_work:
        engine.step()
        for chunk in engine.take_chunks().get("r", []):
            streamed[chunk.member] += chunk.tokens.tolist()
    assert streamed == [completion.tokens.tolist() for completion in expected["r"]]


def retried(*, n: int = 1, **settings) -> EmbeddedEngine:
    """An engine that served the same greedy request twice."""
    sizes = {"max_sequences": 24, "num_blocks": 512}
    engine = make_engine(eos_ids=(), speculates=True, **sizes, **settings)
    for id in ("first", "retry"):
        request = make_request(id, prompt=prompt_of(12), n=n, temperature=0.0, max_new_tokens=40)
        finish_all(engine, [request])
    return engine


def test_retries_and_siblings_are_drafts():
    engine = retried()
    assert engine.stats().accepted_tokens >= 10
    expected = finish_all(make_engine(eos_ids=()), [make_request("again", prompt=prompt_of(12))])
    assert_equal(finish_all(engine, [make_request("again", prompt=prompt_of(12))]), expected)
    assert retried(n=4).stats().accepted_tokens > 0


@pytest.mark.parametrize(
    "settings",
    [{"n": MAX_LIVE + 1}, {"decode_steps": 3}, {"architecture": "lfm2"}],
    ids=["many sequences", "decode loop", "recurrent states"],
)
def test_speculation_is_off_where_it_does_not_pay_or_cannot_work(settings):
    assert retried(**settings).stats().drafted_tokens == 0


def test_random_text_has_no_drafts():
    engine = make_engine(eos_ids=(), speculates=True)
    requests = [
        make_request(str(i), prompt=prompt_of(20, seed=i), seed=i, max_new_tokens=90)
        for i in range(8)
    ]
    finish_all(engine, requests)
    assert engine.stats().drafted_tokens == 0


def test_cursor_follows_text_that_repeats():
    index, prompt = NgramIndex(), np.arange(10, 20)
    index.read(prompt)
    cursor = DraftCursor(index, prompt)
    assert cursor.draft(5) == []
    cursor.read([1, 12, 13, 14])
    assert cursor.draft(2) == [15, 16]
    cursor.read([15, 16, 17])
    assert cursor.draft(9) == [18, 19]
    assert cursor.share == pytest.approx(3 / 5, abs=0.1)
    cursor.read([7, 8, 9, 7, 8, 9])  # a loop continues behind its end
    assert cursor.draft(2) == [7, 8]
    cursor.read([7, 8, 9])
    assert cursor.draft(7) == [7, 8, 9, 7, 8, 9, 7]
    sibling = DraftCursor(index, prompt)
    sibling.read([1, 12, 13, 14, 15, 16])
    assert sibling.draft(3) == [17, 7, 8]


def test_ended_completions_of_the_prompt_are_found():
    index, prompt = NgramIndex(), np.arange(10, 20)
    index.put(np.array([17, 18, 19, 1, 2, 3]))  # the end of the prompt, and the completion
    index.read(prompt)
    assert DraftCursor(index, prompt).draft(9) == [1, 2]


def test_known_text_is_bounded():
    engine = make_engine(eos_ids=(), speculates=True)
    drafts = DraftProposer(engine._slots, max_known=100)
    engine._scheduler.drafts = drafts
    for seed in range(5):
        finish_all(engine, [make_request(prompt=prompt_of(20, seed=seed), max_new_tokens=20)])
    assert drafts.num_known <= 100
    finish_all(engine, [make_request(n=8, prompt=prompt_of(20), max_new_tokens=20)])
    assert drafts.num_known <= 100


def test_pass_times_follow_measurements():
    times = PassTimes()
    for _ in range(20):
        times.observe(4, 1.0)
    few, many = times.estimate(np.array([4, 16]))
    assert few == pytest.approx(1.0)
    assert many == pytest.approx(2.0)  # a guess
    times.observe(16, 5.0)
    assert times.estimate(np.array([4, 10, 16])) == pytest.approx([1.0, 3.0, 5.0])
    times.observe(4, 100.0)  # one slow pass
    assert times.estimate(np.array([4]))[0] < 1.5
    for _ in range(200):
        times.observe(4, 1.0)
    assert times.estimate(np.array([4, 16]))[1] == pytest.approx(2.0, rel=0.01)  # tried again
