"""What `millrace eval` evaluates: settings and models of a folder, a run directory or a file."""

from pathlib import Path

import pytest
import tomli_w

from millrace.config import load_config
from millrace.controller.evaluation import Evaluation
from millrace.core.errors import ConfigError
from millrace.core.records import Group, Score, Task
from millrace.monitoring.run_dir import RunDir
from millrace.run.checks import check_settings
from millrace.run.execution.evaluate import EvalOptions, _result, read_source


@pytest.fixture
def run(tmp_path):
    """A run directory with checkpoints of steps 2 and 10."""
    settings = {
        "model": "base",
        "run_dir": str(tmp_path / "run"),
        "evaluate": {"path": "held_out.jsonl"},
        "scorers": ["exact"],
        "lora": {"rank": 4},
        "trainer": {"ranks": 2},
    }
    run_dir = RunDir(tmp_path / "run")
    run_dir.open(load_config(settings))
    run_dir.close()
    for step in (2, 10):
        (run_dir.checkpoints / f"step_{step}").mkdir()
    return run_dir


@pytest.mark.parametrize(
    ("wanted", "steps"), [("last", [10]), ("all", [2, 10]), ("2", [2]), ("10,2", [10, 2])]
)
def test_checkpoints_of_a_run_are_chosen_by_their_steps(run, wanted, steps):
    config, found = read_source(EvalOptions(source=run.path, checkpoints=wanted))
    assert found == {step: run.checkpoints / f"step_{step}" for step in steps}
    assert config.lora is not None  # they are adapters
    assert config.trainer.ranks == 1


@pytest.mark.parametrize("wanted", ["3", "²", "newest"])
def test_unknown_checkpoints_are_refused(run, wanted):
    with pytest.raises(ConfigError, match=rf"--checkpoints {wanted}: choose last, all, or"):
        read_source(EvalOptions(source=run.path, checkpoints=wanted))


def test_device_of_the_engines_is_no_obstacle_to_exact_evaluation(tmp_path):
    file = tmp_path / "run.toml"
    settings = {
        "model": "m",
        "tasks": {"path": "tasks.jsonl"},
        "evaluate": {"path": "held_out.jsonl"},
        "scorers": ["exact"],
        "fidelity": {"mode": "exact"},
        "placement": {"engines": "cuda:0", "trainer": "cuda:0"},
    }
    file.write_text(tomli_w.dumps(settings))
    config, _ = read_source(EvalOptions(source=file))
    with pytest.raises(ConfigError, match=r"placement\.engines = .* beside placement\.trainer"):
        check_settings(config)
    check_settings(config, trains=False)


def test_another_model_replaces_the_checkpoints_of_a_run(run):
    config, found = read_source(EvalOptions(source=run.path, model="other"))
    assert found == {0: None}
    assert (config.model.path, config.lora) == ("other", None)


def test_model_folder_needs_tasks(tmp_path):
    with pytest.raises(ConfigError, match="is a model; add --tasks FILE"):
        read_source(EvalOptions(source=tmp_path))


def test_options_replace_what_a_file_sets(tmp_path):
    file = tmp_path / "run.toml"
    table = {"model": "m", "evaluate": {"generator": "a:b", "samples": 2}, "scorers": ["exact"]}
    file.write_text(tomli_w.dumps(table))
    options = EvalOptions(
        source=file, tasks="t.jsonl", scorers=("numeric",), samples=4, temperature=0.5
    )
    config, _ = read_source(options)
    place = config.evaluate
    assert (place.path, place.generator, place.samples, place.temperature) == (
        "t.jsonl",
        None,
        4,
        0.5,
    )
    assert [scorer.type for scorer in config.scorers] == ["numeric"]


def test_standard_error_is_that_of_the_mean_over_tasks():
    groups = [
        Group(number=0, task=Task(prompt=""), episodes=(), scores=_scores(1.0, 1.0)),
        Group(number=1, task=Task(prompt=""), episodes=(), scores=_scores(1.0, 0.5)),
    ]
    evaluation = Evaluation(
        step=0,
        accuracy=0.5,
        num_tasks=3,
        num_failed=1,
        samples=2,
        pass_at={1: 0.5, 2: 2 / 3},
        versions={},
        groups=tuple(groups),
    )
    result = _result(evaluation, model="m", step=None)
    # Solve rates 1, 0.5 and 0, for the failed task: their standard deviation is 0.5.
    assert result.standard_error == pytest.approx(0.5 / 3**0.5)
    assert result.reward_mean == pytest.approx(3.5 / 4)


def _scores(*totals: float) -> tuple[Score, ...]:
    return tuple(Score(total=total, parts={}) for total in totals)


def test_a_name_that_is_no_file_is_a_model_of_the_hub(tmp_path):
    tasks = tmp_path / "tasks.jsonl"
    tasks.write_text('{"prompt": "a", "answer": "b"}')
    options = EvalOptions(source=Path("organisation/model"), tasks=str(tasks), scorers=("exact",))
    config, checkpoints = read_source(options)
    assert config.model.path == "organisation/model"
    assert list(checkpoints.values()) == [None]
