"""Plans: sizes of models, fits, errors, the files of a plan, and the report after its run."""

import json
import os
import time
import tomllib
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import tomli_w
from planned_models import QWEN_2B, QWEN_8B, QWEN_30B, planned

from millrace.cli.launch.plan import plan_launch
from millrace.cli.main import main
from millrace.compare.runs import PeakMemory
from millrace.config import load_config
from millrace.core.errors import ConfigError
from millrace.core.spans import Span
from millrace.monitoring.files.trace import TraceWriter
from millrace.plan.command import _merged, compared
from millrace.plan.controller_load import controller_busy
from millrace.plan.lengths import Lengths
from millrace.plan.memory import fitting
from millrace.plan.model_costs import GPUS, ModelShape, gpu_named
from millrace.plan.planned_run import Split
from millrace.plan.search import _limits, search
from millrace.run.checks import check_settings


@pytest.mark.parametrize(
    ("config", "billions"), [(QWEN_8B, 8.19), (QWEN_2B, 1.72), (QWEN_30B, 30.53)]
)
def test_the_number_of_weights_is_that_of_the_published_model(config, billions):
    assert ModelShape.of_config(config).num_weights / 1e9 == pytest.approx(billions, rel=0.002)


def test_a_model_without_a_size_is_one_sentence():
    without = {key: value for key, value in QWEN_30B.items() if "intermediate_size" not in key}
    with pytest.raises(ConfigError, match="a/model has no 'intermediate_size'; a plan cannot tell"):
        ModelShape.of_config(without, path="a/model")


def test_every_gpu_has_a_source():
    assert all(gpu.source and min(gpu.memory_gb, gpu.tflops) > 0 for gpu in GPUS.values())
    with pytest.raises(ConfigError, match="did you mean 'h100'"):
        gpu_named("h10")


def test_a_plan_uses_all_gpus_and_fits():
    run = planned(QWEN_2B, 8, "h100", trainer={"groups_per_step": 4})
    split, prediction = search(run, max_staleness=2)
    assert split.engines + split.ranks == 8
    assert max(split.engine_bytes, split.trainer_bytes) <= run.memory_bytes
    assert prediction.staleness_max <= split.max_staleness <= 2


def test_a_smaller_copy_of_a_large_run_is_as_fast():
    run = planned(QWEN_2B, 1024, "h100", trainer={"groups_per_step": 32})
    run = replace(run, lengths=Lengths(groups=(np.array([[60]]),)))
    *_, split = (Split(**s, groups_per_step=32, max_staleness=1) for s in fitting(run))
    whole, copied = (run.predict(split, num_groups=n) for n in (32, 8))
    assert copied.issued_groups == whole.issued_groups / 4
    for key in ("samples_per_s", "tokens_per_s", "staleness_mean"):
        assert getattr(copied, key) == pytest.approx(getattr(whole, key), rel=0.01)


@pytest.mark.parametrize("num_gpus", [8, 9, 12, 20, 32, 48, 128])
@pytest.mark.parametrize("engine_type", ["embedded", "vllm"])
def test_every_split_can_be_launched(tmp_path, num_gpus, engine_type):
    """On hosts with 8 GPUs each, of which none has more workers than GPUs."""
    lora = {"apply": "unmerged"}  # no GPU of this kind holds the weights three times
    run = planned(QWEN_30B, num_gpus, "h100", engine={"type": engine_type}, lora=lora)
    num_nodes = -(-num_gpus // 8)
    splits = [Split(**split, groups_per_step=4, max_staleness=1) for split in fitting(run)]
    assert max(split.ranks for split in splits) >= num_gpus // 2
    for split in splits:
        file = tmp_path / "run.plan.toml"
        file.write_text(tomli_w.dumps({"model": "m", **run.settings(split)}))
        plan = plan_launch(file, num_nodes=num_nodes, gpus=["8"], settings={})
        assert 1 + sum(nodes.num_nodes for nodes in plan.joining) == num_nodes
        here = plan.config.trainer.num_ranks - plan.config.trainer.remote
        assert here + plan.config.engine.num_local * split.tp <= 8
        for nodes in plan.joining:
            assert nodes.num_workers * (split.tp if nodes.role == "engines" else 1) <= 8
        assert split.ranks + split.engines * split.tp <= num_gpus


@pytest.mark.parametrize(
    ("num_gpus", "settings"),
    [
        (2, {"trainer": {"mesh": {"tp": 2}}}),
        (8, {"placement": {"trainer": ["cuda:0"], "engines": ["cuda:1", "cuda:2"]}}),
        (8, {"fidelity": {"mode": "exact"}}),
        (8, {"weights": {"interrupt": "barrier"}, "buffer": {"max_staleness": 0}}),
        (8, {"engine": {"max_count": 3, "options": {"decode_steps": 8}}}),
        (16, {}),
    ],
)
def test_the_settings_of_a_plan_pass_the_checks_of_a_run(num_gpus, settings):
    given = {"trainer": {}, "rollout": {"group_size": 2}, **settings}
    given["trainer"] = {"groups_per_step": 2, **given["trainer"]}
    run = planned(QWEN_2B, num_gpus, "h100", **given)
    split, _ = search(run, max_staleness=1)
    written = tomli_w.dumps({"model": "m", **_merged(given, run.settings(split))})
    config = load_config(tomllib.loads(written))
    check_settings(config)
    assert config.engine.options.get("decode_steps") in (None, 8)


@pytest.mark.parametrize(
    ("settings", "most", "limits"),
    [
        ({}, None, [1, 2, 4, 8]),
        ({}, 3, [1, 2, 3]),
        ({"buffer": {"max_staleness": 6}}, None, [1, 2, 4, 6]),
        ({"buffer": {"max_staleness": 6}}, 12, [1, 2, 4, 8, 12]),
        ({"weights": {"interrupt": "barrier"}}, 3, [0]),
    ],
)
def test_staleness_limits_up_to_that_of_the_run_are_tried(settings, most, limits):
    assert _limits(load_config({"model": "m", **settings}), most) == limits


def test_a_plan_keeps_what_a_run_has_set():
    sizes = {"engine": {"max_sequences": 7}, "rollout": {"max_running_groups": 5}}
    run = planned(QWEN_2B, 2, "h100", buffer={"capacity": 24}, **sizes)
    (split, *_) = (Split(**s, groups_per_step=4, max_staleness=1) for s in fitting(run))
    config = run.with_split(split)
    assert (config.buffer.capacity, config.rollout.max_running_groups) == (24, 5)
    assert config.engine.max_sequences == 7
    assert run.with_split(replace(split, groups_per_step=32)).buffer.capacity == "2 batches"


def test_a_launcher_places_all_workers_of_a_plan():
    run = planned(QWEN_2B, 32, "h100", cluster={"launcher": "ray"})
    *_, sizes = fitting(run)
    written = run.settings(Split(**sizes, groups_per_step=8, max_staleness=1))
    assert written["engine"]["remote"] == written["trainer"]["remote"] == 0
    assert written["engine"]["count"] == sizes["engines"]
    assert "cluster" not in written


@pytest.mark.parametrize(
    ("num_gpus", "settings", "says"),
    [
        (16, {"weights": {"transport": "ipc"}}, "weights.transport = 'ipc' reaches engines on"),
        (8, {"trainer": {"groups_per_step": 2, "minibatches": 4}}, "minibatches = 4 is more than"),
        (8, {"tasks": {"epochs": 1}}, "tasks.epochs is for `millrace sft`"),
    ],
)
def test_a_plan_that_no_run_accepts_says_why(num_gpus, settings, says):
    with pytest.raises(ConfigError, match=f"No split of {num_gpus} x h100 can be run: .*{says}"):
        search(planned(QWEN_2B, num_gpus, "h100", **settings))


@pytest.mark.parametrize(
    ("num_gpus", "gpu", "says"),
    [
        (2, "rtx4090", r"needs 48 GiB for weights, new weights .* has 22 GiB; .*would fit"),
        (2, "h100", r"each of 1 ranks needs \d+ GiB, and one h100 has 75 GiB; .*would fit"),
        (1, "b200", "one GPU generates and another one trains; 2 x b200 would fit"),
        (8, "l4", "8 x l4 cannot hold this run"),
    ],
)
def test_a_plan_that_cannot_fit_says_what_would(num_gpus, gpu, says):
    with pytest.raises(ConfigError, match=says):
        search(planned(QWEN_8B, num_gpus, gpu))


def test_a_model_that_no_engine_holds_needs_several_gpus_per_engine():
    with pytest.raises(ConfigError, match=r"an engine needs 173 GiB .* engine.type = 'vllm'"):
        search(planned(QWEN_30B, 64, "l40s"))


def test_a_merged_adapter_that_no_engine_holds_may_fit_unmerged():
    with pytest.raises(ConfigError, match=r"an engine needs \d+ GiB .* lora.apply = 'unmerged'"):
        search(planned(QWEN_30B, 8, "h100", lora={}))


def test_the_command_writes_a_toml_that_loads_and_a_picture(tmp_path, capsys):
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "config.json").write_text(json.dumps(QWEN_2B))
    source = tmp_path / "run.toml"
    text = 'model = "m"\nloss = "gspo"\n[trainer]\ngroups_per_step = 2\n[rollout]\ngroup_size = 2\n'
    source.write_text(text)
    lengths = "median=20,p90=50,max=100"
    options = ["--gpus", "2", "--lengths", lengths, "--max-staleness", "1", "--price", "2"]
    options += ["--loss.high", "0.3", "--trainer.steps", "7", "--trainer.mesh.tp", "2"]
    options += ["--buffer.capacity", "unbounded"]
    assert main(["plan", str(source), *options, "--json", str(tmp_path / "out.json")]) == 0
    result = json.loads((tmp_path / "out.json").read_text())
    assert result["split"]["engines"] == result["split"]["ranks"] == 1
    cost = 2 * result["gpu_hours_per_1000_samples"]
    assert result["cost_per_1000_samples"] == pytest.approx(cost)
    config = load_config(tmp_path / "run.plan.toml")
    check_settings(config)
    assert (config.engine.count, config.buffer.max_staleness) == (1, 1)
    assert config.buffer.capacity == "unbounded"
    assert config.trainer.steps == 7
    assert config.loss == {"type": "gspo", "high": 0.3}
    assert config.model.path == str(tmp_path / "m")
    assert (tmp_path / "run.plan.png").read_bytes().startswith(b"\x89PNG")
    shown = capsys.readouterr().out
    assert "samples per s" in shown
    assert shown.count(" instead of ") == 1
    assert "note: the plan has trainer.mesh.tp = 1 instead of 2" in shown
    assert "the controller would need" not in shown


@pytest.mark.parametrize(
    ("settings", "turns", "tokens", "samples_per_s", "cores"),
    [
        ({}, 1, 8192, 8 * 125, 1.0),  # the limits that docs/how-to/plan.md derives
        ({}, 1, 512, 8 * 357, 1.0),
        ({"journal": {"max_bytes": 0}}, 1, 512, 8 * 357, 8 * 357 * 33e-6),
        ({"environment": {"workers": 2}}, 3, 512, 100, 3 * 100 * 1.2e-3 + 0.038),
    ],
)
def test_the_load_of_the_controller_is_that_of_the_docs(
    settings, turns, tokens, samples_per_s, cores
):
    rates = {"samples_per_s": samples_per_s, "tokens_per_s": samples_per_s * tokens}
    config, lengths = load_config({"model": "m", **settings}), Lengths(turns=turns)
    found = controller_busy(config, lengths, SimpleNamespace(**rates))
    assert found == pytest.approx(cores, rel=0.02)


def test_a_plan_that_one_controller_cannot_carry_says_so(tmp_path, capsys):
    tiny = {**QWEN_2B, "hidden_size": 64, "num_hidden_layers": 1, "head_dim": 4, "vocab_size": 256}
    (tmp_path / "config.json").write_text(json.dumps(tiny))
    (tmp_path / "run.toml").write_text('model = "."\n[scoring]\nworkers = 64\n')
    options = ["--gpus", "2", "--lengths", "median=5,p90=6", "--max-staleness", "1"]
    assert main(["plan", str(tmp_path / "run.toml"), *options, "--groups-per-step", "16"]) == 0
    busy = json.loads((tmp_path / "run.plan.json").read_text())["controller_busy"]
    assert busy > 1
    assert f"note: the controller would need {busy:.1f} cores" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--gpus", "8", "--calibrate"], "--calibrate measures this machine"),
        (["--gpus", "8", "--price", "-1"], "--price -1 is below 0"),
        (["--gpus", "8", "--price", "nan"], "--price nan is below 0 or not a number"),
        (["--gpus", "8", "--price", "inf"], "--price inf is below 0 or not a number"),
        (["--gpus", "8", "--gpu", "h10"], "did you mean 'h100'?"),
        ([], "This machine was not measured; add --calibrate"),
        (["--tasks.epochs", "1"], "tasks.epochs is for `millrace sft`"),
        (["--gpus", "8", "--loss", "gpro"], "did you mean 'grpo'?"),
        (["--gpus", "8", "--preset", "arael"], "No preset 'arael'; did you mean 'areal'"),
        (["--gpus", "8", "--lengths", "median=800"], "nor both median and p90; add them"),
    ],
)
def test_wrong_options_are_one_sentence(tmp_path, monkeypatch, capsys, options, says):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "config.json").write_text(json.dumps(QWEN_2B))
    (tmp_path / "run.toml").write_text('model = "."\n')
    assert main(["plan", str(tmp_path / "run.toml"), *options]) == 2
    assert says in capsys.readouterr().err
    assert not (tmp_path / "run.plan.toml").exists()


def test_a_run_of_a_plan_is_compared_with_it(tmp_path):
    toml = tmp_path / "run.plan.toml"
    toml.write_text('model = "m"\n')
    keys = ("samples_per_s", "tokens_per_s", "step_s", "staleness_mean", "staleness_max")
    keys += ("engine_busy", "trainer_busy")
    plan = {**dict.fromkeys(keys, 3.0), "settings": tomllib.loads(toml.read_text())}
    plan |= {"engine_busy": 0.9, "memory_bytes_per_device": {"cpu": 3 * 2**30}}
    toml.with_suffix(".json").write_text(json.dumps(plan))
    trace = TraceWriter(tmp_path / "trace.json", start_s=0.0)
    for name, busy, begin_s in (("generate", True, 0.0), ("no work", False, 3.0)):
        times = {"start_s": begin_s, "end_s": 4.0 if begin_s else 3.0}
        trace.write([Span(worker="engine-0", name=name, busy=busy, **times)])
    trace.close()
    rows = [
        {
            "step": step,
            "throughput/time_s": 2.0 * step,
            "throughput/samples": 8 * step,
            "throughput/tokens": 100 * step,
            "staleness/mean": 1.5,
            "staleness/max": 2,
        }
        for step in range(1, 6)
    ]
    text = "".join(json.dumps(row) + "\n" for row in rows)
    (tmp_path / "metrics.jsonl").write_text(text)
    with PeakMemory(os.getpid()) as memory:
        filled = b"x" * 2**27
        while memory.peak_mib < len(filled) / 2**20:
            time.sleep(0.01)
    shown = "\n".join(compared(toml, str(tmp_path), memory=memory))
    assert "engine busy            90%, measured 75% (+20%)" in shown
    assert "memory gib             3.0, measured " in shown
    assert "trainer busy" not in shown  # it has no spans
    assert "samples per s          3.0, measured 4.0 (-25%)" in shown
    assert "settings have changed" not in shown
    plan["memory_bytes_per_device"] = {"cuda": 3 * 2**30}
    toml.with_suffix(".json").write_text(json.dumps(plan))
    memory = SimpleNamespace(peak_gpu_mib=None)
    assert "memory" not in "".join(compared(toml, str(tmp_path), memory=memory)), "no GPU"
    toml.write_text('model = "other"\n')
    assert "settings have changed" in next(compared(toml, str(tmp_path)))
