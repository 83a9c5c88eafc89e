"""Adapters that are merged into the weights of an engine."""

from pathlib import Path

import pytest
import torch
from architectures import tiny_model
from engine_rig import (
    assert_same,
    assert_sampled_from,
    finish_all,
    make_engine,
    make_request,
    plain_logits,
    save_model,
    weights,
)

from millrace.config import EngineConfig, LoraConfig
from millrace.core.errors import ConfigError, WeightError
from millrace.inference.backend import EngineSpec
from millrace.inference.embedded.build import build_engine
from millrace.inference.embedded.engine import EmbeddedEngine
from millrace.models.lora.trained import TrainedAdapter
from millrace.weights.transport import make_receiver, make_sender

LORA = LoraConfig(rank=4, alpha=8.0)


def adapter_for(engine: EmbeddedEngine, *, seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = engine.parameter_shapes()
    return {name: 0.3 * torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def zero_for(engine: EmbeddedEngine) -> dict[str, torch.Tensor]:
    """As a new adapter is: B is zero, A is not."""
    adapter = adapter_for(engine, seed=0)
    return {name: t.zero_() if ".lora_B." in name else t for name, t in adapter.items()}


@pytest.mark.parametrize("decode_steps", [1, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_zero_adapter_restores_base_model_exactly_after_50_swaps(decode_steps, dtype):
    engine = make_engine(lora=LORA, decode_steps=decode_steps, dtype=dtype)
    base = {name: p.clone() for name, p in engine._weights._parameters.items()}
    expected = finish_all(engine, [make_request()])["r"][0]
    for version in range(1, 50):
        engine.swap(adapter_for(engine, seed=version), version=version)
    changed = {
        name for name, p in engine._weights._parameters.items() if not torch.equal(p, base[name])
    }
    assert changed == {name for name in base if name.endswith("_proj.weight")}
    engine.swap(zero_for(engine), version=50)
    for name, parameter in engine._weights._parameters.items():
        assert torch.equal(parameter, base[name]), name
    completion = finish_all(engine, [make_request()])["r"][0]
    assert_same(completion, expected)
    assert set(completion.versions) == {50}


def test_an_adapter_of_layers_with_a_state_is_merged_and_cannot_be_applied_beside_them():
    engine = make_engine("qwen3_next", lora=LORA, eos_ids=())
    tensors = adapter_for(engine, seed=1)
    engine.swap(tensors, version=1)
    request = make_request(n=2)
    done = finish_all(engine, [request])["r"]
    model = tiny_model("qwen3_next")
    adapter = TrainedAdapter(model, LORA, model_path="tiny")
    for name, weight in adapter.named_weights().items():
        weight.copy_(tensors[name])
    for completion in done:
        logits = plain_logits(model, request.prompt, completion)
        assert_sampled_from(logits, completion, request.sampling, tolerance=1e-4)
    with pytest.raises(ConfigError, match=r"'model\.layers\.0\.linear_attn\..*apply to 'merged'"):
        make_engine("qwen3_next", lora=LORA.model_copy(update={"apply": "unmerged"}))


def test_swap_writes_in_place():
    engine = make_engine(lora=LORA, decode_steps=4)
    places = {name: p.data_ptr() for name, p in engine._weights._parameters.items()}
    engine.swap(adapter_for(engine, seed=1), version=1)
    assert {name: p.data_ptr() for name, p in engine._weights._parameters.items()} == places


A_TENSOR = "model.layers.1.mlp.up_proj.lora_A.weight"


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (lambda tensors: tensors.pop(A_TENSOR), f"lacks '{A_TENSOR}'"),
        (
            lambda tensors: tensors.update({A_TENSOR: torch.zeros(8, 32)}),
            rf"'{A_TENSOR}' as \(8, 32\); the model's is \(4, 32\)",
        ),
        (
            lambda tensors: tensors.update({"lm_head.lora_A.weight": torch.zeros(4, 32)}),
            r"has 'lm_head\.lora_A\.weight'",
        ),
    ],
    ids=["missing", "another rank", "unknown"],
)
def test_adapter_that_does_not_fit_is_refused_without_changes(spoil, reason):
    engine = make_engine(lora=LORA)
    base = {name: p.clone() for name, p in engine._weights._parameters.items()}
    adapter = adapter_for(engine, seed=1)
    spoil(adapter)
    with pytest.raises(WeightError, match=reason):
        engine.swap(adapter, version=1)
    assert engine.version == 0
    assert all(torch.equal(p, base[name]) for name, p in engine._weights._parameters.items())


def test_engine_refuses_updates_of_the_other_kind():
    adapted, plain = make_engine(lora=LORA), make_engine()
    with pytest.raises(WeightError, match=r"lacks 'model\.layers\.0\.mlp\.down_proj"):
        adapted.swap(weights(seed=1), version=1)
    with pytest.raises(WeightError, match="Version 1 lacks"):
        plain.swap(adapter_for(adapted, seed=1), version=1)
    assert (adapted.version, plain.version) == (0, 0)


def test_engine_with_half_merged_adapter_serves_nothing_until_next_version():
    engine = make_engine(lora=LORA)
    engine.add_request(make_request())
    engine.step()
    prepared = engine.prepare(adapter_for(engine, seed=1), version=1)
    live, new = prepared.pairs[-1]
    prepared.pairs[-1] = live, new.to("meta")  # has no data to copy
    with pytest.raises(WeightError, match="serves nothing until a complete version"):
        engine.commit(prepared)
    assert engine.version is None
    assert not engine.has_work
    engine.swap(adapter_for(engine, seed=2), version=2)
    undisturbed = make_engine(lora=LORA)
    undisturbed.swap(adapter_for(engine, seed=2), version=2)
    for name, parameter in undisturbed._weights._parameters.items():
        assert torch.equal(engine._weights._parameters[name], parameter), name
    (completion,) = finish_all(engine)["r"]
    assert completion.versions.tolist() == [0] + [2] * (len(completion.versions) - 1)


def test_only_adapter_tensors_are_sent_and_other_manifests_are_refused():
    engine = make_engine(lora=LORA, dtype=torch.bfloat16)
    adapter = adapter_for(engine, seed=1)
    sender = make_sender("shm", dtype=torch.float32)
    receiver = make_receiver("shm", expected=engine.parameter_shapes(), dtype=torch.float32)
    try:
        update = sender.publish(1, adapter)
        own = 4 * sum(tensor.numel() for tensor in adapter.values())
        assert own <= update.num_bytes <= own + 64 * len(adapter)
        engine.swap(receiver.stage(update), version=1)
        assert engine.version == 1
        wrong = sender.publish(2, {**adapter, A_TENSOR: torch.zeros(8, 32)})
        with pytest.raises(WeightError, match=rf"'{A_TENSOR}' as \(8, 32\)"):
            receiver.stage(wrong)
    finally:
        receiver.close()
        sender.close()


def test_engine_started_with_saved_adapter_equals_swapped_engine(tmp_path: Path):
    save_model(tmp_path / "model")
    adapter = TrainedAdapter(tiny_model("qwen3"), LORA, model_path="tiny")
    for weight in adapter.named_weights().values():
        weight.normal_(std=0.3)
    (tmp_path / "step_7").mkdir()
    adapter.write(adapter.named_weights(), tmp_path / "step_7")
    started = build_engine(
        EngineSpec(
            model_path=str(tmp_path / "model"),
            config=EngineConfig(max_context=128, max_sequences=4),
            device="cpu",
            version=7,
            lora=LORA,
            adapter_path=tmp_path / "step_7",
        )
    )
    swapped = make_engine(lora=LORA)
    swapped.swap(adapter.named_weights(), version=7)
    assert started.version == 7
    for name, parameter in swapped._weights._parameters.items():
        assert torch.equal(started._weights._parameters[name], parameter), name


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_captured_graphs_decode_with_merged_adapter(dtype):
    """Rounds on CUDA graphs against single steps, each under the same three versions."""
    engines = [
        make_engine(lora=LORA, device="cuda", dtype=dtype, decode_steps=steps, eos_ids=())
        for steps in (1, 8)
    ]
    for version in (1, 2, 3):
        done = []
        for engine in engines:
            engine.swap(adapter_for(engine, seed=version), version=version)
            done.append(finish_all(engine, [make_request(temperature=0.0)])["r"][0])
        logprobs = [torch.from_numpy(completion.logprobs[:1].copy()) for completion in done]
        tolerance = 1e-4 if dtype is torch.float32 else 5e-2
        torch.testing.assert_close(logprobs[0], logprobs[1], rtol=0, atol=tolerance)
    merged = [{n: p.clone() for n, p in engine._weights._parameters.items()} for engine in engines]
    assert all(torch.equal(merged[0][name], merged[1][name]) for name in merged[0])
