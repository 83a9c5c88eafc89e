"""Runs with real processes on a tiny random model."""

import itertools
import json
import os
import shutil
from pathlib import Path

import psutil
import pytest
import torch
from digits import TASKS, share_of_digits
from metrics_page import unknown_metrics
from overlap import first_halves, generating_in, overlap, steps_of
from transformers import AutoModelForCausalLM, AutoTokenizer

import millrace as mr
from millrace.monitoring.files.episodes import read_lifecycle
from millrace.monitoring.files.metrics import read_metrics, table
from millrace.monitoring.files.samples import read_samples
from millrace.monitoring.files.trace import read_trace
from millrace.monitoring.run_dir import RunDir, steps_in
from millrace.training.checkpoints.directory import FoundCheckpoint, newest_checkpoint


def settings_of(model: Path, run_dir: Path) -> dict:
    return {
        "model": str(model),
        "run_dir": str(run_dir),
        "sampling": {"max_new_tokens": 24},
        "rollout": {"group_size": 4},
        "trainer": {"steps": 6, "groups_per_step": 4},
        "optimizer": {"learning_rate": 3e-3},
        "engine": {"max_sequences": 32},
        "cluster": {"threads": 1},
        "scoring": {"workers": 1},
        "checkpoint": {"every_steps": 5},
        "monitoring": {"progress": "off"},
    }


@pytest.fixture
def settings(model, tmp_path) -> dict:
    return settings_of(model, tmp_path / "run")


class Heard:
    """A callback that keeps the names of its calls, and the first argument where it is short."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, object]] = []

    def on_start(self, config):
        self.calls.append(("start", config.trainer.steps))

    def on_group(self, group):
        self.calls.append(("group", len(group.scores)))

    def on_step(self, metrics):
        self.calls.append(("step", metrics["step"]))

    def on_evaluation(self, metrics):
        self.calls.append(("evaluation", metrics["eval/step"]))

    def on_checkpoint(self, path):
        self.calls.append(("checkpoint", path.name))

    def on_end(self, error):
        self.calls.append(("end", error))


@pytest.fixture(scope="module")
def heard() -> Heard:
    """What a callback of the finished run heard."""
    return Heard()


@pytest.fixture(scope="module")
def finished(model, tmp_path_factory, heard) -> mr.RunResult:
    """A finished run that several tests share."""
    return mr.train(
        settings_of(model, tmp_path_factory.mktemp("runs") / "run"),
        tasks=TASKS,
        eval_tasks=TASKS[:8],
        scorers=[share_of_digits],
        trainer={"steps": 12},
        tracker=["tensorboard"],
        callbacks=[heard],
    )


def test_every_step_has_tokens_of_engine_and_trainer_and_the_times_of_its_groups(finished):
    run_dir = RunDir(finished.run_dir)
    for step in range(1, 13):
        episodes = read_samples(run_dir, step)
        life = read_lifecycle(run_dir, step)
        assert life is not None
        assert len(episodes) == len(life.groups) == 4
        for (rollout,) in (episode.rollouts for episode in episodes):
            assert rollout.trainer_logprobs is not None
            pairs = zip(rollout.trainer_logprobs, rollout.engine_logprobs, strict=True)
            gaps = [a - b for a, b in pairs if a is not None and b is not None]
            assert len(gaps) == sum(rollout.trained)
            assert max(map(abs, gaps)) < (1e-4 if step == 1 else 1.0)
            assert max(rollout.versions) < step
        for group in life.groups:
            assert group.ended_s is not None
            assert 0 < group.started_s < group.ended_s <= life.begin_s + 1e-3 < life.end_s
            assert [len(group.turns[index]) for index in range(4)] == [1] * 4
            assert all(turn.end_s <= group.ended_s for (turn,) in group.turns.values())
            assert len(group.scores) == 4


def test_run_directory_has_the_documented_files(finished):
    run_dir = finished.run_dir
    rows = read_metrics(run_dir / "metrics.jsonl")
    assert [row["step"] for row in rows] == list(range(1, 13))
    assert {p.name for p in (run_dir / "checkpoints").iterdir()} == {"step_5", "step_10", "step_12"}
    assert (run_dir / "config.toml").is_file()
    assert steps_in(run_dir / "rollouts") == steps_in(run_dir / "lifecycle") == list(range(1, 13))
    assert list((run_dir / "tensorboard").iterdir())
    summary = json.loads((run_dir / "summary.json").read_text())
    assert summary["accuracy_before"] is not None
    assert summary["accuracy_after"] is not None
    assert summary["episodes"] == finished.episodes == 12 * 4 * 4


def test_callback_hears_of_everything_in_order(finished, heard):
    of = {kind: [what for k, what in heard.calls if k == kind] for kind, _ in heard.calls}
    assert heard.calls[0] == ("start", 12)
    assert heard.calls[-1] == ("end", None)
    assert of["step"] == list(range(1, 13))
    assert of["group"] == [4] * (12 * 4)
    assert of["evaluation"] == [0, 12]
    assert of["checkpoint"] == ["step_5", "step_10", "step_12"]


def test_history_has_a_column_for_each_metric(finished):
    history = finished.history
    rows = read_metrics(finished.run_dir / "metrics.jsonl")
    assert history["step"] == list(range(1, 13))
    assert history["reward/mean"] == [row["reward/mean"] for row in rows]
    assert history["eval/accuracy"][0] == finished.accuracy_before
    assert history["eval/accuracy"][5] is None
    assert {len(column) for column in history.values()} == {12}


def test_run_directory_belongs_to_its_user_alone(finished):
    paths = [finished.run_dir, *finished.run_dir.rglob("*")]
    modes = {path: path.stat().st_mode & 0o777 for path in paths}
    allowed = {path: 0o700 if path.is_dir() else 0o600 for path in paths}
    assert {path: oct(mode) for path, mode in modes.items() if mode != allowed[path]} == {}
    assert len(paths) > 40


def test_rewards_rise(finished):
    rewards = [row["reward/mean"] for row in read_metrics(finished.run_dir / "metrics.jsonl")]
    assert sum(rewards[-3:]) > sum(rewards[:3])


def test_checkpoint_loads_with_transformers_and_has_changed(finished, model):
    trained = AutoModelForCausalLM.from_pretrained(finished.checkpoint)
    AutoTokenizer.from_pretrained(finished.checkpoint)
    original = AutoModelForCausalLM.from_pretrained(model)
    assert any(
        not torch.equal(a, b)
        for a, b in zip(trained.parameters(), original.parameters(), strict=True)
    )


def test_trained_tokens_are_within_the_staleness_limit(finished):
    rows = read_metrics(finished.run_dir / "metrics.jsonl")
    assert unknown_metrics(rows[-1]) == []
    assert {row["trainer/balance"] for row in rows} == {1.0}  # of a single rank
    assert max(row["staleness/max"] for row in rows) <= 2
    assert max(row["staleness/max"] for row in rows) > 0


def test_trace_shows_generation_and_training_at_the_same_time(finished):
    spans = read_trace(finished.run_dir / "trace.json")
    assert {span.worker for span in generating_in(spans)} == {"engine-0"}
    assert overlap(steps_of(spans), generating_in(spans)) > 0.2


@pytest.mark.slow
def test_engine_does_not_wait_for_trainer_while_buffer_has_room(settings):
    """Lengths are long-tailed: the random model ends completions by chance, or at the limit."""
    result = mr.train(
        settings,
        tasks=TASKS,
        scorers=[share_of_digits],
        sampling={"max_new_tokens": 100},
        buffer={"capacity": 1000, "max_staleness": 100},
        trainer={"steps": 10},
    )
    spans = read_trace(result.run_dir / "trace.json")
    engine = [span for span in spans if span.worker == "engine-0"]
    first = min(span.start_s for span in spans if span.name == "step")
    last = max(span.end_s for span in spans if span.name == "step")
    inside = [span for span in engine if span.start_s >= first and span.end_s <= last]
    assert sum(span.name == "generate" for span in inside) > 0
    waiting_s = sum(span.end_s - span.start_s for span in inside if not span.busy)
    assert waiting_s < 0.1 * (last - first)


def test_spans_of_a_worker_have_no_gaps(finished):
    spans = read_trace(finished.run_dir / "trace.json")
    for worker in ("engine-0", "trainer"):
        own = sorted((s for s in spans if s.worker == worker), key=lambda span: span.start_s)
        gaps = [b.start_s - a.end_s for a, b in itertools.pairwise(own)]
        assert max(gaps) < 1e-3


def test_no_process_outlives_the_run(finished):
    assert workers_left() == []


def workers_left() -> list[str]:
    """Command lines of this process's workers, without fork servers, which outlive runs: that of
    workers, and that of tests of ranks."""
    lines = map(_line, psutil.Process().children(recursive=True))
    servers = ("fork_server", "multiprocessing.forkserver")
    return [line for line in lines if "millrace" in line and not any(s in line for s in servers)]


def _line(process: psutil.Process) -> str:
    try:
        return f"{process.pid}: {' '.join(process.cmdline())}"
    except psutil.NoSuchProcess:
        return ""


@pytest.mark.slow
@pytest.mark.parametrize("interrupt", ["swap", "barrier"])
def test_staleness_zero_is_synchronous_and_logprobs_agree(settings, interrupt):
    """Steps are so large that their spans are precise."""
    result = mr.train(
        {**settings, "buffer": {"max_staleness": 0}, "weights": {"interrupt": interrupt}},
        tasks=TASKS,
        eval_tasks=TASKS[:4],
        evaluate={"every_steps": 2},
        scorers=[share_of_digits],
        sampling={"max_new_tokens": 48, "temperature": 0.8, "top_k": 12, "top_p": 0.9},
        rollout={"group_size": 8},
        trainer={"groups_per_step": 8},
    )
    rows = read_metrics(result.run_dir / "metrics.jsonl")
    assert {row["staleness/max"] for row in rows} == {0}
    assert table(rows[-1], "cancelled") == {}
    assert sum("eval/accuracy" in row for row in rows) >= 2
    assert max(row["mismatch/logprob"] for row in rows) < 1e-5
    assert max(abs(row["ratio/mean"] - 1) for row in rows) < 1e-4
    spans = read_trace(result.run_dir / "trace.json")
    # On a busy machine spans are recorded late. In an asynchronous run the overlap would be near 1.
    assert overlap(first_halves(steps_of(spans)), generating_in(spans)) < 0.5


@pytest.mark.slow
def test_resume_uses_the_newest_good_checkpoint_also_with_more_engines(finished, settings, capsys):
    run_dir = Path(settings["run_dir"])
    shutil.copytree(finished.run_dir, run_dir)
    with (run_dir / "checkpoints" / "step_12" / "model.safetensors").open("r+b") as weights:
        weights.seek(-1, os.SEEK_END)
        weights.write(b"\xff")  # differs from every trained weight
    result = mr.train(
        settings,
        tasks=TASKS,
        scorers=[share_of_digits],
        resume=True,
        trainer={"steps": 15},
        engine={"count": 2},
        monitoring={"progress": "lines"},
    )
    assert "step_12' is not used: it has a damaged model.safetensors" in capsys.readouterr().out
    assert result.steps == 15
    assert result.episodes == 5 * 4 * 4  # from step_10 on
    rows = read_metrics(run_dir / "metrics.jsonl")
    assert [row["step"] for row in rows] == list(range(1, 16))
    assert rows[12]["version"] == 13
    assert newest_checkpoint(run_dir) == FoundCheckpoint(directory=result.checkpoint)
    assert {p.name for p in (run_dir / "checkpoints").iterdir()} == {
        "step_10",
        "step_12",  # damaged, but newer than the checkpoints that are kept
        "step_15",
        "step_5",
    }


def test_finished_run_is_not_overwritten(finished, model):
    with pytest.raises(mr.MillraceError, match="already holds a run"):
        mr.train(settings_of(model, finished.run_dir), tasks=TASKS, scorers=[share_of_digits])


@pytest.fixture(scope="module")
def troubled(model, tmp_path_factory) -> mr.RunResult:
    """A run with several updates per step, a reward that fails for some tasks, and a prompt that is
    too long."""

    def sometimes(completions, prompts, **columns):
        if prompts[0].startswith("3"):
            raise ValueError("three is not allowed")
        return share_of_digits(completions)

    return mr.train(
        settings_of(model, tmp_path_factory.mktemp("troubled") / "run"),
        tasks=[*TASKS[::6], {"prompt": "1+" * 100, "answer": "x"}],  # 2 of 12 begin with 3
        scorers=[sometimes],
        trainer={"minibatches": 2, "steps": 8},
        loss={"type": "decoupled_ppo", "high": 0.3, "correction_high": float("inf")},
        scoring={"advantages": {"type": "batch"}},
    )


def test_failing_reward_and_long_prompt_cost_only_their_groups(troubled):
    rows = read_metrics(troubled.run_dir / "metrics.jsonl")
    assert troubled.steps == 8
    assert rows[-1]["failed/score"] > 0
    assert rows[-1]["failed/task"] >= 1


@pytest.mark.slow  # tests/controller/test_dispatcher.py checks the rule and the message
def test_reward_that_always_fails_ends_the_run_with_its_reason(settings):
    def broken(completions, **columns):
        return [float("nan")] * len(completions)

    with pytest.raises(
        mr.MillraceError, match=r"of the last .* groups failed.*'broken' returned nan"
    ):
        mr.train(settings, tasks=TASKS, scorers=[broken])
    assert workers_left() == []


def test_run_with_minibatches_makes_several_updates_per_version(troubled):
    rows = read_metrics(troubled.run_dir / "metrics.jsonl")
    assert [row["version"] for row in rows] == list(range(1, 9))
    assert all(row["batch/proximal_microbatches"] == 2 for row in rows)
    assert all(0 < row["ratio/effective_sample_size"] <= 1 for row in rows)
    samples = (troubled.run_dir / "rollouts" / "step_1.jsonl").read_text().splitlines()
    assert {json.loads(line)["advantage"] for line in samples} != {0.0}
