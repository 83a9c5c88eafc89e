"""Runs whose processes are killed at critical moments. Each test proves that it hit the moment."""

import os
import signal
from pathlib import Path

import pytest
from killable_run import KillableRun

from millrace.cli.main import main


@pytest.fixture
def make_run(tmp_path):
    runs: list[KillableRun] = []

    def make(**settings) -> KillableRun:
        runs.append(KillableRun(tmp_path, **settings))
        return runs[-1]

    yield make
    for run in runs:
        run.close()


@pytest.mark.slow
def test_run_killed_after_its_last_checkpoint_is_finished_by_resume(make_run, monkeypatch, capsys):
    run = make_run(steps=3)
    run.start()
    checkpoints = run.path / "checkpoints"
    run.until(lambda: list(checkpoints.glob("*step_3")), every_s=0.001)
    run.controller.suspend()  # the trainer continues
    last = checkpoints / "step_3"
    run.until(last.exists)
    assert not (run.path / "summary.json").exists()
    run.kill()
    run.start("--resume")
    summary = run.summary()
    assert summary["checkpoint"] == str(last)
    assert summary["accuracy_after"] is not None
    monkeypatch.chdir(run.project)
    assert main(["train", "run.toml", "--resume"]) == 2
    assert (
        "has completed its 3 steps; to train further, raise trainer.steps"
        in capsys.readouterr().err
    )


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "killed"), [(1, "trainer"), (2, "trainer-0")])
def test_trainer_killed_during_a_checkpoint_leaves_no_partial_checkpoint(make_run, ranks, killed):
    run = make_run(
        steps=12,
        trainer={"steps": 12, "groups_per_step": 2, "ranks": ranks},
        checkpoint={"every_steps": 1},
        cluster={"threads": 1},
    )
    run.start()
    checkpoints = run.path / "checkpoints"
    trainer = run.until(lambda: run.worker(killed))

    def caught() -> Path | None:
        for unfinished in checkpoints.glob(".unfinished_step_*"):
            trainer.suspend()
            if unfinished.exists():
                return unfinished
            trainer.resume()
        return None

    unfinished = run.until(caught, every_s=0)
    step = unfinished.name.removeprefix(".unfinished_")
    assert not (checkpoints / step).exists()
    trainer.kill()
    summary = run.summary()
    assert summary["restarts"] == {"trainer": 1}
    assert not unfinished.exists()


@pytest.mark.slow
def test_engine_killed_during_swap_and_trainer_killed_during_publish_are_replaced(make_run):
    run = make_run(steps=14)
    run.start()
    run.until(lambda: run.step >= 2)
    engine = run.worker("engine-0")
    assert engine is not None
    engine.suspend()
    last_step = run.wait_for_standstill()  # the engine was sent weights that it does not take
    trainer = run.worker("trainer")
    assert trainer is not None
    trainer.kill()
    engine.resume()
    run.until(lambda: run.step >= last_step + 3)
    engine.suspend()
    assert run.wait_for_standstill() < run.steps
    engine.kill()
    summary = run.summary()
    assert summary["restarts"] == {"engine-0": 1, "trainer": 1}


@pytest.mark.slow
def test_run_survives_repeated_kills_before_its_first_step(make_run):
    run = make_run(steps=4)
    run.start()
    run.until((run.path / "run.lock").exists, every_s=0.001)
    run.kill()  # before there is anything to resume from
    for victim in ("trainer", "engine-0"):
        run.start(*(["--resume"] if (run.path / "config.toml").exists() else []))
        run.until(lambda name=victim: run.worker(name))
        run.kill()
        assert run.step == 0
    run.start("--resume")
    worker = run.until(lambda: run.worker("trainer"))
    worker.kill()  # while it loads; the run restarts it
    scorer = run.until(lambda: run.worker("scorer"))
    scorer.kill()
    summary = run.summary()
    assert summary["restarts"] == {"trainer": 1, "scorer-0": 1}


SLOW_REWARD = """
import os, time
from pathlib import Path

def digits(completions, **columns):
    Path("scoring").write_text(str(os.getpid()))
    time.sleep(0.2)
    Path("scoring").unlink(missing_ok=True)
    return [float(len(text)) for text in completions]
"""


@pytest.mark.slow
def test_scorer_killed_during_a_call_costs_no_group(make_run):
    run = make_run(steps=6, evaluate={})
    (run.project / "rewards.py").write_text(SLOW_REWARD)
    run.start()
    run.until(lambda: run.step >= 1)
    marker = run.project / "scoring"

    def caught() -> int | None:
        scorer = run.worker("scorer")
        if scorer is None or not marker.exists():
            return None
        scorer.suspend()
        if marker.exists() and marker.read_text() == str(scorer.pid):
            return scorer.pid
        scorer.resume()
        return None

    os.kill(run.until(caught, every_s=0.005), signal.SIGKILL)
    run.summary()


@pytest.mark.slow
@pytest.mark.parametrize("damage", ["cut", "garbage"])
def test_run_resumes_from_a_journal_with_a_damaged_end(make_run, damage):
    run = make_run(steps=12, checkpoint={"every_steps": 5})
    run.start()
    run.until(lambda: run.step >= 3)
    run.kill()
    (log,) = (run.path / "journal").glob("*-wal")
    whole = log.read_bytes()
    log.write_bytes(whole[:-7] if damage == "cut" else whole + whole[-200:-3])
    run.start("--resume")
    run.summary()
