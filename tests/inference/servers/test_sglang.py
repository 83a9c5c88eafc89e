"""An SGLang server, here a fake one: versions, faults, the start, and what is refused."""

import json
from pathlib import Path
from typing import Any

import psutil
import pytest
from architectures import tiny_model
from engine_rig import Collected, finish_all, make_request, plain_logits, weights
from fake_sglang import FakeSglang, write_python
from fake_vllm import serving
from probed import probed_update

from millrace.config import EngineConfig, LoraConfig, load_config
from millrace.core.errors import ConfigError, EngineLost
from millrace.inference.backend import (
    EngineSpec,
    SglangBackend,
    check_servers,
    load_backend,
)
from millrace.inference.capabilities import check_capabilities
from millrace.inference.servers.engine import ServerEngine
from millrace.weights.probe import check_probe, probe_request


def load(model_path: Path, options: SglangBackend, **settings: Any) -> ServerEngine:
    config = EngineConfig(type="sglang", kv="recompute")
    spec = EngineSpec(
        config=config, device="cpu", model_path=str(model_path), version=0, **settings
    )
    engine = options.load(spec)
    assert isinstance(engine, ServerEngine)
    return engine


@pytest.mark.parametrize("faults", [[], ["cumulative"]])
def test_each_token_has_the_version_whose_weights_gave_its_logprob(
    model_path: Path, faults: list[str]
):
    """The server labels a chunk with the version that is served when it sends the chunk."""
    requests = [make_request(str(i), max_new_tokens=50) for i in range(3)]
    # Made before the server samples in its thread, which shares the random numbers.
    models = [tiny_model("qwen3", seed=seed) for seed in range(3)]
    collected = Collected()
    with serving(model_path, kind=FakeSglang, faults=faults) as (url, _):
        engine = load(model_path, SglangBackend(attach=[url]))
        for request in requests:
            engine.add_request(request)
        for version in (1, 2):
            num_generated = engine.stats().generated_tokens
            while engine.stats().generated_tokens < num_generated + 12:
                collected.add(engine.step())
            tensors = dict(models[version].named_parameters())
            engine.commit(engine.prepare(tensors, version=version))
        completions = finish_all(engine, collected=collected)
        engine.close()
    spans = set[int]()
    for request in requests:
        for completion in completions[request.id]:
            rows = [
                plain_logits(model, request.prompt, completion).log_softmax(-1) for model in models
            ]
            for position, token in enumerate(completion.tokens):
                expected = float(rows[completion.versions[position]][position, token])
                assert abs(completion.logprobs[position] - expected) < 1e-4
            spans.add(len(set(completion.versions.tolist())))
    assert max(spans) == 3


def test_abort_ends_only_the_request_whose_id_is_given(model_path: Path):
    with serving(model_path, kind=FakeSglang) as (url, _):
        engine = load(model_path, SglangBackend(attach=[url]))
        requests = [make_request(id, max_new_tokens=60, temperature=0.0) for id in ("a", "a.0.0")]
        for request in requests:  # at the server: "a.0.0/" and "a.0.0.0.1/"
            engine.add_request(request)
        while engine.stats().generated_tokens < 4:
            engine.step()
        (aborted,) = engine.abort(["a"])
        assert aborted.completions[0].finish == "abort"
        ((other,),) = finish_all(engine).values()
        assert other.finish in ("stop", "length")
        engine.close()


def test_probe_passes_when_all_weights_arrive(model_path: Path):
    update = probed_update()
    with serving(model_path, kind=FakeSglang) as (url, _):
        engine = load(model_path, SglangBackend(attach=[url]))
        engine.commit(engine.prepare(weights(seed=1), version=1))
        (scored,) = engine.score([probe_request(update.probe)])
        check_probe(update, scored.logprobs)
        engine.close()


@pytest.mark.parametrize("fault", ["torn", "stale_head"])
def test_probe_finds_weights_that_did_not_arrive(model_path: Path, fault: str):
    update = probed_update()
    with serving(model_path, kind=FakeSglang, faults=[fault]) as (url, _):
        engine = load(model_path, SglangBackend(attach=[url]))
        engine.commit(engine.prepare(weights(seed=1), version=1))
        (scored,) = engine.score([probe_request(update.probe)])
        with pytest.raises(EngineLost, match="version 1, "):
            check_probe(update, scored.logprobs)
        engine.close()


def test_broken_stream_loses_the_engine(model_path: Path):
    with serving(model_path, kind=FakeSglang, faults=["broken_stream"]) as (url, _):
        engine = load(model_path, SglangBackend(attach=[url]))
        engine.add_request(make_request(temperature=0.0))
        with pytest.raises(EngineLost, match="broke off a completion: Internal server error"):
            finish_all(engine)
        engine.close()


@pytest.mark.parametrize(
    ("fault", "sentence"),
    [
        ("wrong_model", r"serves another model than .*: its architectures is \['Other'\]"),
        ("auto_dtype", "its dtype is auto, not float32"),
        ("raw_logprobs", "does not apply the temperature .* SGLANG_RETURN_ORIGINAL_LOGPROB"),
        ("no_versions", "does not report the weight version"),
    ],
)
def test_wrong_server_is_refused(model_path: Path, fault: str, sentence: str):
    with (
        serving(model_path, kind=FakeSglang, faults=[fault]) as (url, _),
        pytest.raises(ConfigError, match=sentence),
    ):
        load(model_path, SglangBackend(attach=[url]))


@pytest.mark.parametrize(
    ("server", "sentence"),
    [
        ({"api_key": "right"}, "SGLang server at http.* wants a key, and has got none; set engine"),
        ({"answers": {"/model_info": (404, "")}}, "refused /model_info: .*; start SGLang of Augus"),
        ({"answers": {"/server_info": (200, "{}")}}, "answered /server_info with '{}', in another"),
        ({"answers": {"/generate": (200, "[]")}}, "does not take and return token ids"),
    ],
)
def test_server_that_answers_wrongly_at_the_start_is_refused(
    model_path: Path, server: dict[str, Any], sentence: str
):
    with (
        serving(model_path, kind=FakeSglang, **server) as (url, _),
        pytest.raises(ConfigError, match=sentence),
    ):
        load(model_path, SglangBackend(attach=[url]))


def test_server_without_lora_is_refused(model_path: Path):
    sentence = "cannot load the adapter .* --enable-lora --max-lora-rank 9 --lora-target-modules"
    with (
        serving(model_path, kind=FakeSglang, faults=["no_lora"]) as (url, _),
        pytest.raises(ConfigError, match=sentence),
    ):
        load(model_path, SglangBackend(attach=[url]), lora=LoraConfig(rank=9))


@pytest.mark.slow
def test_started_server_answers_only_with_its_key_and_dies_with_the_engine(
    model_path: Path, tmp_path: Path
):
    python = tmp_path / "environment"
    python.mkdir()
    options = SglangBackend(python=str(write_python(python)), arguments=["--mem-fraction", "0.5"])
    engine = load(model_path, options, lora=LoraConfig(rank=4, target_modules=("q_proj",)))
    children = psutil.Process().children(recursive=True)
    (server,) = [child for child in children if "--model-path" in child.cmdline()]
    words = server.cmdline()
    settings = Path(words[words.index("--config") + 1])
    key = json.loads(settings.read_text())["api-key"]
    assert (settings.stat().st_mode & 0o777, settings.parent.stat().st_mode & 0o777) == (
        0o600,
        0o700,
    )
    assert key not in " ".join(words)
    assert key not in "".join(server.environ().values())
    assert words[words.index("--lora-target-modules") + 1 :][:2] == ["q_proj", "--mem-fraction"]
    ((completion,),) = finish_all(engine, [make_request()]).values()
    assert set(completion.versions) == {0}
    engine.close()
    assert not server.is_running()
    assert not settings.exists()


def test_settings_that_need_what_sglang_lacks_are_refused():
    engine = {"type": "sglang", "kv": "recompute"}
    for more, sentence in (
        ({"sampling": {"top_p": 0.9}}, r"sampling\.top_p = 0\.9 needs kept ids"),
        ({"cluster": {"share_gpu": "sleep"}}, r"cluster\.share_gpu = 'sleep' needs"),
    ):
        config = load_config({"model": "m", "engine": engine, **more})
        with pytest.raises(ConfigError, match=sentence + ".* 'sglang' does not offer"):
            check_capabilities(config, load_backend(config.engine).capabilities, has_experts=False)
    with pytest.raises(ConfigError, match=r"engine\.kv = 'keep' is not possible with .*'sglang'"):
        check_servers(load_config({"model": "m", "engine": {"type": "sglang"}}))
    assert load_config({"model": "m", "engine": engine}).probes_weights
