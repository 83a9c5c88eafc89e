"""Runs on servers that Millrace starts; here each is a fake (fake_vllm.py, fake_sglang.py)."""

import contextlib
import json
import re
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import fake_sglang
import psutil
import pytest
from digits import TASKS, share_of_digits
from fake_vllm import serving, write_python
from project import Command, make_project
from tiny_model import make_tiny_model

import millrace as mr
from millrace.core.errors import ConfigError, RunFailed
from millrace.monitoring.files.metrics import read_metrics

pytestmark = pytest.mark.slow


def train(
    model: Path,
    run_dir: Path,
    *,
    python: Path,
    steps: int,
    kind: str = "vllm",
    resume: bool = False,
    callbacks: Sequence[mr.Callback] = (),
    **settings,
) -> mr.RunResult:
    kv = "recompute" if kind == "sglang" else "keep"
    return mr.train(
        {
            "model": str(model),
            "run_dir": str(run_dir),
            "sampling": {"max_new_tokens": 24},
            "rollout": {"group_size": 4},
            "trainer": {"steps": steps, "groups_per_step": 4},
            "optimizer": {"learning_rate": 3e-3},
            "engine": {"type": kind, "kv": kv, "options": {"python": str(python)}},
            "cluster": {"threads": 1},
            "scoring": {"workers": 1},
            "monitoring": {"progress": "off"},
            **settings,
        },
        tasks=TASKS,
        scorers=[share_of_digits],
        callbacks=callbacks,
        resume=resume,
    )


def servers() -> list[psutil.Process]:
    children = psutil.Process().children(recursive=True)
    return [child for child in children if {"--uds", "--model-path"} & {*child.cmdline()}]


@pytest.mark.parametrize("sections", [{}, {"lora": {"rank": 4}}], ids=["weights", "adapter"])
@pytest.mark.parametrize(
    ("kind", "python"), [("vllm", write_python), ("sglang", fake_sglang.write_python)]
)
def test_killed_server_is_replaced(model, tmp_path, sections, kind, python):
    def kill() -> None:
        metrics = tmp_path / "run" / "metrics.jsonl"
        while not metrics.exists() or len(metrics.read_text().splitlines()) < 2:
            time.sleep(0.05)
        for server in servers():
            server.kill()

    killer = threading.Thread(target=kill, daemon=True)
    killer.start()
    train(model, tmp_path / "run", python=python(tmp_path), steps=8, kind=kind, **sections)
    killer.join()
    rows = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert [row["step"] for row in rows] == [*range(1, 9)]
    on_policy = [row["mismatch/logprob"] for row in rows if row["staleness/max"] == 0]
    assert max(on_policy) < 1e-4  # the first step is
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["restarts"]["engine-0"] >= 1
    assert servers() == []


@pytest.mark.parametrize("transport", ["disk", "collective"])
def test_servers_get_new_weights_over_any_transport(model, tmp_path, transport):
    """Each step is trained on samples of the version before it."""
    settings = {"weights": {"transport": transport}, "buffer": {"max_staleness": 0}}
    train(model, tmp_path / "run", python=write_python(tmp_path), steps=3, **settings)
    rows = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert [(row["step"], row["staleness/max"]) for row in rows] == [(1, 0), (2, 0), (3, 0)]
    assert max(row["mismatch/logprob"] for row in rows) < 1e-4
    assert servers() == []


def test_swaps_of_an_adapter_are_probed_with_several_ranks(model, tmp_path):
    settings = {
        "lora": {"rank": 4},
        "trainer": {"ranks": 2, "steps": 2, "groups_per_step": 4},
        "optimizer": {"learning_rate": 3e-2},
        "supervision": {"max_restarts": 0},  # of an engine that fails the probe
    }
    train(model, tmp_path / "run", python=write_python(tmp_path), steps=2, **settings)
    python = write_python(tmp_path, faults=["stale_adapter"])
    with pytest.raises(RunFailed, match="the engine's weights are wrong"):
        train(model, tmp_path / "stale", python=python, steps=2, **settings)


def test_run_on_torn_weights_ends_with_both_numbers(model, tmp_path):
    python = write_python(tmp_path, faults=["torn"])
    once = {"max_restarts": 0}
    with pytest.raises(RunFailed, match=r"-\d\.\d+ in this engine and -\d\.\d+ in the trainer"):
        train(model, tmp_path / "run", python=python, steps=4, supervision=once)
    assert servers() == []


@pytest.mark.parametrize(
    ("faults", "sections"), [(["torn"], {}), ([], {"lora": {"rank": 4}})], ids=["torn", "base"]
)
def test_attached_server_with_other_weights_is_refused_before_the_first_sample(
    model, tmp_path, faults, sections
):
    """It does not load those of the run: of an adapter's base, none are sent."""
    other = make_tiny_model(tmp_path / "other", seed=1)
    sentence = "engine-0: At the start, with version 0, a fixed passage"
    with serving(other, faults=faults) as (url, fake):
        sections["engine"] = {"type": "vllm", "options": {"attach": [url]}}
        with pytest.raises(ConfigError, match=sentence):
            train(model, tmp_path / "run", python=tmp_path, steps=1, **sections)
    assert fake.num_sampled <= 3  # by the checks


class StopAfter(mr.Callback):
    def __init__(self, step: int) -> None:
        self.step = step

    def on_step(self, metrics):
        if metrics["step"] == self.step:
            raise mr.StopTraining


def test_run_on_an_attached_server_resumes_after_a_stop_and_a_refused_start(model, tmp_path):
    run_dir, path = tmp_path / "run", "/update_weight_version"
    with serving(model) as (url, fake):
        attached = {"type": "vllm", "options": {"attach": [url]}}
        settings = {"python": tmp_path, "engine": attached, "buffer": {"max_staleness": 0}}
        fake.answers[path] = 500, "busy"
        with pytest.raises(ConfigError, match=f"{url} refused {path}: busy.*; start vLLM 0.32"):
            train(model, run_dir, steps=4, **settings)
        fake.answers.clear()
        stopped = train(model, run_dir, steps=4, callbacks=[StopAfter(2)], **settings)
        assert stopped.steps == 2
        fake.answers[path] = 500, "busy"
        with pytest.raises(ConfigError, match="busy"):
            train(model, run_dir, steps=4, resume=True, **settings)
        fake.answers.clear()
        train(model, run_dir, steps=4, resume=True, **settings)
    rows = read_metrics(run_dir / "metrics.jsonl")
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    assert max(row["mismatch/logprob"] for row in rows) < 1e-4


VLLM_0_24 = {
    "/update_weight_version": (404, '{"detail": "Not Found"}'),
    "/version": (200, '{"version": "0.24.0"}'),
}


@pytest.mark.parametrize(
    ("server", "sentence"),
    [
        (None, r"No vLLM server can be reached at .* \(Connection refused\); start"),
        ({"faults": ["wrong_model"]}, "serves another model than .*: its hidden_size is 64, not"),
        ({"api_key": "right"}, "wants a key, and has got none; set engine"),
        ({"answers": VLLM_0_24}, r"Not Found \(it is vLLM 0\.24\.0\); start vLLM 0\.32 or newer"),
    ],
)
def test_command_with_a_wrong_server_ends_with_one_sentence_and_leaves_no_process(
    tmp_path, server, sentence
):
    options = {"attach": ["http://127.0.0.1:9"]}
    engine = {"type": "vllm", "count": 1, "options": options}
    project = make_project(tmp_path, engine=engine)
    with contextlib.ExitStack() as stack:
        if server is not None:
            options["attach"] = [stack.enter_context(serving(project / "model", **server))[0]]
            make_project(tmp_path, engine=engine)
        run = Command("train", "run.toml", folder=project)
        code, _, stderr = run.finish()
    assert code == 2
    assert re.search(sentence, stderr)
    assert len(stderr.strip().splitlines()) == 1
    assert run.left() == []
