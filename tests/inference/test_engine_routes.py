"""Recorded expert routes against a plain forward pass of transformers."""

import dataclasses
from collections.abc import Sequence

import numpy as np
import pytest
from architectures import MIXTURE, MIXTURES, OTHER_MIXTURES
from engine_rig import (
    Collected,
    assert_same,
    finish_all,
    make_engine,
    make_request,
    plain_routes,
    prompt_of,
    weights,
)

from millrace.core.records import Completion, Request, ScoreRequest


def mixed_requests(*, n: int = 2, start: int = 0) -> list[Request]:
    return [
        make_request(str(i), prompt=prompt_of(5 + 6 * i, seed=i), n=n, seed=i, routes_from=start)
        for i in range(4)
    ]


def assert_routed(
    done: dict[str, list[Completion]], requests: Sequence[Request], *, architecture: str = MIXTURE
) -> None:
    for request in requests:
        for completion in done[request.id]:
            tokens = np.concatenate([request.prompt, completion.tokens])
            expected = plain_routes(tokens, architecture=architecture)[request.routes_from : -1]
            assert completion.routes is not None
            assert completion.routes.dtype == np.uint8
            np.testing.assert_array_equal(completion.routes, expected)


@pytest.mark.parametrize("architecture", [*MIXTURES, *OTHER_MIXTURES])
def test_chunked_prefill_and_shared_prompts_have_routes_of_plain_forward(architecture: str):
    requests = mixed_requests(n=3)
    engine = make_engine(architecture, records_routes=True, prefill_tokens=5, eos_ids=())
    done = finish_all(engine, requests)
    assert_routed(done, requests, architecture=architecture)
    plain = finish_all(make_engine(architecture, prefill_tokens=5, eos_ids=()), requests)
    for id, completions in plain.items():  # nothing else is different
        for ours, theirs in zip(done[id], completions, strict=True):
            assert theirs.routes is None
            assert_same(ours, dataclasses.replace(theirs, routes=None))


@pytest.mark.parametrize("decode_steps", [2, 7])
def test_decode_loop_has_routes_of_single_steps(decode_steps: int):
    requests = mixed_requests()
    engine = make_engine(MIXTURE, records_routes=True, decode_steps=decode_steps, eos_ids=(5,))
    assert_routed(finish_all(engine, requests), requests)


def test_cached_prefixes_have_routes():
    engine = make_engine(MIXTURE, records_routes=True, eos_ids=())
    finish_all(engine, [make_request("first", prompt=prompt_of(21))])  # which wants no routes
    request = make_request(prompt=prompt_of(21), n=2, seed=1, routes_from=0)
    done = finish_all(engine, [request])
    assert engine.stats().cached_tokens > 0
    assert_routed(done, [request])


def test_routes_start_at_requested_position():
    requests = mixed_requests(start=4)
    engine = make_engine(MIXTURE, records_routes=True, eos_ids=())
    assert_routed(finish_all(engine, requests), requests)


@pytest.mark.parametrize("settings", [{}, {"decode_steps": 3}, {"prefix_cache": False}], ids=str)
def test_preempted_sequences_keep_their_routes(settings):
    requests = mixed_requests(n=3)
    engine = make_engine(MIXTURE, records_routes=True, num_blocks=30, eos_ids=(), **settings)
    done = finish_all(engine, requests)
    assert engine.stats().preemptions > 0
    assert_routed(done, requests)


@pytest.mark.parametrize("is_lost", [False, True], ids=["given back", "lost with its engine"])
def test_completion_resumed_on_another_engine_has_all_routes(is_lost: bool):
    engine = make_engine(MIXTURE, records_routes=True, eos_ids=())
    request = make_request(seed=5, routes_from=2)
    engine.add_request(request)
    for _ in range(7):
        engine.step()
    ((partial,),) = (aborted.completions.values() for aborted in engine.abort(["r"]))
    assert partial.routes is not None
    assert len(partial.routes) == len(request.prompt) + 7 - 1 - 2
    if is_lost:  # then its routes were never sent
        partial = dataclasses.replace(partial, routes=None)
    resumed = dataclasses.replace(request, id="again", partial=partial)
    other = make_engine(MIXTURE, records_routes=True, prefill_tokens=4, eos_ids=())
    done = finish_all(other, [resumed])
    assert done["again"][0].finish == "length"
    assert_routed(done, [resumed])


def test_preempt_all_keeps_routes():
    engine = make_engine(MIXTURE, records_routes=True, eos_ids=(), num_blocks=40)
    requests = mixed_requests()
    for request in requests:
        engine.add_request(request)
    collected = Collected()
    while engine.has_work:
        for _ in range(3):
            collected.add(engine.step())
        collected.add(engine.preempt_all())
    assert_routed(collected.by_request(), requests)


def test_recomputed_kv_keeps_routes_of_sampled_tokens():
    engine = make_engine(
        MIXTURE, records_routes=True, eos_ids=(), kv="recompute", prefill_tokens=1024
    )
    requests = mixed_requests()
    for request in requests:
        engine.add_request(request)
    collected = Collected()
    for version in range(1, 4):
        for _ in range(5):
            collected.add(engine.step())
        engine.swap(weights(MIXTURE, seed=version), version=version)
    done = finish_all(engine, collected=collected)
    for request in requests:
        num_prompt = len(request.prompt)
        for completion in done[request.id]:
            assert completion.versions.tolist() == [0] * 5 + [1] * 5 + [2] * 5 + [3]
            tokens = np.concatenate([request.prompt, completion.tokens])
            by_version = [plain_routes(tokens, seed=seed) for seed in range(4)]
            # The routes of a token are those of the pass that predicted the next one.
            predicted_by = [0] * (num_prompt - 1) + completion.versions.tolist()
            expected = [by_version[v][t] for t, v in enumerate(predicted_by)]
            np.testing.assert_array_equal(completion.routes, np.stack(expected))


def test_swap_keeps_routes_of_earlier_tokens():
    engine = make_engine(MIXTURE, records_routes=True, eos_ids=(), kv="keep")
    request = make_request(routes_from=0)
    engine.add_request(request)
    for _ in range(6):
        engine.step()
    engine.swap(weights(MIXTURE, seed=1), version=1)
    (completion,) = finish_all(engine)["r"]
    tokens = np.concatenate([request.prompt, completion.tokens])
    num_fed = len(request.prompt) + 5
    assert completion.routes is not None
    before, after = np.split(completion.routes, [num_fed])
    np.testing.assert_array_equal(before, plain_routes(tokens)[:num_fed])
    assert (after != plain_routes(tokens)[num_fed:-1]).any()


def test_dense_model_or_request_without_routes_has_none():
    engine = make_engine(MIXTURE, records_routes=True)
    assert finish_all(engine, [make_request()])["r"][0].routes is None
    dense = make_engine("qwen3", records_routes=True)
    assert finish_all(dense, [make_request(routes_from=0)])["r"][0].routes is None


@pytest.mark.parametrize("decode_steps", [1, 4])
def test_scoring_records_no_routes(decode_steps: int):
    requests = mixed_requests()
    engine = make_engine(MIXTURE, records_routes=True, decode_steps=decode_steps, eos_ids=())
    to_score = ScoreRequest(tokens=prompt_of(9, seed=9), positions=np.array([4, 8], np.int32))
    for request in requests:
        engine.add_request(request)
    collected = Collected()
    while engine.has_work:
        collected.add(engine.step())
        engine.score([to_score])
    assert_routed(collected.by_request(), requests)
