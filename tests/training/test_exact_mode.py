"""Exact mode: the engine's logprobs are the trainer's, bit for bit."""

import dataclasses
import json
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from architectures import NUM_EXPERTS, tiny_model
from astray import lead_astray
from batches import batch_of, random_rollout, trainer_of
from engine_rig import finish_all, make_engine, make_request, prompt_of, weights

from millrace.bench.fidelity import generate, main
from millrace.core.completions import cut
from millrace.core.errors import RunFailed
from millrace.core.records import Completion, Request, Rollout
from millrace.environments.token_record import TokenRecord, rollout_of
from millrace.inference.embedded.engine import EmbeddedEngine
from millrace.models.attention.packed import PACKED_ATTENTION
from millrace.models.routing import RouteReplay, find_routing
from millrace.models.support import use_own_classes
from millrace.training.metrics import mixed_context
from millrace.training.optimizer import TrainSettings
from millrace.training.packing.packer import pack
from millrace.training.policy_model import PolicyModel


def differing_bits(
    architecture: str, *, exact: bool, astray: bool = False, replays: bool = False, **settings
) -> int:
    """Of logprobs of completions with shared and reused prompts, some truncated. `astray`: the
    engine records its routes, and sends some tokens to experts that its routers did not choose."""
    engine = make_engine(architecture, exact=exact, eos_ids=(), records_routes=astray, **settings)
    if astray:
        lead_astray(engine, num_experts=NUM_EXPERTS)
    model = tiny_model(architecture)
    model.set_attn_implementation(PACKED_ATTENTION)
    use_own_classes(model)
    routing = find_routing(model) if replays else None
    replay = None if routing is None else RouteReplay(routing)
    train = TrainSettings(exact=exact)
    policy = PolicyModel(model, settings=train, replay=replay, logprob_chunk=30)
    differing = 0
    groups = generate(engine, 0, num_prompts=4, new_tokens=20, num_tokens=60)
    for microbatch_tokens in (60, 10**6):
        for part in pack(groups, microbatch_tokens=microbatch_tokens).microbatches:
            logprobs = policy.logprobs(part).logprobs
            logprobs.sum().backward()
            ours = logprobs.detach().numpy().view(np.int32)
            differing += int((ours != part.engine_logprobs.view(np.int32)).sum())
    return differing


@pytest.mark.parametrize("architecture", ["qwen3", "gemma2", "qwen2_moe"])
def test_engine_and_trainer_compute_the_same_bits(architecture):
    """With prefill in chunks and preempted sequences."""
    small = {"num_blocks": 30, "prefill_tokens": 11}
    assert differing_bits(architecture, exact=True, **small) == 0


@pytest.mark.parametrize("architecture", ["qwen3_moe", "mixtral", "glm4_moe", "phimoe", "llama4"])
@pytest.mark.parametrize("replays", [False, True])
def test_replayed_routes_give_the_same_bits(architecture: str, replays: bool):
    small = {"num_blocks": 30, "prefill_tokens": 11}
    num = differing_bits(architecture, exact=True, astray=True, replays=replays, **small)
    assert (num == 0) == replays


@pytest.mark.slow
def test_the_benchmark_replays_routes_and_finds_no_differing_bit(tmp_path):
    result = tmp_path / "result.json"
    options = {"model": "tiny-moe", "device": "cpu", "tokens": 200, "batch": 8, "new-tokens": 12}
    arguments = [str(part) for name, value in options.items() for part in (f"--{name}", value)]
    assert main([*arguments, "--routes", "--json", str(result)]) == 0
    found = json.loads(result.read_text())
    assert (found["differing"], found["replayed_share"]) == (0, 1.0)
    assert found["tokens"] >= 200


def test_decode_loop_computes_the_same_bits():
    assert differing_bits("qwen3", exact=True, decode_steps=4) == 0


def test_fast_mode_differs_in_some_bits():
    assert differing_bits("qwen3", exact=False) > 0


def test_gradients_of_exact_mode_are_those_of_fast_mode():
    rng = np.random.default_rng(0)
    batch = batch_of([random_rollout(rng, prompt=9, sampled=30) for _ in range(4)])
    fast = trainer_of(tiny_model("qwen3_moe"))
    exact = trainer_of(tiny_model("qwen3_moe"), exact=True, gradient_checkpointing=True)
    for trainer in (fast, exact):
        trainer.accumulate(batch)
    gradients = [dict(t.policy.module.named_parameters()) for t in (fast, exact)]
    for name, parameter in gradients[0].items():
        torch.testing.assert_close(
            gradients[1][name].grad, parameter.grad, rtol=1e-4, atol=1e-6, msg=name
        )


def test_a_differing_bit_stops_the_run():
    rollout = random_rollout(np.random.default_rng(1))
    trainer = trainer_of(tiny_model("qwen3"), exact=True, exact_kv="keep")
    (part,) = batch_of([rollout]).microbatches
    with torch.no_grad():
        logprobs = trainer.policy.logprobs(part).logprobs.numpy()
    batch = batch_of([rollout])
    same = dataclasses.replace(part, engine_logprobs=logprobs)
    metrics = trainer.step(dataclasses.replace(batch, microbatches=(same,)))
    assert metrics["mismatch/differing_logprobs"] == 0
    assert metrics["mismatch/compared_logprobs"] == len(logprobs)
    assert metrics["ratio/mean"] == metrics["ratio/max"] == 1
    trainer = trainer_of(tiny_model("qwen3"), exact=True, exact_kv="keep")
    other = np.nextafter(logprobs, np.float32(0), where=np.arange(len(logprobs)) == 2, out=logprobs)
    changed = dataclasses.replace(part, engine_logprobs=other)
    with pytest.raises(RunFailed, match="In step 1, 1 of 6 on-policy logprobs"):
        trainer.step(dataclasses.replace(batch, microbatches=(changed,)))


def sampled(engine: EmbeddedEngine, request: Request) -> Completion:
    request = dataclasses.replace(request, session="s", routes_from=0)
    return finish_all(engine, [request])["r"][0]


def compared(
    rollouts: Sequence[Rollout], *, kv: str = "keep", architecture: str = "qwen3"
) -> tuple[float, ...]:
    """Numbers of compared and of mixed tokens in a step of a trainer at version 1, which raises an
    error if a compared logprob is not the engine's. Recorded routes are replayed."""
    model = tiny_model(architecture, seed=1)
    routing = find_routing(model) if any(r.routes is not None for r in rollouts) else None
    replay = None if routing is None else RouteReplay(routing)
    trainer = trainer_of(model, exact=True, exact_kv=kv, replay=replay)
    trainer.steps_done = 1
    metrics = trainer.step(batch_of([r for r in rollouts if r.num_sampled]))
    names = ("compared_logprobs", "mixed_context_tokens")
    return tuple(metrics[f"mismatch/{name}"] for name in names)


def test_turns_of_a_session_after_a_swap_are_those_of_the_trainer():
    """Turns whose rollouts do not show that their session had older weights."""
    engine, record = make_engine(exact=True, eos_ids=()), TokenRecord()
    first = make_request(prompt=20)
    done = sampled(engine, first)
    root = record.add(first.prompt, done, sampling=first.sampling)
    engine.swap(weights(seed=1), version=1)
    said = np.concatenate([first.prompt, done.tokens])
    for known, parent, temperature in (
        (said[:18], None, 1.0),  # the history was rewritten
        (said, root, 1.0),
        (said, root, 1.0),  # a second branch
        (said, root, 0.7),  # its tokens are a rollout of their own
    ):
        given = prompt_of(5, seed=len(record.exchanges))
        prompt = np.concatenate([known, given])
        request = make_request(prompt=prompt, temperature=temperature)
        given = prompt if parent is None else given
        done = sampled(engine, request)
        record.add(given, done, sampling=request.sampling, parent=parent)
    assert compared(record.rollouts()) == (3 * 16, 16)


def test_fork_that_a_swap_interrupts_in_its_prefill_is_computed_by_one_version():
    engine = make_engine(exact=True, eos_ids=(), prefill_tokens=8)
    request = make_request(prompt=20)
    partial = cut(sampled(engine, request), 0, 10)
    fork = dataclasses.replace(request, seed=1, partial=partial)
    other = make_engine(exact=True, eos_ids=(), prefill_tokens=8)
    other.add_request(fork)
    other.step()
    other.swap(weights(seed=1), version=1)
    done = dataclasses.replace(finish_all(other)["r"][0], num_shared=10)
    record = TokenRecord()
    record.add(request.prompt, done, sampling=request.sampling)
    assert compared(record.rollouts()) == (6, 0)


@pytest.mark.parametrize("kv", ["keep", "recompute"])
def test_tokens_beside_replayed_routes_of_another_version_are_not_compared(kv: str):
    engine = make_engine("qwen3_moe", exact=True, eos_ids=(), kv=kv, records_routes=True)
    requests = [make_request(str(i), prompt=9, seed=i, routes_from=0) for i in range(2)]
    engine.add_request(requests[0])
    for _ in range(5):
        engine.step()
    engine.swap(weights("qwen3_moe", seed=1), version=1)
    done = finish_all(engine, requests[1:])
    rollouts = [rollout_of(r.prompt, done[r.id][0], r.sampling) for r in requests]
    assert compared(rollouts, kv=kv, architecture="qwen3_moe") == (0, 27)


def test_tokens_with_a_context_of_several_versions_are_not_compared():
    rollouts = [random_rollout(np.random.default_rng(i)) for i in range(2)]
    (part,) = batch_of(rollouts).microbatches
    versions = np.array([3, 3, 4, 4, 4, 5, 4, 4, 4, 4, 4, 4], np.int32)
    part = dataclasses.replace(part, versions=versions)
    assert mixed_context(part).tolist() == [False] * 2 + [True] * 4 + [False] * 6
