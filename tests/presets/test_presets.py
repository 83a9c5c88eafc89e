"""Presets: what they set, what they say, and what a user's own settings do to them."""

import json
import re
import tomllib
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import tomli_w
from preset_signatures import SIGNATURES, signature_of

from millrace.cli.main import main
from millrace.config import load_config
from millrace.core.errors import ConfigError
from millrace.monitoring.files.metrics import flatten
from millrace.presets import AXES, axis_of, over_preset, preset_names, preset_text
from millrace.run.checks import check_settings
from millrace.training.losses.recipes import build_loss

NAMES = preset_names()


def dotted(table: Mapping[str, Any], key: str = "") -> Iterator[str]:
    for name, value in table.items():
        path = f"{key}.{name}".strip(".")
        typed = isinstance(value, Mapping) and "type" in value
        yield from dotted(value, path) if isinstance(value, Mapping) and not typed else [path]


def test_there_are_presets_of_all_seventeen_libraries():
    libraries = {name.removesuffix("_sync").removesuffix("_async") for name in NAMES}
    assert len(NAMES) == 19
    assert len(libraries - {"art_pipeline"}) == 17


@pytest.mark.parametrize("name", NAMES)
def test_preset_has_valid_settings_for_any_batch(name):
    for groups_per_step in (1, 500):
        work = {"model": "m", "trainer": {"groups_per_step": groups_per_step}}
        if name in ("trl_async", "pipeline_rl") and groups_per_step == 500:
            continue  # their queues have a size of their own, which the user has to raise
        config = load_config(work, preset=name, report=pytest.fail)
        check_settings(config)
        build_loss(config.loss, max_new_tokens=16)
        assert config != load_config(work)


@pytest.mark.parametrize("name", NAMES)
def test_preset_has_the_signature_of_its_library(name):
    config = load_config({"model": "m"}, preset=name, report=pytest.fail)
    assert signature_of(config) == SIGNATURES[name]
    assert (config.lora is None) or (config.lora.rank, config.lora.apply) == (8, "unmerged")


@pytest.mark.parametrize("name", NAMES)
def test_preset_names_its_design_and_what_differs_and_sorts_its_keys_by_axis(name):
    text = preset_text(name)
    head, *sections = re.split(r"\n\n# ", text)
    assert re.search(r"^# Design: https://\S+ ", head, re.M)
    assert re.search(r"^# Not the same: ", head, re.M)
    assert [section.partition(":")[0] for section in sections] == list(AXES)
    for section in sections:
        keys = list(dotted(tomllib.loads(f"# {section}")))
        assert all(axis_of(key) == section.partition(":")[0] for key in keys)


def test_settings_of_the_user_win_and_each_overridden_axis_is_reported():
    reports: list[str] = []
    own = {
        "model": "m",
        "weights": {"interrupt": "drain", "payload": "delta"},
        "buffer": {"order": {"type": "ready"}, "capacity": 8},
        "loss": {"cap": 3.0},
    }
    config = load_config(
        own, overrides={"engine.kv": "recompute"}, preset="pipeline_rl", report=reports.append
    )
    assert (config.weights.interrupt, config.weights.transport) == ("drain", "collective")
    assert (config.weights.payload, config.engine.kv) == ("delta", "recompute")
    assert config.loss == {"type": "tis", "cap": 3.0, "aggregation": "constant"}
    assert config.buffer.max_staleness == 8
    assert reports == [
        "preset 'pipeline_rl': your settings override its axis 'Buffer': buffer.capacity = 8"
        " instead of 256.",
        "preset 'pipeline_rl': your settings override its axis 'Weight sync': weights.interrupt ="
        " 'drain' instead of 'swap'; weights.payload = 'delta', which it leaves unset.",
        "preset 'pipeline_rl': your settings override its axis 'Staleness': loss.cap = 3.0 instead"
        " of 5.0.",
        "preset 'pipeline_rl': your settings override its axis 'Partial rollouts': engine.kv ="
        " 'recompute' instead of 'keep'.",
    ]


def test_keys_of_an_axis_that_a_preset_leaves_unset_are_reported():
    reports: list[str] = []
    own = {
        "trainer": {"steps": 7},
        "lora": {"rank": 4},
        "rollout": {"max_running_groups": 9, "group_size": 2},
        "buffer": {"staleness": "mean", "capacity": 256},
        "loss": {"high": 0.3},
    }
    over_preset(own, "pipeline_rl", report=reports.append)
    assert [report.split(": ", 2)[2] for report in reports] == [
        "rollout.max_running_groups = 9, which it leaves unset.",
        "buffer.staleness = {'type': 'mean'}, which it leaves unset; loss.high = 0.3, which it"
        " leaves unset.",
        "lora.rank = 4, which it leaves unset.",
    ]


def test_another_type_replaces_a_whole_table_of_the_preset():
    reports: list[str] = []
    config = load_config(
        {"model": "m", "loss": "grpo", "buffer": {"staleness": "mean"}},
        preset="trl_async",
        report=reports.append,
    )
    assert config.loss == {"type": "grpo"}
    assert config.buffer.staleness == {"type": "mean"}
    assert len(reports) == 1  # the loss is the preset's own
    assert "buffer.staleness = {'type': 'mean'} instead of" in reports[0]


def test_preset_applies_below_a_finished_config_and_a_table_can_be_removed():
    own = load_config({"model": "m", "buffer": {"max_staleness": 3}})
    reports: list[str] = []
    config = load_config(own, overrides={"lora": None}, preset="art", report=reports.append)
    assert (config.buffer.max_staleness, config.lora) == (3, None)
    assert config.weights.interrupt == "barrier"
    assert [report.split("'")[3] for report in reports] == ["Staleness", "LoRA"]


def test_unknown_preset_is_reported_with_the_nearest_one(capsys):
    with pytest.raises(ConfigError, match=r"No preset 'pipelinerl'; did you mean 'pipeline_rl'\?"):
        load_config({"model": "m"}, preset="pipelinerl")
    assert main(["presets", "show", "zzzz"]) == 2
    assert "there are: areal, art, " in capsys.readouterr().err


def test_presets_are_listed_and_shown(capsys):
    assert main(["presets"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == NAMES
    assert main(["presets", "show", "areal"]) == 0
    assert capsys.readouterr().out == preset_text("areal")
    assert main(["presets", "show"]) == 2


def test_all_presets_are_one_json_list(tmp_path, capsys):
    assert main(["presets", "--json", str(tmp_path / "presets.json")]) == 0
    assert main(["presets", "--json"]) == 0
    text = capsys.readouterr().out
    assert (tmp_path / "presets.json").read_text() == text
    assert not {"Infinity", "NaN"} & set(re.findall(r"\w+", text)), "no part of JSON"
    found = {row["name"]: row["settings"] for row in json.loads(text)}
    assert list(found) == NAMES
    assert found["nemo_rl"]["loss"]["correction_high"] == "inf"
    assert found["areal"] == tomllib.loads(preset_text("areal"))


def test_train_prints_what_overrides_its_preset(tmp_path, capsys):
    file = tmp_path / "run.toml"
    file.write_text('model = "nowhere"\nbuffer.max_staleness = 0\n')
    assert main(["train", str(file), "--preset", "areal", "--dry-run"]) == 2  # no such model
    assert "override its axis 'Staleness': buffer.max_staleness = 0 instead of 4" in (
        capsys.readouterr().out
    )


def test_the_toml_of_a_planned_preset_has_the_preset_and_the_settings_of_the_user(tmp_path, capsys):
    sizes = {"hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4}
    shape = {**sizes, "intermediate_size": 64, "vocab_size": 256}
    (tmp_path / "config.json").write_text(json.dumps(shape))
    own = {"model": str(tmp_path), "loss": {"cap": 3.0}, "rollout": {"group_size": 2}}
    file = tmp_path / "run.toml"
    file.write_text(tomli_w.dumps({**own, "lora": {"rank": 4}}))
    options = ["--preset", "pipeline_rl", "--lora", "none", "--weights.interrupt", "drain"]
    assert main(["plan", str(file), *options, "--gpus", "2", "--lengths", "median=9,p90=20"]) == 0
    written = flatten(tomllib.loads((tmp_path / "run.plan.toml").read_text()))
    merged = flatten(tomllib.loads(preset_text("pipeline_rl"))) | flatten(own)
    merged["weights/interrupt"] = "drain"
    del merged["buffer/max_staleness"]  # the plan decides it
    assert written.items() >= merged.items()
    assert not any(key.startswith("lora") for key in written)
    assert "its axis 'Weight sync': weights.interrupt = 'drain'" in capsys.readouterr().out


# Values of settings that presets need


@pytest.mark.parametrize(
    ("given", "groups"), [(5, 5), ("1 batch", 8), ("3 batches", 24), ("unbounded", 2**63 - 1)]
)
def test_buffer_is_as_large_as_a_number_of_groups_or_batches(given, groups):
    config = load_config({"model": "m", "buffer": {"capacity": given}})
    assert config.buffer_capacity == groups


@pytest.mark.parametrize("given", [0, -1, True, "0 batches", "two batches", "all", 1.5])
def test_wrong_size_of_the_buffer_is_refused(given):
    message = r"'buffer.capacity' = .*: a number of groups above 0, such as 64, '2 batches' or"
    with pytest.raises(ConfigError, match=message):
        load_config({"model": "m", "buffer": {"capacity": given}})


def test_limit_that_paces_nothing_is_refused_with_the_barrier():
    staleness = {"type": "oldest", "enforce": "take"}
    table = {
        "model": "m",
        "buffer": {"max_staleness": 0, "staleness": staleness},
        "weights": {"interrupt": "barrier"},
    }
    with pytest.raises(ConfigError, match="enforce = 'take' does not; remove that key"):
        check_settings(load_config(table))
    with pytest.raises(ConfigError, match="enforce = 'later' is unknown"):
        load_config({"model": "m", "buffer": {"staleness": {"enforce": "later"}}})
