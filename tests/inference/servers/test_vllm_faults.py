"""What goes wrong at a vLLM server, and how the engine finds out."""

import json
from pathlib import Path

import pytest
import torch
from answers import answers_of, assert_has_form
from engine_rig import finish_all, make_request, weights
from fake_vllm import serving
from probed import probed_update

from millrace.config import EngineConfig
from millrace.core.errors import EngineLost, TaskError
from millrace.core.records import ScoreRequest
from millrace.inference.backend import EngineSpec, VllmBackend
from millrace.inference.servers.engine import ServerEngine
from millrace.weights.probe import check_probe, probe_request


def swapped(url: str, model_path: Path, **settings: str) -> ServerEngine:
    """An engine that has swapped to version 1."""
    config = EngineConfig(type="vllm", **settings)
    spec = EngineSpec(config=config, device="cpu", model_path=str(model_path), version=0)
    engine = VllmBackend(attach=[url]).load(spec)
    engine.commit(engine.prepare(weights(seed=1), version=1))
    assert isinstance(engine, ServerEngine)
    return engine


def test_fake_server_answers_as_a_real_one_did(model_path: Path):
    recorded = json.loads(Path(__file__).with_name("recorded.json").read_text())
    with serving(model_path) as (url, _):
        engine = swapped(url, model_path)
        for name, answer in answers_of(engine.client).items():
            assert_has_form(answer, recorded[name], where=name)
        engine.close()


def test_probe_passes_when_all_weights_arrive(model_path: Path):
    update = probed_update()
    with serving(model_path) as (url, _):
        engine = swapped(url, model_path)
        (scored,) = engine.score([probe_request(update.probe)])
        check_probe(update, scored.logprobs)
        engine.close()


@pytest.mark.parametrize("fault", ["torn", "stale_head"])
def test_probe_finds_weights_that_did_not_arrive(model_path: Path, fault: str):
    update = probed_update()
    with serving(model_path, faults=[fault]) as (url, _):
        engine = swapped(url, model_path)
        (scored,) = engine.score([probe_request(update.probe)])
        with pytest.raises(
            EngineLost, match=r"version 1, .* -\d.* in this engine and -\d.* in the tr"
        ):
            check_probe(update, scored.logprobs)
        engine.close()


def test_broken_stream_loses_the_engine(model_path: Path):
    with serving(model_path, faults=["broken_stream"]) as (url, _):
        engine = swapped(url, model_path)
        engine.add_request(make_request(temperature=0.0))
        with pytest.raises(EngineLost, match="broke off a completion: Internal server error"):
            finish_all(engine)
        engine.close()


def test_dead_server_loses_the_engine(model_path: Path):
    with serving(model_path) as (url, _):
        engine = swapped(url, model_path)
    with pytest.raises(EngineLost, match="did not answer /pause"):
        engine.pause()
    engine.close()


def test_running_requests_are_prefilled_again_only_if_kv_is_recomputed(model_path: Path):
    for kv in ("keep", "recompute"):
        with serving(model_path) as (url, fake):
            swapped(url, model_path, kv=kv).close()
            assert fake.cleared == [True, kv == "recompute"]  # at the start, and at the swap


def test_other_scores_than_logprobs_at_temperature_1_are_refused(model_path: Path):
    with serving(model_path) as (url, _):
        engine = swapped(url, model_path)
        tokens = torch.arange(4).int().numpy()
        request = ScoreRequest(tokens=tokens, positions=tokens[1:], temperature=0.5)
        with pytest.raises(TaskError, match="at temperature 1 only"):
            engine.score([request])
        engine.close()
