import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import tomli_w
from fake_checkpoint import write_fake_checkpoint
from project import make_project

from millrace.cli.commands import interrupted_state
from millrace.cli.main import main, report, split_settings
from millrace.cli.starter import write_starter
from millrace.config import load_config
from millrace.core.errors import ConfigError, RunFailed, WorkerError
from millrace.core.plugins import load_reference
from millrace.monitoring.run_dir import RunDir
from millrace.plan.command import FORMATS
from millrace.run.resume import has_finished, has_started
from millrace.training.checkpoints.store import CheckpointStore

REPOSITORY = Path(__file__).parents[2]


def millrace(*arguments: str | Path, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "millrace.cli.main", *map(str, arguments)],
        capture_output=True,
        text=True,
        check=False,
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY / "src"), "COLUMNS": "100"},
    )


def a_run(path: Path) -> RunDir:
    run_dir = RunDir(path)
    run_dir.open(load_config({"model": "m"}))
    run_dir.metrics.write_text('{"step": 1, "reward/mean": 0.5}\n')
    run_dir.close()
    return run_dir


# Help


def test_help_shows_every_command_and_the_exit_codes():
    done = millrace("--help")
    assert done.returncode == 0
    for word in ("demo", "init", "train", "join", "inspect", "start here", "exit codes"):
        assert word in done.stdout


@pytest.mark.parametrize("command", ["demo", "init", "train", "join", "inspect"])
def test_every_command_has_a_help_text_that_fits_the_terminal(command):
    done = millrace(command, "--help")
    assert done.returncode == 0
    assert len(done.stdout) > 300
    assert max(map(len, done.stdout.splitlines())) <= 100


def test_bench_help_lists_the_measurements():
    done = millrace("bench", "--help")
    assert "pipeline" in done.stdout
    assert "publishing" not in done.stdout


def test_help_needs_no_heavy_import():
    code = (
        "import sys\nfrom millrace.cli.main import main\n"
        "try:\n    main(['--help'])\nexcept SystemExit: pass\n"
        "heavy = {'torch', 'transformers', 'pydantic', 'numpy', 'rich'} & set(sys.modules)\n"
        "sys.exit(f'imported {heavy}' if heavy else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=False)
    assert done.returncode == 0, done.stderr


def test_version():
    done = millrace("--version")
    assert done.stdout.startswith("millrace 0.")


# Wrong usage


@pytest.mark.parametrize(
    "arguments", [[], ["trian"], ["train"], ["inspect"], ["demo", "--sed", "1"]]
)
def test_wrong_usage_exits_with_2(arguments):
    done = millrace(*arguments)
    assert done.returncode == 2
    assert "usage: millrace" in done.stderr


def sentence_of(done: subprocess.CompletedProcess[str]) -> str:
    """The one line that a wrong input earns."""
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    return line.removeprefix("error: ")


def test_missing_toml_is_refused_in_one_sentence(tmp_path):
    assert "No config file" in sentence_of(millrace("train", tmp_path / "run.toml"))


def test_an_unknown_setting_names_the_nearest_one(tmp_path):
    (tmp_path / "run.toml").write_text('model = "m"\n')
    done = millrace("train", tmp_path / "run.toml", "--trainer.stepz", "5")
    assert "Unknown setting 'trainer.stepz'; did you mean 'steps'?" in sentence_of(done)


@pytest.mark.parametrize("command", ["join", "env-worker"])
def test_missing_ticket_is_refused_in_one_sentence(tmp_path, command):
    done = millrace(command, tmp_path / "ticket.json")
    assert "cannot be read: No such file" in sentence_of(done)


def test_folder_without_a_run_is_one_sentence(tmp_path):
    assert "is not a run directory" in sentence_of(millrace("inspect", tmp_path))


# Settings on the command line


def test_settings_are_split_from_options():
    arguments = ["train", "--trainer.steps", "5", "run.toml", "--loss.high=0.3", "--resume"]
    rest, settings = split_settings([*arguments, "--seed", "-1", "--run-dir", "a=b", "--x=--y"])
    assert rest == ["train", "run.toml", "--resume"]
    assert settings == {
        "trainer.steps": "5",
        "loss.high": "0.3",
        "seed": "-1",
        "run_dir": "a=b",
        "x": "--y",
    }


@pytest.mark.parametrize("arguments", [["--trainer.steps"], ["--trainer.steps", "--resume"]])
def test_a_setting_without_a_value_is_refused(arguments):
    with pytest.raises(ConfigError, match=r"--trainer\.steps needs a value"):
        split_settings(["train", "run.toml", *arguments])


def test_a_scorer_cannot_be_set_on_the_command_line():
    with pytest.raises(ConfigError, match=r"edit the \[\[scorers\]\] table"):
        split_settings(["train", "run.toml", "--scorers.0.weight", "2"])


# How a run ends


def test_failed_worker_is_reported_with_its_traceback(capsys):
    error = WorkerError("engine-0 died.", worker="engine-0", traceback="Traceback:\n  boom\n")
    assert report(error) == 1
    assert (
        capsys.readouterr().err == "error: engine-0 died.\n\nFrom engine-0:\nTraceback:\n  boom\n"
    )


def test_a_failed_run_exits_with_1_and_a_wrong_setting_with_2(capsys):
    assert report(RunFailed("No step completed.")) == 1
    assert report(ConfigError("Setting 'model' is missing.")) == 2
    assert (
        capsys.readouterr().err == "error: No step completed.\nerror: Setting 'model' is missing.\n"
    )


def test_interrupted_run_reports_its_folder_and_how_to_resume(tmp_path):
    run_dir = a_run(tmp_path / "x")
    assert interrupted_state(str(run_dir.path)).endswith(
        "x; --resume continues from the start, with the groups in its journal"
    )
    (run_dir.checkpoints / "step_20").mkdir()
    assert interrupted_state(str(run_dir.path)).endswith("x; --resume continues from step_20")


def test_auto_resume_finds_a_run_here_or_at_the_checkpoint_path_and_leaves_a_finished_one(
    tmp_path, capsys
):
    run_dir = RunDir(tmp_path / "x")
    settings = {"model": "m", "run_dir": str(run_dir.path), "trainer": {"steps": 20}}
    config = load_config(settings)
    stored = load_config({**settings, "checkpoint": {"path": f"file://{tmp_path}/store"}})
    assert not has_started(config)
    assert not has_started(stored)
    write_fake_checkpoint(tmp_path / "first" / "step_20", run_state={"version": 20})
    CheckpointStore(f"file://{tmp_path}/store").upload(tmp_path / "first" / "step_20", keep=1)
    assert has_started(stored)
    a_run(run_dir.path)
    assert has_started(config)
    (run_dir.checkpoints / "step_20").mkdir()
    assert not has_finished(config)  # its last evaluation is missing
    run_dir.write_summary({})
    assert has_finished(config)
    assert not has_finished(load_config({**settings, "trainer": {"steps": 30}}))
    (tmp_path / "run.toml").write_text(tomli_w.dumps(settings))
    assert main(["train", str(tmp_path / "run.toml"), "--auto-resume"]) == 0
    assert capsys.readouterr().out.endswith("x has completed its 20 steps.\n")


# Under torchrun


def test_torchrun_starts_the_run_in_rank_0_alone(tmp_path, monkeypatch, capsys):
    def variables() -> dict[str, str]:
        return {name: os.environ[name] for name in ("RANK", "MASTER_PORT") if name in os.environ}

    for rank in ("1", "0"):
        monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
        monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
        monkeypatch.setenv("MASTER_PORT", "29500")
        monkeypatch.setenv("RANK", rank)
        code = main(["train", str(tmp_path / "missing.toml")])
        assert code == (2 if rank == "0" else 0)
        assert variables() == {}
    said = capsys.readouterr()
    assert said.out == "Rank 1 of torchrun has nothing to do: rank 0 starts the trainer's ranks.\n"
    assert said.err.count("error: ") == 1


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_run_under_torchrun_is_the_same_run(tmp_path):
    make_project(tmp_path, trainer={"steps": 1, "ranks": 2})
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
    done = subprocess.run(
        [sys.executable, *torchrun, "-m", "millrace", "train", "run.toml"],
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY / "src")},
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("(finished)") == 1
    assert "Rank 1 of torchrun has nothing to do" in done.stdout
    assert "\ntrainer-1 " in done.stdout  # the ranks of the trainer


# Init


def make_untrained_model(directory: Path) -> None:
    """Skips the half minute of supervised training that `millrace init` spends."""
    from millrace.demo.model import build_model, build_tokenizer

    tokenizer = build_tokenizer()
    build_model(tokenizer, seed=0).save_pretrained(directory)
    tokenizer.save_pretrained(directory)


def make_no_model(directory: Path) -> None:
    directory.mkdir()


@pytest.mark.slow
def test_starter_trains_unchanged(tmp_path):
    write_starter(tmp_path / "first", make_model=make_untrained_model)
    short = ("--trainer.steps", "2", "--evaluate.max_tasks=8", "--trainer.groups-per-step", "4")
    plan = tmp_path / "first" / "run.plan.toml"  # under this name, the run is compared with a plan
    plan.with_name("run.toml").rename(plan)
    predicted = {**dict.fromkeys(FORMATS, 1.0), "memory_bytes_per_device": {"cpu": 2**30}}
    predicted["settings"] = tomllib.loads(plan.read_text())
    plan.with_suffix(".json").write_text(json.dumps(predicted))
    done = millrace("train", "first/run.plan.toml", *short, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "predicted by run.plan.json:" in done.stdout
    for name in ("samples per s", "engine busy", "trainer busy", "memory gib"):
        assert re.search(rf"^  {name} .*, measured .*[1-9].* \([+-]\d+%\)$", done.stdout, re.M)
    assert re.search(r"^steps +2 in ", done.stdout, re.M)
    assert re.search(r"^held-out accuracy +", done.stdout, re.M)
    assert re.search(r"^settings +.*trainer\.steps = 2$", done.stdout, re.M | re.S)
    run_dir = RunDir(tmp_path / "first" / "run")
    assert run_dir.is_finished
    assert [path.name for path in run_dir.checkpoint_paths] == ["step_2"]


def test_the_starter_sets_only_what_exists_and_holds_tasks_out(tmp_path):
    write_starter(tmp_path, make_model=make_no_model)
    config = load_config(tmp_path / "run.toml")
    assert config.scorers[0].function == f"{tmp_path}/rewards.py:exact_match"
    rows = {
        name: [json.loads(line) for line in (tmp_path / name).read_text().splitlines()]
        for name in ("tasks.jsonl", "heldout.jsonl")
    }
    trained, held_out = ({row["prompt"] for row in rows[name]} for name in rows)
    assert len(rows["heldout.jsonl"]) == config.evaluate.max_tasks
    assert not trained & held_out
    reward = load_reference(config.scorers[0].function)
    answers = [row["answer"] for row in rows["tasks.jsonl"]]
    assert set(reward(completions=answers, answer=answers, prompts=answers)) == {1.0}
    assert reward(completions=["no"], answer=["01"]) == [0.0]


def test_init_overwrites_nothing(tmp_path):
    (tmp_path / "rewards.py").write_text("mine")
    assert "rewards.py already exists" in sentence_of(millrace("init", tmp_path))
    assert [path.name for path in tmp_path.iterdir()] == ["rewards.py"]


def test_an_interrupted_init_can_be_repeated(tmp_path):
    def interrupted(directory: Path) -> None:
        directory.mkdir()
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_starter(tmp_path / "first", make_model=interrupted)
    write_starter(tmp_path / "first", make_model=make_no_model)
    assert (tmp_path / "first" / "model").is_dir()


def test_init_into_a_file_is_one_sentence(tmp_path):
    (tmp_path / "file").touch()
    assert "Cannot write into" in sentence_of(millrace("init", tmp_path / "file" / "below"))


# Inspect


def test_inspect_prints_a_summary_and_draws_plots(tmp_path):
    run_dir = a_run(tmp_path / "x")
    done = millrace("inspect", run_dir.path)
    assert done.returncode == 0, done.stderr
    assert "(stopped)" in done.stdout
    assert f"drew {run_dir.plots / 'reward.png'}" in done.stdout
    assert (run_dir.plots / "reward.png").is_file()


def test_inspect_without_plots_leaves_the_directory_alone(tmp_path):
    run_dir = a_run(tmp_path / "x")
    done = millrace("inspect", run_dir.path, "--no-plots")
    assert done.returncode == 0
    assert not run_dir.plots.exists()


# A new user's first hour

BAD_RUNS = {
    "key": ({"trainr": {}}, "did you mean 'trainer'?"),
    "type": ({"trainer": {"steps": "many"}}, "Setting 'trainer.steps' = 'many'"),
    "loss": ({"loss": "gpro"}, "did you mean 'grpo'?"),
    "loss key": ({"loss": {"type": "grpo", "hihg": 1}}, "did you mean 'high'?"),
    "scorer": ({"scorers": ["exat"]}, "did you mean 'exact'?"),
    "order": ({"buffer": {"order": "oldst"}}, "did you mean 'oldest'?"),
    "advantages": ({"scoring": {"advantages": "grup"}}, "did you mean 'group'?"),
    "filter": ({"rollout": {"filter": ["zero_varance"]}}, "did you mean 'zero_variance'?"),
    "recipe": ({"environment": {"recipe": "pivt"}}, "did you mean 'pivot'?"),
    "tracker": ({"tracker": ["tensorbord"]}, "did you mean 'tensorboard'?"),
    "optimizer": ({"optimizer": {"type": "adam"}}, "did you mean 'adamw'?"),
    "optimizer class": (
        {"optimizer": {"type": "no.mod:Opt"}},
        "optimizer.type = 'no.mod:Opt': No module named 'no.mod'; is it installed",
    ),
    "engine": ({"engine": {"type": "embeded"}}, "'engine.type' = 'embeded' is not known; did you"),
    "engine of a role": (
        {"environment": {"models": {"judge": {"path": "folder/model", "type": "embeded"}}}},
        "'environment.models.judge.type' = 'embeded' is not known; did you mean 'embedded'?",
    ),
    "engine option": ({"engine": {"options": {"compil": True}}}, "did you mean 'compile'?"),
    "tasks": ({"tasks": {"path": "nowhere.jsonl"}}, "nowhere.jsonl"),
    "model": ({"model": "folder/modle"}, "did you mean 'folder/model'?"),
}
PROBE = """
import contextlib, io, json, os, sys
from millrace.cli.main import main
for folder in sys.argv[1:]:
    os.chdir(folder)
    with contextlib.redirect_stderr(io.StringIO()) as errors:
        code = main(["train", "run.toml"])
    print("report", json.dumps([code, errors.getvalue(), "torch" in sys.modules]))
"""


@pytest.fixture(scope="module")
def bad_runs(tmp_path_factory) -> dict[str, list]:
    """By mistake: the exit code, what was printed, and whether torch had been imported by then.
    One process reports them all."""
    folders = []
    for number, (table, _) in enumerate(BAD_RUNS.values()):
        folder = tmp_path_factory.mktemp(f"bad-{number}")
        folders.append(str(folder))
        (folder / "tasks.jsonl").write_text(json.dumps({"prompt": "1+1=", "answer": "2"}))
        (folder / "folder" / "model").mkdir(parents=True)
        (folder / "folder" / "model" / "config.json").write_text("{}")
        good = {"model": "folder/model", "tasks": {"path": "tasks.jsonl"}, "scorers": ["exact"]}
        (folder / "run.toml").write_text(tomli_w.dumps({**good, **table}))
    command = [sys.executable, "-c", PROBE, *folders]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    lines = (line.partition("report ") for line in done.stdout.splitlines())
    reports = [json.loads(report) for start, word, report in lines if word and not start]
    return dict(zip(BAD_RUNS, reports, strict=True))


@pytest.mark.parametrize("mistake", BAD_RUNS)
def test_wrong_settings_are_reported_before_torch_is_imported(mistake, bad_runs):
    code, errors, has_torch = bad_runs[mistake]
    assert code == 2, errors
    assert BAD_RUNS[mistake][1] in errors.strip().splitlines()[-1]
    assert not has_torch


def test_init_with_a_model_uses_it_and_makes_none(tmp_path, capsys):
    model = tmp_path / "mine"
    model.mkdir()
    (model / "config.json").write_text("{}")
    assert main(["init", str(tmp_path / "my-run"), "--model", str(model)]) == 0
    assert not (tmp_path / "my-run" / "model").exists()
    config = load_config(tmp_path / "my-run" / "run.toml")
    assert config.model.path == str(model)
    assert config.optimizer.learning_rate == "auto"
    assert config.sampling.max_new_tokens == 256


def test_init_with_a_mistyped_model_is_one_sentence_and_writes_nothing(tmp_path, capsys):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "config.json").write_text("{}")
    assert main(["init", str(tmp_path / "my-run"), "--model", str(tmp_path / "mien")]) == 2
    meant = f"Model '{tmp_path}/mien' does not exist; did you mean '{tmp_path}/mine'?"
    assert meant in capsys.readouterr().err
    assert not (tmp_path / "my-run").exists()


def test_python_dash_m_millrace_is_the_command():
    done = subprocess.run(
        [sys.executable, "-m", "millrace", "--version"], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0
    assert done.stdout.startswith("millrace ")


def test_a_script_beside_a_clone_imports_the_package(tmp_path):
    (tmp_path / "millrace").symlink_to(REPOSITORY)
    script = "import millrace as mr; print(mr.train.__module__)"
    (tmp_path / "script.py").write_text(script)
    done = subprocess.run(
        [sys.executable, "script.py"], cwd=tmp_path, capture_output=True, text=True, timeout=60
    )
    assert done.stdout.strip() == "millrace.run.train", done.stderr
