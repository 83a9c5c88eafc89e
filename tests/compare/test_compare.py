"""`millrace compare`: which runs it plans, what it measures, and what becomes of a failed run."""

import json
import math
import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import psutil
import pytest
from project import Command, make_project, steps_in
from synthetic_run import make_run

from millrace.cli.main import main
from millrace.cluster.process import core_shares
from millrace.compare.report import markdown, page
from millrace.compare.runs import measure_run, plan_designs, side_by_side, used_gpu_mib
from millrace.core.errors import ConfigError

TOGETHER = """
import os
import time
from pathlib import Path

def digits(completions, **columns):
    folder, deadline = Path(__file__).parent, time.monotonic() + 20
    (folder / f"{os.getpid()}.started").touch()
    while len(list(folder.glob("*.started"))) < 2:
        if time.monotonic() > deadline:
            (folder / "alone").touch()
            break
        time.sleep(0.05)
    return [0.0] * len(completions)
"""
PLAN = {"presets": (), "sweeps": (), "settings": {}}


@pytest.fixture
def toml(tmp_path):
    file = tmp_path / "run.toml"
    file.write_text('model = "m"\nbuffer.max_staleness = 3\n')
    return file


def test_designs_are_all_combinations_of_presets_and_swept_values(toml):
    sweeps = ["trainer.steps=5,9", "loss.high=0.3"]
    settings = {"rollout.group_size": "2"}
    plan = PLAN | {"presets": ["verl", "areal"], "sweeps": sweeps, "settings": settings}
    designs = plan_designs([toml], **plan)
    assert [design.name for design in designs] == [
        f"{preset}, trainer.steps={steps}, loss.high=0.3"
        for preset in ("verl", "areal")
        for steps in (5, 9)
    ]
    assert designs[0].folder == "verl_trainer.steps=5_loss.high=0.3"
    (note,) = designs[0].notes
    assert "override its axis 'Staleness': buffer.max_staleness = 3 instead of 7" in note
    arguments = designs[1].arguments(seed=2, run_dir=Path("/a b"))
    assert arguments[:5] == ["train", str(toml), "--auto-resume", "--preset", "verl"]
    assert {"--trainer.steps=9", "--seed=2", '--run_dir="/a b"'} <= set(arguments)


def test_designs_of_several_files_are_named_after_them(toml):
    other = toml.with_name("other.toml")
    shutil.copy(toml, other)
    assert [d.name for d in plan_designs([toml, other], **PLAN)] == ["run", "other"]


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        ({"presets": ["arael"]}, "No preset 'arael'; did you mean 'areal'"),
        ({"sweeps": ["trainer.steps"]}, "--sweep 'trainer.steps' is not KEY=VALUE,VALUE"),
        ({"sweeps": ["trainer.steps="]}, "is not KEY=VALUE,VALUE"),
        ({"sweeps": ["trainer.step=1,2"]}, "Unknown setting 'trainer.step'; did you mean 'steps'"),
        ({"sweeps": ["buffer.capacity=2"]}, "buffer.capacity = 2 cannot hold"),
        ({"settings": {"seed": "7"}}, "its own seed; leave out seed = 7, and use --seeds N"),
        ({"sweeps": ["seed=1,2"]}, "its own seed; leave out seed = 1, and use --seeds N"),
        ({"settings": {"run_dir": "x"}}, "leave out run_dir = x, and use --out DIR"),
        ({"presets": ["areal", "areal"]}, "Two designs are named 'areal'"),
    ],
)
def test_wrong_plan_is_refused_before_any_run(toml, plan, message):
    with pytest.raises(ConfigError, match=message):
        plan_designs([toml], **(PLAN | plan))


def test_a_seed_is_not_taken_for_the_number_of_seeds(toml, capsys):
    assert main(["compare", str(toml), "--seed", "7"]) == 2
    assert "use --seeds N" in capsys.readouterr().err


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    run_dir = make_run(tmp_path_factory.mktemp("run") / "run")
    rows = [json.loads(line) for line in run_dir.metrics.read_text().splitlines()]
    text = "\n".join(json.dumps(row | {"completion_length/mean": 9.0}) for row in rows)
    run_dir.metrics.write_text(text + "\n")
    run_dir.summary.write_text(json.dumps({"accuracy_before": 0.1, "accuracy_after": 0.9}))
    return measure_run(run_dir, target=0.5), measure_run(run_dir, target=0.95)


def test_measures_come_from_the_files_of_a_run(measured):
    found, _ = measured
    assert found["samples_per_s"] == 128
    assert found["staleness"] == pytest.approx({"0": 0.3, "1": 0.6, "2": 0.1})
    assert found["mean_staleness"] == pytest.approx(0.8)
    assert found["wasted"] == {"dropped": 120, "cancelled": 400}
    assert found["wasted_share"] == pytest.approx(0.013)
    assert found["engine_idle"] == pytest.approx(0.25)
    assert found["trainer_idle"] == pytest.approx(0.5)
    assert found["sync_share"] == pytest.approx(0.05)
    assert found["accuracy"] == 0.9


def test_time_to_a_target_is_that_of_the_first_evaluation_that_reached_it(measured):
    reached, missed = measured
    assert reached["time_to_target_s"] == 10.0  # after step 20 of 40, half a second each
    assert missed["time_to_target_s"] is None


def test_table_and_page_hold_means_ranges_and_failures(measured):
    found, _ = measured
    rows = [
        {**found, "design": "a<b", "seed": 0, "status": "finished", "peak_mib": 100.0},
        {**found, "design": "a<b", "seed": 1, "status": "finished", "samples_per_s": 132.0},
        {**found, "design": "fast", "seed": 0, "status": "finished", "samples_per_s": 195.0},
        {"design": "broken", "seed": 0, "status": "failed", "error": "No model <here>."},
    ]
    table = markdown(rows, notes=["a note"])
    headers, _, *lines = (line.strip("| ").split(" | ") for line in table.splitlines()[:5])
    assert all(len(line) == len(headers) for line in lines)
    assert dict(zip(headers, lines[1], strict=True))["times a<b"] == "1.50"
    assert dict(zip(headers, lines[1], strict=True))["mean staleness"] == "0.8"
    assert "peak MiB on GPUs" not in headers, "no run measured it"
    line = next(line for line in table.splitlines() if line.startswith("| a<b"))
    assert "| 130.00 (128.00 to 132.00) |" in line
    assert "| 100, 1 of 2 runs |" in line
    assert "0: 30%, 1: 60%, 2: 10%" in line
    assert "dropped 120, cancelled 400" in line
    assert "- broken failed with seed 0: No model <here>." in table
    text = page(rows, command="millrace compare a<b", notes=["a note"])
    assert "<b" not in text.replace("<body", "").replace("<bar", "")
    assert "No model &lt;here&gt;." in text
    assert "http" not in text
    assert "<script" not in text


@pytest.fixture
def made(toml):
    """A comparison of one run, which has finished."""
    (design,) = plan_designs([toml], **(PLAN | {"presets": ["tunix"]}))
    file = toml.parent / "compare" / "tunix" / "seed_0.json"
    run_dir = make_run(file.with_suffix(""))
    rows = run_dir.metrics.read_text().replace("{", '{"completion_length/mean": 9.0, ')
    run_dir.metrics.write_text(rows)
    row = {"settings": dict(design.resolved), "status": "finished", "peak_mib": 100.0}
    file.write_text(json.dumps(row))
    return ["compare", str(toml), "--presets", "tunix"], file, row


SHORT = {
    *("preset", "seed", "samples_per_s", "seconds_to_reward", "accuracy_after"),
    *("staleness_mean", "tokens_wasted_share"),
}


def test_short_rows_have_the_keys_that_other_programs_read(made, tmp_path):
    command, file, row = made
    row["settings"]["loss.correction_high"] = math.inf  # as the preset nemo_rl has it
    out = tmp_path / "rows.json"
    assert main([*command, "--json", str(out), "--loss.correction_high=inf"]) == 2  # other settings
    file.write_text(json.dumps(row))
    assert main([*command, "--json", str(out), "--loss.correction_high=inf"]) == 0
    (short,) = json.loads(out.read_text())
    assert short.keys() >= SHORT
    assert (short["preset"], short["seed"], short["status"]) == ("tunix", 0, "finished")
    measured = result_of(file)[0][0]
    assert short["samples_per_s"] == measured["samples_per_s"] == 128
    assert short["accuracy_after"] == measured["accuracy"]
    assert short["staleness_mean"] == measured["mean_staleness"]
    assert short["tokens_wasted_share"] == measured["wasted_share"]
    assert short["seconds_to_reward"] is None  # without --target
    assert "Infinity" not in file.parents[1].joinpath("results.json").read_text()


def result_of(file):
    folder = file.parents[1]
    result = json.loads((folder / "results.json").read_text())
    return result["rows"], (folder / "table.md").read_text()


def test_repeated_command_measures_finished_runs_without_making_them_again(made, capsys):
    command, file, _ = made
    assert main(command) == 0
    ((row,), table) = result_of(file)
    assert (row["design"], row["samples_per_s"], row["peak_mib"]) == ("tunix", 128, 100.0)
    assert "| tunix | 128.00 |" in table
    assert "seed 0 ..." not in capsys.readouterr().out


def test_run_made_before_its_preset_changed_is_refused(made, capsys):
    command, file, row = made
    row["settings"] |= {"weights.interrupt": "swap", "loss.correction_high": 2.0}
    file.write_text(json.dumps(row))
    assert main(command) == 2
    error = capsys.readouterr().err
    assert "of a run with other settings (weights.interrupt, loss.correction_high);" in error


@pytest.mark.parametrize("text", ['{"settings": {"mo', "[]", '{"settings": "model = 1"}'])
def test_row_that_cannot_be_read_is_refused_before_any_run(made, text, capsys):
    command, file, _ = made
    file.write_text(text)
    assert main(command) == 2
    assert f"{file} is not of this version of millrace; remove it" in capsys.readouterr().err


def test_run_without_metrics_is_a_row_with_its_reason(made):
    command, file, _ = made
    (file.with_suffix("") / "metrics.jsonl").unlink()
    assert main(command) == 1
    ((row,), table) = result_of(file)
    assert row["status"] == "failed"
    assert "- tunix failed with seed 0: " in table
    assert f"{file.with_suffix('')} has no metrics; remove it to repeat its run." in table


def test_damaged_run_is_a_row_with_its_reason(made):
    command, file, _ = made
    (file.with_suffix("") / "summary.json").write_text("{}")
    assert main(command) == 1
    assert "- tunix failed with seed 0: KeyError('accuracy_after')" in result_of(file)[1]


@pytest.mark.slow
def test_run_whose_directory_was_removed_is_made_again(made, capsys):
    command, file, row = made
    shutil.rmtree(file.with_suffix(""))
    assert main(command) == 1  # it has no tasks
    assert "tunix, seed 0 ..." in capsys.readouterr().out
    assert "There are no tasks" in result_of(file)[0][0]["error"]
    kept = json.loads(file.read_text())
    assert (kept["status"], kept["settings"]) == ("failed", row["settings"])


def test_runs_side_by_side_have_cores_of_their_own():
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        pytest.skip("there is one core")
    together = threading.Barrier(2, timeout=20)
    show = [sys.executable, "-c", "import os; print(*os.sched_getaffinity(0))"]

    def cores_of_a_child(_):
        together.wait()
        output = subprocess.run(show, capture_output=True, text=True, check=True).stdout
        return {int(core) for core in output.split()}

    with side_by_side(2) as pool:
        first, second = pool.map(cores_of_a_child, range(2))
    assert not first & second
    assert len(first) == len(second) == len(cores) // 2
    assert sorted(os.sched_getaffinity(0)) == cores


def test_more_runs_than_cores_share_all_of_them():
    available = os.sched_getaffinity(0)
    assert core_shares(len(available) + 1) == [available] * (len(available) + 1)


def test_memory_of_gpus_that_are_hidden_is_not_counted(tmp_path, monkeypatch):
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\necho 512\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert used_gpu_mib() == 512
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert used_gpu_mib() == 0


def test_comparison_without_runs_is_refused(toml, capsys):
    assert main(["compare", str(toml), "--seeds", "0"]) == 2
    assert "--seeds and --parallel are 1 or more" in capsys.readouterr().err


@pytest.mark.slow
def test_failed_run_is_a_row_and_the_same_command_makes_what_is_missing(tmp_path, capsys):
    project = make_project(tmp_path / "project", trainer={"steps": 2})
    (project / "broken.toml").write_text(
        (project / "run.toml").read_text().replace('"tasks.jsonl"', '"missing.jsonl"')
    )
    command = ["compare", str(project / "run.toml"), str(project / "broken.toml")]
    command += ["--presets", "trl_sync", "--sampling.max_new_tokens", "8"]
    assert main(command) == 1
    out = project / "compare"
    result = json.loads((out / "results.json").read_text())
    good, bad = result["rows"]
    assert (good["design"], good["status"]) == ("run, trl_sync", "finished")
    assert good["staleness"] == {"0": 1.0}
    assert good["peak_mib"] > 100
    assert (bad["status"], "missing.jsonl" in bad["error"]) == ("failed", True)
    assert "broken, trl_sync failed with seed 0" in (out / "table.md").read_text()
    assert "run, trl_sync" in (out / "page.html").read_text()
    capsys.readouterr()
    assert main(command) == 1
    printed = capsys.readouterr().out
    assert "run, trl_sync, seed 0 ..." not in printed
    assert "broken, trl_sync, seed 0 ..." in printed
    assert main([*command, "--trainer.steps", "3"]) == 2
    assert "is of a run with other settings" in capsys.readouterr().err


@pytest.mark.slow
def test_parallel_runs_run_at_the_same_time(tmp_path):
    """A scorer of each waits for that of the other."""
    project = make_project(tmp_path / "project", trainer={"steps": 1}, scoring={"workers": 1})
    (project / "rewards.py").write_text(TOGETHER)
    command = ["compare", str(project / "run.toml"), "--sweep", "buffer.max_staleness=1,2"]
    assert main([*command, "--parallel", "2"]) == 0
    rows = json.loads((project / "compare" / "results.json").read_text())["rows"]
    assert [row["status"] for row in rows] == ["finished", "finished"]
    assert not (project / "alone").exists()


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="the kernel ends the run")
def test_killed_comparison_ends_its_run_and_the_same_command_resumes_it(tmp_path):
    project = make_project(tmp_path / "project", checkpoint={"every_steps": 2})
    command = ("compare", "run.toml", "--sweep", "buffer.max_staleness=1", "--trainer.steps", "60")
    run_dir = project / "compare" / "buffer.max_staleness=1" / "seed_0"
    killed = Command(*command, folder=project)
    killed.wait_for(run_dir / "metrics.jsonl", lines=3)
    family = psutil.Process(killed.process.pid).children(recursive=True)
    killed.process.kill()
    killed.finish()
    _, alive = psutil.wait_procs(family, timeout=20)
    assert not alive
    assert len(steps_in(run_dir / "metrics.jsonl")) < 60
    begun = json.loads(run_dir.with_suffix(".json").read_text())
    assert begun["settings"]["trainer.steps"] == 60, "a changed command cannot resume it"

    code, printed, _ = Command(*command, folder=project).finish()
    assert code == 0, printed
    assert steps_in(run_dir / "metrics.jsonl") == [*range(1, 61)]
    (row,) = json.loads((project / "compare" / "results.json").read_text())["rows"]
    assert row["peak_mib"] is None, "the memory of its first part was not recorded"
