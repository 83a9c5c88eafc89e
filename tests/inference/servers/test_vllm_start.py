"""A vLLM server that would give wrong numbers is refused in one sentence."""

import json
import re
import shutil
import threading
import time
from collections.abc import Sequence
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import psutil
import pytest
from aiohttp import web
from engine_rig import finish_all, make_request
from fake_vllm import FakeVllm, serving, write_python

from millrace.config import EngineConfig, LoraConfig, load_config
from millrace.core.errors import ConfigError, EngineLost
from millrace.inference.backend import (
    EngineSpec,
    VllmBackend,
    check_servers,
    load_backend,
    of_engine,
)
from millrace.inference.servers.client import Launch, ServerClient
from millrace.inference.servers.engine import ServerEngine
from millrace.inference.servers.process import server_environment
from millrace.inference.servers.sglang import SglangClient
from millrace.inference.servers.staging import weight_folder
from millrace.inference.servers.vllm import VllmClient


def load(model_path: Path, options: VllmBackend, **settings: Any) -> ServerEngine:
    config = EngineConfig(type="vllm", **settings)
    spec = EngineSpec(config=config, device="cpu", model_path=str(model_path), version=0)
    engine = options.load(spec)
    assert isinstance(engine, ServerEngine)
    return engine


@pytest.mark.parametrize(
    ("fault", "sentence"),
    [
        ("no_dev_mode", "cannot receive weights .* start it with VLLM_SERVER_DEV_MODE=1"),
        ("no_extension", "cannot receive weights .* start it with --worker-extension-cls"),
        ("wrong_model", "serves another model than .*: its hidden_size is 64, not 32"),
        ("raw_logprobs", "does not apply the temperature .* --logprobs-mode processed_logprobs"),
        ("no_versions", "does not report the weight version of each token"),
    ],
)
def test_wrong_server_is_refused(model_path: Path, fault: str, sentence: str):
    with (
        serving(model_path, faults=[fault]) as (url, _),
        pytest.raises(ConfigError, match=sentence) as refused,
    ):
        load(model_path, VllmBackend(attach=[url]))
    assert str(refused.value).count(". ") == 0


def test_server_with_a_shorter_context_is_refused(model_path: Path, tmp_path: Path):
    for file in model_path.iterdir():
        text = file.read_bytes().replace(b'_embeddings": 256', b'_embeddings": 512')
        (tmp_path / file.name).write_bytes(text)
    sentence = r"of 256 tokens, and engine\.max_context is 300"
    with serving(model_path) as (url, _), pytest.raises(ConfigError, match=sentence):
        load(tmp_path, VllmBackend(attach=[url]), max_context=300)


def test_unreachable_server_is_refused(model_path: Path):
    with pytest.raises(ConfigError, match=r"can be reached at .* \(Connection refused\); start"):
        load(model_path, VllmBackend(attach=["http://127.0.0.1:9"]))


@pytest.mark.parametrize(
    ("folder", "reason"), [("missing", "a web page"), (".", "the answer is not JSON")]
)
def test_server_of_another_kind_is_refused(
    model_path: Path, tmp_path: Path, folder: str, reason: str
):
    (tmp_path / "health").write_text("<html>")
    page = partial(SimpleHTTPRequestHandler, directory=str(tmp_path / folder))
    with ThreadingHTTPServer(("127.0.0.1", 0), page) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}"
        with pytest.raises(ConfigError, match="No vLLM server can be reached at") as refused:
            load(model_path, VllmBackend(attach=[url]))
        server.shutdown()
    assert f"({reason});" in str(refused.value)
    assert "\n" not in str(refused.value)


NOT_FOUND = 404, '{"detail": "Not Found"}'
EXTENSION = '{"results": [{"architectures": [], "logprobs_mode": "processed_logprobs"}]}'


@pytest.mark.parametrize(
    ("path", "answer", "sentence"),
    [
        ("/health", (500, "down"), r"No vLLM server can be reached at {url} \(down\); start it"),
        ("/v1/models", (500, "<html>"), "at {url} refused /v1/models: a web page .*; start vLLM"),
        ("/v1/models", NOT_FOUND, "at {url} refused /v1/models: Not Found .*; start vLLM"),
        ("/v1/models", (200, "hello"), "at {url} did not answer /v1/models: the answer is not JSO"),
        ("/v1/models", (200, '{"data": []}'), "{url} answered /v1/models with '{.*}', in another"),
        ("/v1/models", (200, '{"data": [{}]}'), "{url} answered /v1/models with '{.*}', in an"),
        ("/collective_rpc", (200, "{}"), "at {url} answered /collective_rpc with '{}', in another"),
        ("/collective_rpc", (200, EXTENSION), "at {url} answered /collective_rpc with .*, in an"),
        ("/pause", NOT_FOUND, "at {url} refused /pause: Not Found .*; start vLLM 0.32 or newer"),
        ("/resume", (500, "no"), "at {url} refused /resume: no .*; start vLLM"),
        (
            "/inference/v1/generate",
            NOT_FOUND,
            r"ids with logprobs \(.* {url} refused .*--enable-sc",
        ),
        ("/inference/v1/generate", (200, "{}"), r"ids with logprobs \(.*, in another form\) "),
    ],
)
def test_server_that_answers_wrongly_at_the_start_is_refused_with_its_answer(
    model_path: Path, path: str, answer: tuple[int, str], sentence: str
):
    with (
        serving(model_path, answers={path: answer}) as (url, _),
        pytest.raises(ConfigError) as error,
    ):
        load(model_path, VllmBackend(attach=[url]))
    assert re.search(sentence.replace("{url}", url), str(error.value))
    assert "\n" not in str(error.value)


RAW = {"architectures": [], "dtype": "float32", "sizes": {}, "logprobs_mode": "raw_logprobs"}
LIKELY = [{"token_id": 1, "logprob": 0.0}, {"token_id": 2, "logprob": -0.1}]
CHOICE = {"logprobs": {"content": [{"top_logprobs": LIKELY}]}, "weight_versions": [{}]}


@pytest.mark.parametrize(
    ("path", "answer", "sentence"),
    [
        ("/collective_rpc", {"results": [RAW]}, "reports raw_logprobs, .*; start it with --logp"),
        ("/inference/v1/generate", {"choices": [CHOICE]}, r"add up to 1\.9; start it with --logp"),
    ],
)
def test_server_with_logprobs_of_another_distribution_is_refused(
    model_path: Path, path: str, answer: Any, sentence: str
):
    with (
        serving(model_path, answers={path: (200, json.dumps(answer))}) as (url, _),
        pytest.raises(ConfigError, match=sentence),
    ):
        load(model_path, VllmBackend(attach=[url]))


def test_server_that_ends_at_its_start_is_refused(model_path: Path, tmp_path: Path):
    """As one that does not know an argument."""
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\nif [ $1 = -c ]; then exit; fi\nexit 2\n")
    python.chmod(0o700)
    with pytest.raises(ConfigError, match=r"before it served; .* or install vLLM 0\.32 or newer"):
        load(model_path, VllmBackend(python=str(python)))


@pytest.mark.slow
def test_started_server_has_a_private_socket_and_its_death_loses_the_engine(
    model_path: Path, tmp_path: Path
):
    engine = load(model_path, VllmBackend(python=str(write_python(tmp_path))))
    children = psutil.Process().children(recursive=True)
    (server,) = [child for child in children if "--uds" in child.cmdline()]
    words = server.cmdline()
    socket = Path(words[words.index("--uds") + 1])
    assert socket.is_socket()
    assert socket.parent.stat().st_mode & 0o777 == 0o700
    server.kill()
    assert engine.server is not None
    while engine.server.end is None:
        time.sleep(0.01)
    with pytest.raises(EngineLost, match=r"The vLLM server .*SIGKILL"):
        engine.stats()
    engine.close()
    assert not socket.parent.exists()


def test_server_of_an_old_version_is_refused_with_versions_that_work(model_path: Path):
    answers = {"/update_weight_version": NOT_FOUND, "/version": (200, '{"version": "0.24.0"}')}
    with serving(model_path, answers=answers) as (url, fake):
        sentence = r"/update_weight_version: Not Found \(it is vLLM 0\.24\.0\); start vLLM 0\.32 or"
        with pytest.raises(ConfigError, match=sentence) as refused:
            load(model_path, VllmBackend(attach=[url]))
        assert "pip install 'vllm>=0.32'" in str(refused.value)
        assert url in str(refused.value)
        assert fake.calls.count("/pause") == fake.calls.count("/resume") == 1


def test_server_that_cannot_read_the_weights_is_refused(model_path: Path):
    class WithoutFolder(FakeVllm):
        def _load(self, folder: Path) -> None:
            raise web.HTTPInternalServerError(text=f"{folder} is not there")

    sentence = "cannot load the weights in '.*' .*is not there.*; give it that folder under the sa"
    with serving(model_path, kind=WithoutFolder) as (url, fake):
        with pytest.raises(ConfigError, match=sentence):
            load(model_path, VllmBackend(attach=[url]))
        assert fake.calls[-1] == "/resume"


@pytest.mark.parametrize("path", ["/update_weight_version", "/inference/v1/generate"])
def test_server_serves_after_a_start_that_was_refused(model_path: Path, path: str):
    with serving(model_path, answers={path: (500, "busy")}) as (url, fake):
        with pytest.raises(ConfigError, match="busy"):
            load(model_path, VllmBackend(attach=[url]))
        fake.answers.clear()
        engine = load(model_path, VllmBackend(attach=[url]))
        ((completion,),) = finish_all(engine, [make_request()]).values()
        assert set(completion.versions) == {0}
        engine.close()


def test_server_is_not_left_paused_by_an_engine_that_ends(model_path: Path):
    with serving(model_path) as (url, fake):
        engine = load(model_path, VllmBackend(attach=[url]))
        engine.pause()
        engine.close()
        assert [path for path in fake.calls if path in ("/pause", "/resume")][-1] == "/resume"


def test_server_with_a_key_needs_that_key(model_path: Path, monkeypatch: pytest.MonkeyPatch):
    with serving(model_path, api_key="right") as (url, _):
        with pytest.raises(ConfigError, match=r"wants a key, and has got none; .* 'env:NAME'"):
            load(model_path, VllmBackend(attach=[url]))
        options = VllmBackend(attach=[url], api_key="env:SERVER_KEY")
        with pytest.raises(
            ConfigError, match="environment variable 'SERVER_KEY', which is not set"
        ):
            load(model_path, options)
        monkeypatch.setenv("SERVER_KEY", "wrong")
        with pytest.raises(ConfigError, match=r"wants a key, and refuses that of engine"):
            load(model_path, options)
        monkeypatch.setenv("SERVER_KEY", "right")
        load(model_path, options).close()


def test_attached_server_gets_the_weights_of_a_model_on_the_hub(
    model_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Its cache, as the hub's own package fills it."""
    snapshot = tmp_path / "hub" / "models--org--name" / "snapshots" / ("0" * 40)
    shutil.copytree(model_path, snapshot)
    (snapshot.parents[1] / "refs").mkdir()
    (snapshot.parents[1] / "refs" / "main").write_text("0" * 40)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert weight_folder("org/name") == str(snapshot)
    with pytest.raises(ConfigError, match="weights of 'org/other' cannot be passed to the server"):
        weight_folder("org/other")


def test_server_without_lora_is_refused(model_path: Path):
    sentence = r"cannot load the adapter .* --enable-lora --max-loras 1 --max-lora-rank 16\."
    spec = EngineSpec(
        config=EngineConfig(type="vllm"),
        device="cpu",
        model_path=str(model_path),
        version=0,
        lora=LoraConfig(rank=9),
    )
    with (
        serving(model_path, faults=["no_lora"]) as (url, _),
        pytest.raises(ConfigError, match=sentence),
    ):
        VllmBackend(attach=[url]).load(spec)


def test_attached_server_gets_the_weights_of_the_run(model_path: Path):
    with serving(model_path) as (url, fake):
        load(model_path, VllmBackend(attach=[url])).close()
        loading = fake.calls.index("/collective_rpc")
        assert fake.calls[loading:].count("/pause") == fake.calls[loading:].count("/resume") == 1


@pytest.mark.parametrize(
    ("python", "sentence"),
    [("no/such/python", "cannot be run: No such file"), ("/bin/false", "has no vLLM; install it")],
)
def test_python_without_vllm_is_refused(model_path: Path, python: str, sentence: str):
    with pytest.raises(ConfigError, match=sentence):
        load(model_path, VllmBackend(python=python))


@pytest.mark.parametrize(
    ("engine", "sentence"),
    [
        ({"tp": 2}, "the embedded engine computes on one GPU"),
        (
            {"type": "vllm", "options": {"attach": ["http://a"], "python": "python"}},
            "python and arguments are of servers that Millrace starts",
        ),
        ({"type": "vllm", "options": {"api_key": "hunter2", "attach": ["http://a"]}}, "env:NAME"),
    ],
)
def test_settings_that_do_not_fit_are_refused(engine: dict[str, Any], sentence: str):
    with pytest.raises(ConfigError, match=sentence):
        load_backend(EngineConfig(**engine))


def test_merged_adapters_are_refused():
    config = {"model": "m", "engine": {"type": "vllm"}, "lora": {"apply": "merged"}}
    with pytest.raises(ConfigError, match=r"lora\.apply = 'merged' is not possible with engine"):
        check_servers(load_config(config))


def test_gpu_memory_as_a_transport_to_servers_is_refused():
    config = {"model": "m", "engine": {"type": "vllm"}, "weights": {"transport": "ipc"}}
    with pytest.raises(ConfigError, match=r"weights\.transport = 'ipc' is not possible with"):
        check_servers(load_config(config))


def test_each_engine_has_a_server_to_attach_to():
    servers = {"type": "vllm", "count": 2, "options": {"attach": ["http://a", "http://b"]}}
    config = load_config({"model": "m", "engine": servers})
    check_servers(config)
    assert of_engine(config.engine, 1).options["attach"] == ["http://b"]
    with pytest.raises(ConfigError, match="has 2 servers, and the run has 3 engines"):
        check_servers(load_config({"model": "m", "engine": servers, "evaluate": {"engines": 1}}))
    with pytest.raises(ConfigError, match=r"engine\.max_count = 3 adds engines, and engine"):
        check_servers(load_config({"model": "m", "engine": {**servers, "max_count": 3}}))
    with pytest.raises(ConfigError, match=r"Each of the 2 servers .* has an engine already"):
        of_engine(config.engine, 2)


def test_server_that_is_listed_twice_is_refused_by_its_address():
    def check(engine: list[str], judge: list[str]):
        table: dict[str, Any] = {
            "model": "m",
            "engine": {"type": "vllm", "count": len(engine), "options": {"attach": engine}},
            "environment": {
                "function": "m:f",
                "models": {"judge": {"path": "j", "type": "vllm", "options": {"attach": judge}}},
            },
        }
        check_servers(load_config(table))

    check(["http://a", "http://b"], ["http://c"])
    with pytest.raises(ConfigError, match=r"engine\.options\.attach lists 'http://a' twice, but"):
        check(["http://a", "http://a/"], ["http://c"])
    with pytest.raises(
        ConfigError,
        match=r"judge\.options\.attach lists 'http://a', and so does engine\.options\.at",
    ):
        check(["http://a"], ["http://a"])


def launch_of_two_gpus(folder: Path, *, devices: Sequence[str], **options: Any) -> Launch:
    """What a server of engine.tp = 2 is started with."""
    config = EngineConfig(type="vllm", tp=2)
    return Launch(
        spec=EngineSpec(config=config, model_path="m", version=0, devices=tuple(devices)),
        options=VllmBackend(**options),
        folder=folder,
        dtype="bfloat16",
        device=devices[0],
        max_context=64,
        lora_layers=(),
        threads=1,
    )


@pytest.mark.parametrize(
    ("devices", "visible", "seen"),
    [
        (("cuda:0", "cuda:2"), None, "0,2"),
        (("cuda:3", "cuda:1"), "GPU-a,GPU-b,GPU-c,GPU-d", "GPU-d,GPU-b"),
        (("auto", "auto"), "4,6,7", "4,6"),  # as on a host that joins
        (("cuda",), None, "0,1"),
    ],
)
def test_server_sees_the_gpus_of_its_engine_and_no_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, devices, visible, seen
):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    env = server_environment(launch_of_two_gpus(tmp_path, devices=devices))
    assert env["CUDA_VISIBLE_DEVICES"] == seen


@pytest.mark.parametrize(
    ("client", "option"),
    [(VllmClient, "--tensor-parallel-size"), (SglangClient, "--tp-size")],
)
def test_started_server_is_told_to_use_all_gpus_of_its_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, client: type[ServerClient], option: str
):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    python, words = tmp_path / "python", tmp_path / "words"
    python.write_text(
        f'#!/bin/sh\nif [ $1 = -c ]; then exit; fi\necho $CUDA_VISIBLE_DEVICES "$@" > {words}\n'
    )
    python.chmod(0o700)
    launch = launch_of_two_gpus(tmp_path, devices=("cuda:2", "cuda:3"), python=str(python))
    connection, server = client.launch(launch)
    while server.end is None:
        time.sleep(0.01)
    connection.close()
    visible, *arguments = words.read_text().split()
    assert visible == "2,3"
    assert arguments[arguments.index(option) + 1] == "2"
