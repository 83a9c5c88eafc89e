"""With replayed routes, the trainer computes the logprobs of the engine."""

import dataclasses

import numpy as np
import pytest
import torch
from architectures import MIXTURE, MIXTURES, NUM_EXPERTS, OTHER_MIXTURES, tiny_model
from astray import lead_astray
from batches import batch_of, trainer_of
from engine_rig import finish_all, make_engine, make_request, prompt_of, weights

from millrace.config import LoraConfig
from millrace.core.completions import unknown_id
from millrace.core.microbatch import Batch, Microbatch
from millrace.core.records import Completion, Request, Rollout
from millrace.environments.token_record import rollout_of
from millrace.models.lora.trained import TrainedAdapter
from millrace.models.routing import RouteReplay, find_routing
from millrace.models.support import use_own_classes
from millrace.training.layers import checkpoint_layers, compile_layers
from millrace.training.packing.splitting import halves
from millrace.training.trainer import Trainer


def astray_engine(architecture: str = MIXTURE, **settings):
    """What it samples can only be understood by who knows where its tokens went."""
    engine = make_engine(architecture, records_routes=True, **{"eos_ids": (), **settings})
    lead_astray(engine, num_experts=NUM_EXPERTS, in_pairs=architecture == "deepseek_v2")
    return engine


def replaying(model, **settings) -> Trainer:
    use_own_classes(model)
    routing = find_routing(model)
    assert routing is not None
    return trainer_of(model, replay=RouteReplay(routing), **settings)


def rollouts_of(requests: list[Request], done: dict[str, list[Completion]]) -> list[Rollout]:
    return [
        rollout_of(request.prompt, completion, request.sampling)
        for request in requests
        for completion in done[request.id]
    ]


def mixed_requests(*, n: int = 3, num: int = 3) -> list[Request]:
    settings = [{}, {"temperature": 0.7}, {"top_k": 5}]
    return [
        make_request(
            str(i),
            prompt=prompt_of(5 + 8 * i, seed=i),
            n=n,
            seed=i,
            routes_from=0,
            **settings[i % 3],
        )
        for i in range(num)
    ]


def differences(trainer: Trainer, batch: Batch) -> np.ndarray:
    """|engine - trainer| of all trained tokens."""
    parts = []
    with torch.no_grad():
        for part in batch.microbatches:
            logprobs = trainer.policy.logprobs(part)[0].cpu().numpy()
            parts.append(np.abs(logprobs - part.engine_logprobs))
    return np.concatenate(parts)


def without_routes(batch: Batch) -> Batch:
    parts = [dataclasses.replace(part, routes=None) for part in batch.microbatches]
    return dataclasses.replace(batch, microbatches=tuple(parts))


def assert_replayed(rollouts: list[Rollout], *, architecture: str = MIXTURE, **packing) -> Batch:
    trainer = replaying(tiny_model(architecture))
    batch = batch_of(rollouts, **packing)
    assert differences(trainer, batch).max() < 1e-5
    assert differences(trainer, without_routes(batch)).mean() > 1e-2
    return batch


@pytest.mark.parametrize("architecture", [*MIXTURES, *OTHER_MIXTURES])
def test_packed_groups_with_shared_prompts_agree_with_the_engine(architecture: str):
    requests = mixed_requests(num=1)
    engine = astray_engine(architecture, prefill_tokens=5)
    batch = assert_replayed(
        rollouts_of(requests, finish_all(engine, requests)), architecture=architecture
    )
    (part,) = batch.microbatches
    assert (part.parents >= 0).any()  # the prompt is stored once


@pytest.mark.parametrize(
    "settings",
    [
        {"prefill_tokens": 5},
        {"num_blocks": 30},
        {"num_blocks": 30, "prefix_cache": False, "decode_steps": 3},
        {"decode_steps": 7},
    ],
    ids=["chunked", "preempted", "preempted, recomputed", "rounds"],
)
def test_trainer_agrees_with_the_engine_for_all_engine_settings(settings):
    requests = mixed_requests()
    engine = astray_engine(**settings)
    rollouts = rollouts_of(requests, finish_all(engine, requests))
    assert (engine.stats().preemptions > 0) == ("num_blocks" in settings)
    assert_replayed(rollouts, microbatch_tokens=60)


@pytest.mark.parametrize("kv", ["keep", "recompute"])
def test_trainer_agrees_with_the_engine_after_a_swap_and_a_resume_on_another_engine(kv):
    engine = astray_engine(kv=kv)
    requests = mixed_requests(n=1)
    for request in requests:
        engine.add_request(request)
    for _ in range(5):
        engine.step()
    engine.swap(weights(MIXTURE, seed=0), version=1)  # the same ones, as a version of their own
    for _ in range(5):
        engine.step()
    aborted = {f.id: f.completions[0] for f in engine.abort([r.id for r in requests])}
    rest = [dataclasses.replace(r, partial=aborted[r.id]) for r in requests]
    done = finish_all(astray_engine(version=2), rest)
    rollouts = rollouts_of(requests, done)
    assert {int(v) for r in rollouts for v in r.versions[r.mask]} == {0, 1, 2}
    assert_replayed(rollouts)


@pytest.mark.parametrize("apply", ["merged", "unmerged"])
def test_routes_are_replayed_with_adapters_of_experts_and_resumed_partials(apply):
    lora = LoraConfig(rank=3, apply=apply)
    model = tiny_model(MIXTURE)
    adapter = TrainedAdapter(model, lora, model_path="tiny")
    torch.manual_seed(6)
    for weight in adapter.named_weights().values():
        weight.normal_(std=0.2)

    def adapted_engine(version: int):
        engine = astray_engine(lora=lora, decode_steps=1 + 2 * version)
        engine.swap(adapter.named_weights(), version=version)
        return engine

    engine = adapted_engine(1)
    shared, single = mixed_requests(num=2), mixed_requests(n=1)
    single = [dataclasses.replace(request, id=f"single {request.id}") for request in single]
    rollouts = rollouts_of(shared, finish_all(engine, shared))
    for request in single:
        engine.add_request(request)
    for _ in range(3):
        engine.step()
    aborted = {f.id: f.completions[0] for f in engine.abort([r.id for r in single])}
    assert all(len(partial.tokens) for partial in aborted.values())
    rest = [dataclasses.replace(r, partial=aborted[r.id]) for r in single]
    rollouts += rollouts_of(single, finish_all(adapted_engine(2), rest))
    assert {int(v) for r in rollouts for v in r.versions[r.mask]} == {1, 2}
    trainer = replaying(model, adapter=adapter)
    for tokens in (10_000, 60):
        batch = batch_of(rollouts, microbatch_tokens=tokens)
        assert any((part.parents >= 0).any() for part in batch.microbatches)
        assert differences(trainer, batch).max() < 2e-5
    assert differences(trainer, without_routes(batch)).mean() > 1e-2


def test_halves_of_a_microbatch_keep_their_routes():
    requests = mixed_requests()
    rollouts = rollouts_of(requests, finish_all(astray_engine(), requests))
    (part,) = batch_of(rollouts).microbatches
    both = halves(part)
    assert both is not None
    trainer = replaying(tiny_model(MIXTURE))
    assert (
        differences(trainer, Batch(microbatches=both, num_sequences=0, num_trained_tokens=0)).max()
        < 1e-5
    )


def test_a_rollout_without_routes_uses_the_routers_choice():
    requests = mixed_requests(num=2)
    done = finish_all(make_engine(MIXTURE, records_routes=True, eos_ids=()), requests[:1])
    done |= finish_all(make_engine(MIXTURE, eos_ids=()), requests[1:])
    (part,) = batch_of(rollouts_of(requests, done)).microbatches
    assert part.routes is not None
    assert (part.routes == unknown_id(part.routes.dtype)).all((1, 2)).any()
    trainer = replaying(tiny_model(MIXTURE))
    batch = Batch(microbatches=(part,), num_sequences=6, num_trained_tokens=len(part.targets))
    assert differences(trainer, batch).max() < 1e-5


def astray_part() -> Microbatch:
    requests = mixed_requests(num=2)
    (part,) = batch_of(rollouts_of(requests, finish_all(astray_engine(), requests))).microbatches
    return part


def gradients(part: Microbatch, **settings) -> dict[str, torch.Tensor]:
    trainer = replaying(tiny_model(MIXTURE), **settings)
    trainer.policy.logprobs(part)[0].sum().backward()
    return {n: p.grad for n, p in trainer.policy.module.named_parameters() if p.grad is not None}


def test_recomputed_layers_use_the_same_routes():
    part = astray_part()
    plain, twice = gradients(part), gradients(part, gradient_checkpointing=True)
    assert plain.keys() == twice.keys()
    for name, gradient in plain.items():
        torch.testing.assert_close(twice[name], gradient, rtol=1e-5, atol=1e-6, msg=name)
    other = gradients(dataclasses.replace(part, routes=None))
    name = "model.layers.0.mlp.experts.down_proj"
    assert not torch.allclose(other[name], plain[name], rtol=1e-2)


@pytest.mark.slow
@pytest.mark.parametrize("checkpointing", [False, True], ids=["kept", "checkpointed"])
def test_compiled_layers_use_the_same_routes(checkpointing: bool):
    part = astray_part()
    trainer = replaying(tiny_model(MIXTURE))
    compile_layers(trainer.policy.module, backend="aot_eager")
    if checkpointing:
        checkpoint_layers(trainer.policy.module)
    logprobs = trainer.policy.logprobs(part).logprobs
    np.testing.assert_allclose(logprobs.detach().numpy(), part.engine_logprobs, rtol=0, atol=1e-5)
    logprobs.sum().backward()
    for name, gradient in gradients(part).items():
        ours = trainer.policy.module.get_parameter(name).grad
        torch.testing.assert_close(ours, gradient, rtol=1e-4, atol=1e-5, msg=name)
    torch._dynamo.reset()


@pytest.mark.parametrize("checkpointing", [False, True], ids=["kept", "checkpointed"])
def test_experts_compute_in_half_precision_under_autocast(checkpointing: bool):
    part = astray_part()
    settings = {"compute_dtype": torch.bfloat16, "gradient_checkpointing": checkpointing}
    trainer = replaying(tiny_model(MIXTURE), **settings)
    seen: list[torch.dtype] = []
    experts = trainer.policy.module.model.layers[0].mlp.experts
    experts.act_fn.register_forward_pre_hook(lambda _, args: seen.append(args[0].dtype))
    logprobs = trainer.policy.logprobs(part).logprobs
    logprobs.sum().backward()
    assert set(seen) == {torch.bfloat16}
    assert np.abs(logprobs.detach().numpy() - part.engine_logprobs).mean() < 0.05
    exact = gradients(part)["model.layers.0.mlp.experts.down_proj"]
    ours = experts.down_proj.grad
    assert ours.dtype == torch.float32
    assert torch.nn.functional.cosine_similarity(ours.flatten(), exact.flatten(), dim=0) > 0.98


def test_routers_are_trained_although_routes_are_replayed():
    for name, gradient in gradients(astray_part()).items():
        assert gradient.abs().sum() > 0, name


def test_a_trainer_whose_router_has_changed_still_uses_the_recorded_experts():
    part = astray_part()
    model = tiny_model(MIXTURE)
    for layer in model.model.layers:
        torch.nn.init.normal_(layer.mlp.gate.weight)
    trainer = replaying(model)
    used: list[torch.Tensor] = []
    for layer in model.model.layers:
        layer.mlp.experts.register_forward_pre_hook(lambda _, args: used.append(args[1]))
    trainer.policy.logprobs(part)
    np.testing.assert_array_equal(torch.stack(used, 1).numpy(), part.routes)
    used.clear()
    trainer.policy.logprobs(dataclasses.replace(part, routes=None))
    assert (torch.stack(used, 1).numpy() != part.routes).mean() > 0.5


def test_a_step_with_replayed_routes_learns():
    requests = mixed_requests(num=1)
    batch = batch_of(rollouts_of(requests, finish_all(astray_engine(), requests)))
    trainer = replaying(tiny_model(MIXTURE))
    metrics = trainer.step(batch)
    assert metrics["mismatch/logprob"] < 1e-5
    assert metrics["routing/replayed_share"] == 1
    assert differences(trainer, batch).max() > 1e-4


@pytest.mark.gpu
@pytest.mark.parametrize("compiles", [False, True], ids=["plain", "compiled"])
def test_trainer_on_a_gpu_replays_the_routes_of_its_engine(compiles: bool):
    requests = mixed_requests()
    half = {"device": "cuda", "dtype": torch.bfloat16, "decode_steps": 4}
    engine = astray_engine(fast_layers=compiles, **half)
    batch = batch_of(rollouts_of(requests, finish_all(engine, requests)))
    trainer = replaying(
        tiny_model(MIXTURE).to("cuda"), compute_dtype=torch.bfloat16, compile_layers=compiles
    )
    replayed = differences(trainer, batch).mean()
    assert replayed < 0.1
    assert differences(trainer, without_routes(batch)).mean() > 5 * replayed
    assert trainer.step(batch)["routing/replayed_share"] == 1


@pytest.mark.gpu
@pytest.mark.parametrize("apply", ["merged", "unmerged"])
@pytest.mark.parametrize("compiles", [False, True], ids=["plain", "compiled"])
@pytest.mark.parametrize("rank", [4, 16])
def test_engine_and_trainer_on_a_gpu_agree_on_adapters_of_experts(rank, compiles, apply):
    torch._dynamo.reset()  # programs of other tests count towards its limit for one function
    lora = LoraConfig(rank=rank, apply=apply)
    model = tiny_model(MIXTURE).to("cuda", torch.bfloat16)
    adapter = TrainedAdapter(model, lora, model_path="tiny")
    torch.manual_seed(6)
    for weight in adapter.named_weights().values():
        weight.normal_(std=0.1)
    trainer = replaying(
        model, adapter=adapter, compute_dtype=torch.bfloat16, compile_layers=compiles
    )
    half = {"device": "cuda", "dtype": torch.bfloat16, "decode_steps": 4}
    engine = astray_engine(lora=lora, fast_layers=compiles, **half)
    for version in (1, 2):
        engine.swap(trainer.policy.weights(), version=version)
        requests = mixed_requests()
        batch = batch_of(rollouts_of(requests, finish_all(engine, requests)))
        replayed = differences(trainer, batch).mean()
        assert replayed < 0.1
        assert differences(trainer, without_routes(batch)).mean() > 3 * replayed
        metrics = trainer.step(batch)
        assert metrics["skipped/updates"] == 0
        assert metrics["moe/load_max"] >= 1
