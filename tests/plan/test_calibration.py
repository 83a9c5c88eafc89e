"""`millrace plan --calibrate`: real short runs on this machine, and the plan from them."""

import json
import tomllib

import numpy as np
import pytest
import tomli_w

from millrace.bench.workloads import make_long_tailed_model
from millrace.cli.main import main
from millrace.config import load_config
from millrace.core.spans import TurnLife
from millrace.plan.calibrate import (
    fit_costs,
    microbatch_tokens,
    read_calibration,
    start_costs,
    trial_settings,
    turn_costs,
)
from millrace.plan.lengths import Lengths
from millrace.run.checks import check_settings

SETTINGS = """
model = "model"
scorers = ["reward.py:distinct"]
tasks = { path = "tasks.jsonl" }
sampling = { max_new_tokens = 16 }
rollout = { group_size = 2 }
scoring = { workers = 1 }
cluster = { threads = 1 }
"""


def turns_of(lengths, *, begin_s, step_s, sequence_s):
    """Turns that start together: a step takes longer the more of them still run."""
    ends_s = {0: begin_s}
    for step in range(1, max(lengths) + 1):
        running = sum(length >= step for length in lengths)
        ends_s[step] = ends_s[step - 1] + step_s + running * sequence_s
    return [TurnLife(0.0, ends_s[n], n, 0, 0) for n in lengths]


def test_costs_of_a_decode_step_follow_from_the_times_of_turns():
    lengths = [3, 8, 20, 20, 35, 60, 90, 150]
    turns = turns_of(lengths, begin_s=0.05, step_s=0.01, sequence_s=0.002)
    begin_s, step_s, sequence_s = fit_costs(*turn_costs(turns))
    assert begin_s == pytest.approx(0.05, rel=0.3)
    assert step_s == pytest.approx(0.01, rel=0.1)
    assert sequence_s == pytest.approx(0.002, rel=0.1)


def test_no_cost_is_negative():
    causes = np.array([[1.0, 1.0], [1.0, 2.0], [1.0, 3.0]])
    assert fit_costs(causes, np.array([3.0, 2.0, 1.0])) == (2.0, 0.0)


@pytest.mark.parametrize(
    ("few_s", "many_s", "expected"),
    [(0.3, 0.9, (0.1, 0.05)), (0.3, 0.2, (0.3, 0.0)), (0.1, 1.3, (0.0, 0.1))],
)
def test_starts_cost_something_whatever_their_number_and_per_sequence(few_s, many_s, expected):
    assert start_costs((4, few_s), (16, many_s)) == pytest.approx(expected)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("trial", ["small", "large", "overlapping"])
def test_settings_of_a_run_do_not_stop_its_trials(tmp_path, device, trial):
    given = {
        "model": "m",
        "trainer": {"groups_per_step": 64, "minibatches": 32},
        "buffer": {"replay": {"share": 0.25, "max_staleness": 4}},
    }
    check_settings(load_config(given))
    table = trial_settings(given, device=device, folder=tmp_path / trial)
    config = load_config(tomllib.loads(tomli_w.dumps(table)))
    check_settings(config)
    assert config.trainer.minibatches == min(32, config.trainer.groups_per_step)


def test_the_largest_microbatch_may_be_one_long_sequence():
    trainer = {"microbatch_tokens": 100, "groups_per_step": 2}
    config = load_config({"model": "m", "trainer": trainer, "rollout": {"group_size": 2}})
    lengths = Lengths(groups=([np.array([900]), np.array([30])],), prompt_tokens=50)
    assert microbatch_tokens(config, lengths) == 950


@pytest.mark.slow
def test_measured_machine_is_planned_for(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    make_long_tailed_model(tmp_path / "model", seed=0)
    (tmp_path / "reward.py").write_text(
        "def distinct(completions, **columns):\n    return [len(set(c)) for c in completions]\n"
    )
    tasks = [json.dumps({"prompt": f"task{number}"}) for number in range(8)]
    (tmp_path / "tasks.jsonl").write_text("\n".join(tasks))
    toml = tmp_path / "run.toml"
    toml.write_text(SETTINGS)
    lengths = tmp_path / "lengths.json"
    lengths.write_text(json.dumps([4, 6, 9, 12, 16]))
    assert main(["plan", str(toml), "--lengths", str(lengths)]) == 2
    assert "This machine was not measured; add --calibrate" in capsys.readouterr().err

    assert main(["plan", str(toml), "--calibrate", "--lengths", str(lengths)]) == 0
    measured = capsys.readouterr().out
    found = read_calibration(tmp_path / "cache/millrace/calibration.json")
    assert found.device == "cpu"
    assert found.decode_s(4, 0) > 0
    assert found.train_s(100, 0) > 0
    assert found.base_mib > 100
    assert "samples per s" in measured

    assert main(["plan", str(toml), "--lengths", str(lengths)]) == 0
    assert capsys.readouterr().out == measured, "a second plan uses the same measurement"
