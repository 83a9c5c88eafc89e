"""What goes wrong at a vLLM server, and how the engine finds out."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from answers import answers_of, assert_has_form
from engine_rig import finish_all, make_request, weights
from fake_vllm import FakeVllm, serving
from full_disk import files_of_at_most
from probed import probed_update

from millrace.config import EngineConfig
from millrace.core.errors import EngineLost, TaskError, WeightError
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


def test_a_stream_that_ends_before_its_completion_loses_the_engine(model_path: Path):
    with serving(model_path, faults=["short_stream"]) as (url, _):
        engine = swapped(url, model_path)
        engine.add_request(make_request(temperature=0.0))
        with pytest.raises(EngineLost, match="broke off a completion: the stream ended before"):
            finish_all(engine, max_steps=100)
        engine.close()


class WithoutLogprobs(FakeVllm):
    def shown(self, choice: dict[str, Any]) -> dict[str, Any]:
        return {**choice, "logprobs": None}


class WithWrongSpans(FakeVllm):
    def shown(self, choice: dict[str, Any]) -> dict[str, Any]:
        spans = choice["weight_versions"] and [{"version": "1", "start": 0, "end": 99}]
        return {**choice, "weight_versions": spans}


class EndingByItself(FakeVllm):
    def shown(self, choice: dict[str, Any]) -> dict[str, Any]:
        return {**choice, "finish_reason": choice["finish_reason"] and "abort"}


@pytest.mark.parametrize(
    ("kind", "sentence"),
    [
        (WithoutLogprobs, r"server at http://.* sent tokens without logprobs\."),
        (WithWrongSpans, r"server at http://.* reports versions \[\(0, 99, 1\)\] of \d+ tokens\."),
        (EndingByItself, r"server at http://.* ended a request by itself: 'abort'\."),
    ],
)
def test_damaged_completion_loses_the_engine(model_path: Path, kind: type[FakeVllm], sentence: str):
    with serving(model_path, kind=kind) as (url, _):
        engine = swapped(url, model_path)
        engine.add_request(make_request(temperature=0.0))
        with pytest.raises(EngineLost, match=sentence):
            finish_all(engine)
        engine.close()


def test_refused_request_loses_the_engine(model_path: Path):
    with serving(model_path) as (url, fake):
        engine = swapped(url, model_path)
        fake.answers["/inference/v1/generate"] = 400, '{"error": {"message": "too long"}}'
        engine.add_request(make_request(temperature=0.0))
        with pytest.raises(EngineLost, match="broke off a completion: too long"):
            finish_all(engine)
        engine.close()


def test_refused_pause_names_the_server_and_its_answer(model_path: Path):
    with serving(model_path) as (url, fake):
        engine = swapped(url, model_path)
        fake.answers["/pause"] = 503, "overloaded"
        with pytest.raises(EngineLost, match=f"server at {url} refused /pause: overloaded"):
            engine.pause()
        engine.close()


def test_prompt_that_is_scored_without_logprobs_loses_the_engine(model_path: Path):
    class Unscored(FakeVllm):
        def _score(self, tokens: Sequence[int]) -> list[dict[str, Any] | None]:
            return [None, {}]

    with serving(model_path, kind=Unscored) as (url, _):
        engine = swapped(url, model_path)
        with pytest.raises(EngineLost, match="scored a prompt without its logprobs"):
            engine.score([probe_request(probed_update().probe)])
        engine.close()


def test_dead_server_loses_the_engine(model_path: Path):
    with serving(model_path) as (url, _):
        engine = swapped(url, model_path)
    with pytest.raises(EngineLost, match="did not answer /pause"):
        engine.pause()
    engine.close()


def test_version_that_does_not_fit_on_the_disk_is_refused_and_the_server_keeps_its_own(
    model_path: Path,
):
    with serving(model_path) as (url, _):
        engine = swapped(url, model_path)
        with (
            files_of_at_most(4096),
            pytest.raises(
                WeightError, match=r"Version 2 cannot be written to .*set engine\.options"
            ),
        ):
            engine.prepare(weights(seed=2), version=2)
        assert engine.version == 1
        ((completion,),) = finish_all(engine, [make_request()]).values()
        assert set(completion.versions) == {1}
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
