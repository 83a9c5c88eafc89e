"""LoRA adapters at a vLLM server: the policy is an adapter, whose weights are replaced in place."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from architectures import tiny_model
from engine_rig import finish_all, make_request
from fake_vllm import serving
from probed import update_of

from millrace.config import EngineConfig, LoraConfig
from millrace.core.errors import ConfigError, EngineLost
from millrace.core.records import SwapProbe, WeightUpdate
from millrace.inference.backend import EngineSpec, VllmBackend
from millrace.inference.servers.engine import ServerEngine
from millrace.models.lora.trained import TrainedAdapter
from millrace.weights.probe import ProbeReference, check_probe, probe_request

LORA = LoraConfig(rank=4, alpha=8.0)


def attached(url: str, model_path: Path, **settings: Any) -> ServerEngine:
    spec = EngineSpec(
        config=EngineConfig(type="vllm"),
        device="cpu",
        model_path=str(model_path),
        version=0,
        **{"lora": LORA, **settings},
    )
    engine = VllmBackend(attach=[url]).load(spec)
    assert isinstance(engine, ServerEngine)
    return engine


def trained(
    model_path: Path, lora: LoraConfig = LORA
) -> tuple[TrainedAdapter, dict[str, torch.Tensor], ProbeReference]:
    """An adapter of a trainer, its weights after some step, and the reference of its probes."""
    model = tiny_model("qwen3")
    adapter = TrainedAdapter(model, lora, model_path=str(model_path))
    generator = torch.Generator().manual_seed(0)
    for weight in adapter.named_weights().values():
        weight.copy_(0.3 * torch.randn(weight.shape, generator=generator))
    return adapter, adapter.named_weights(), ProbeReference(model, lora=lora, dtype="float32")


def probe_of(update: WeightUpdate) -> SwapProbe:
    assert update.probe is not None
    return update.probe


@pytest.mark.parametrize("lora", [LORA, LoraConfig(rank=4, alpha=8.0, dora=True)])
def test_reference_of_an_adapter_is_that_of_the_merged_model(model_path: Path, lora: LoraConfig):
    adapter, factors, reference = trained(model_path, lora)
    merged = tiny_model("qwen3")
    merged.load_state_dict(adapter.merged_weights())
    expected = ProbeReference(merged)(dict(merged.named_parameters()))
    found, base = reference(factors), ProbeReference(tiny_model("qwen3"))
    np.testing.assert_allclose(found.logprobs, expected.logprobs, rtol=0, atol=1e-4)
    unchanged = base(dict(tiny_model("qwen3").named_parameters())).logprobs
    assert np.abs(np.array(found.logprobs) - unchanged).mean() > 0.1, "the adapter matters"


def test_adapter_is_replaced_in_place_while_a_request_is_in_progress(model_path: Path):
    _, factors, reference = trained(model_path)
    update = update_of(reference, factors)
    with serving(model_path) as (url, fake):
        attached(url, model_path).close()
        engine = attached(url, model_path)  # the adapter of the run before is there
        engine.add_request(make_request(temperature=0.0, max_new_tokens=60))
        while engine.stats().generated_tokens < 3:
            engine.step()
        engine.commit(engine.prepare(factors, version=1))
        (scored,) = engine.score([probe_request(probe_of(update))])
        check_probe(update, scored.logprobs)
        ((completion,),) = finish_all(engine).values()
        assert set(completion.versions.tolist()) == {0, 1}
        assert fake.adapter == "millrace-policy"
        engine.close()


def test_probe_finds_an_adapter_that_did_not_arrive(model_path: Path):
    _, factors, reference = trained(model_path)
    update = update_of(reference, factors)
    with serving(model_path, faults=["stale_adapter"]) as (url, _):
        engine = attached(url, model_path)
        engine.commit(engine.prepare(factors, version=1))
        (scored,) = engine.score([probe_request(probe_of(update))])
        with pytest.raises(EngineLost, match="the engine's weights are wrong"):
            check_probe(update, scored.logprobs)
        engine.close()


def test_engine_starts_with_the_adapter_of_a_checkpoint(model_path: Path, tmp_path: Path):
    adapter, factors, reference = trained(model_path)
    adapter.write(factors, tmp_path)
    update = update_of(reference, factors)
    with serving(model_path) as (url, _):
        engine = attached(url, model_path, adapter_path=tmp_path)
        (scored,) = engine.score([probe_request(probe_of(update))])
        check_probe(update, scored.logprobs)
        engine.close()


def test_adapter_that_vllm_cannot_apply_is_refused(model_path: Path):
    with pytest.raises(ConfigError, match=r"'vllm' cannot apply lora.dora = true; list the linear"):
        attached("http://127.0.0.1:9", model_path, lora=LoraConfig(dora=True))
