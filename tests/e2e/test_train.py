"""Whole runs with real processes on a tiny random model."""

import itertools
import json
from pathlib import Path

import psutil
import pytest
import torch
from tiny_model import make_tiny_model
from transformers import AutoModelForCausalLM, AutoTokenizer

import millrace as mr
from millrace.watch.metrics import read_metrics
from millrace.watch.trace import read_trace

TASKS = [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a in range(8) for b in range(8)]


def share_of_digits(completions, **columns):
    return [sum(c.isdigit() for c in text) / max(len(text), 1) for text in completions]


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def settings(model, tmp_path):
    return {
        "model": str(model),
        "run_dir": str(tmp_path / "run"),
        "sampling": {"max_new_tokens": 24},
        "rollout": {"group_size": 4},
        "trainer": {"steps": 6, "groups_per_step": 4, "learning_rate": 1e-3, "threads": 1},
        "engine": {"threads": 1, "max_sequences": 32},
        "scoring": {"workers": 1},
        "checkpoint": {"every_steps": 3},
        "watch": {"progress": "off"},
    }


@pytest.fixture(scope="module")
def finished(model, tmp_path_factory):
    """One run that several tests look at."""
    run_dir = tmp_path_factory.mktemp("runs") / "run"
    return mr.train(
        model=str(model),
        run_dir=str(run_dir),
        tasks=TASKS,
        eval_tasks=TASKS[:8],
        scorers=[share_of_digits],
        sampling={"max_new_tokens": 24},
        rollout={"group_size": 4},
        trainer={"steps": 12, "groups_per_step": 4, "learning_rate": 3e-3, "threads": 1},
        engine={"threads": 1, "max_sequences": 32},
        scoring={"workers": 1},
        checkpoint={"every_steps": 5},
        watch={"progress": "off", "tensorboard": True},
    )


def test_a_run_leaves_what_the_run_directory_contract_says(finished):
    run_dir = finished.run_dir
    rows = read_metrics(run_dir / "metrics.jsonl")
    assert [row["step"] for row in rows] == list(range(1, 13))
    assert {p.name for p in (run_dir / "checkpoints").iterdir()} == {"step_5", "step_10", "step_12"}
    assert (run_dir / "config.toml").is_file()
    assert list((run_dir / "rollouts").iterdir())
    assert list((run_dir / "tensorboard").iterdir())
    summary = json.loads((run_dir / "summary.json").read_text())
    assert summary["accuracy_before"] is not None
    assert summary["accuracy_after"] is not None
    assert summary["episodes"] == finished.episodes == 12 * 4 * 4


def test_rewards_rise(finished):
    rewards = [row["reward_mean"] for row in read_metrics(finished.run_dir / "metrics.jsonl")]
    assert sum(rewards[-3:]) > sum(rewards[:3])


def test_the_checkpoint_loads_with_transformers_and_is_not_the_model_it_started_from(
    finished, model
):
    trained = AutoModelForCausalLM.from_pretrained(finished.checkpoint)
    AutoTokenizer.from_pretrained(finished.checkpoint)
    original = AutoModelForCausalLM.from_pretrained(model)
    assert any(
        not torch.equal(a, b)
        for a, b in zip(trained.parameters(), original.parameters(), strict=True)
    )


def test_nothing_is_trained_beyond_the_staleness_limit(finished):
    rows = read_metrics(finished.run_dir / "metrics.jsonl")
    assert max(row["staleness_max"] for row in rows) <= 2
    assert max(row["staleness_max"] for row in rows) > 0


def overlap_s(some, others):
    return sum(
        max(0.0, min(a.end_s, b.end_s) - max(a.start_s, b.start_s)) for a in some for b in others
    )


def test_the_trace_shows_generation_and_training_at_the_same_time(finished):
    spans = [span for span in read_trace(finished.run_dir / "trace.json") if span.busy]
    steps = [span for span in spans if span.worker == "trainer" and span.name == "step"]
    generating = [span for span in spans if span.worker == "engine-0" and span.name == "generate"]
    assert overlap_s(steps, generating) > 0.2 * sum(s.end_s - s.start_s for s in steps)


def test_the_engine_never_waits_for_the_trainer_while_the_buffer_has_room(settings):
    """Lengths are long-tailed: the random model ends each completion by chance, or at the limit."""
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
    assert waiting_s < 0.05 * (last - first)


def test_spans_of_a_worker_leave_no_gaps(finished):
    spans = read_trace(finished.run_dir / "trace.json")
    for worker in ("engine-0", "trainer"):
        own = sorted((s for s in spans if s.worker == worker), key=lambda span: span.start_s)
        gaps = [b.start_s - a.end_s for a, b in itertools.pairwise(own)]
        assert max(gaps) < 1e-3


def test_no_process_is_left(finished):
    left = [p for p in psutil.Process().children(recursive=True) if "millrace.workers" in _line(p)]
    assert left == []


def _line(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.NoSuchProcess:
        return ""


def test_at_staleness_zero_they_take_turns_and_their_logprobs_agree(settings):
    result = mr.train(
        {**settings, "buffer": {"max_staleness": 0}},
        tasks=TASKS,
        scorers=[share_of_digits],
        sampling={"max_new_tokens": 24, "temperature": 0.8, "top_k": 12, "top_p": 0.9},
    )
    rows = read_metrics(result.run_dir / "metrics.jsonl")
    assert {row["staleness_max"] for row in rows} == {0}
    assert max(row["logprob_mismatch"] for row in rows) < 1e-5
    assert max(abs(row["ratio_mean"] - 1) for row in rows) < 1e-4
    spans = [span for span in read_trace(result.run_dir / "trace.json") if span.busy]
    steps = [span for span in spans if span.name == "step"]
    generating = [span for span in spans if span.name == "generate"]
    assert overlap_s(steps, generating) < 0.1 * sum(s.end_s - s.start_s for s in steps)


def test_resume_goes_on_from_the_newest_checkpoint(settings):
    mr.train(settings, tasks=TASKS, scorers=[share_of_digits])
    run_dir = Path(settings["run_dir"])
    result = mr.train(
        settings, tasks=TASKS, scorers=[share_of_digits], resume=True, trainer={"steps": 9}
    )
    assert result.steps == 9
    assert result.episodes == 3 * 4 * 4
    rows = read_metrics(run_dir / "metrics.jsonl")
    assert [row["step"] for row in rows] == list(range(1, 10))
    assert rows[6]["version"] == 7


def test_a_finished_run_is_not_overwritten(settings):
    mr.train(settings, tasks=TASKS, scorers=[share_of_digits], trainer={"steps": 1})
    with pytest.raises(mr.MillraceError, match="already holds a run"):
        mr.train(settings, tasks=TASKS, scorers=[share_of_digits])


def test_a_failing_reward_costs_its_groups_only(settings):
    def sometimes(completions, prompts, **columns):
        if prompts[0].startswith("3"):
            raise ValueError("three is not allowed")
        return share_of_digits(completions)

    result = mr.train(settings, tasks=TASKS, scorers=[sometimes], trainer={"steps": 8})
    rows = read_metrics(result.run_dir / "metrics.jsonl")
    assert result.steps == 8
    assert rows[-1]["groups_failed"]["score"] > 0


def test_a_reward_that_always_fails_ends_the_run_with_its_reason(settings):
    def broken(completions, **columns):
        return [float("nan")] * len(completions)

    with pytest.raises(
        mr.MillraceError, match=r"of the last .* groups failed.*'broken' returned nan"
    ):
        mr.train(settings, tasks=TASKS, scorers=[broken])
    assert not [p for p in psutil.Process().children() if "millrace.workers" in _line(p)]


def test_two_engines_share_the_work(settings):
    result = mr.train(
        settings, tasks=TASKS, scorers=[share_of_digits], engine={"count": 2, "threads": 1}
    )
    spans = read_trace(result.run_dir / "trace.json")
    for worker in ("engine-0", "engine-1"):
        assert any(s.worker == worker and s.name == "generate" for s in spans)


def test_one_long_prompt_costs_its_group_only(settings):
    tasks = [*TASKS[:10], {"prompt": "1+" * 100, "answer": "x"}]
    result = mr.train(settings, tasks=tasks, scorers=[share_of_digits], trainer={"steps": 4})
    rows = read_metrics(result.run_dir / "metrics.jsonl")
    assert rows[-1]["groups_failed"]["task"] >= 1


def test_a_run_with_a_recipe_takes_several_updates_per_version(settings):
    settings["trainer"] |= {"minibatches": 2, "steps": 4}
    settings["loss"] = {"type": "decoupled_ppo", "high": 0.3, "correction_high": float("inf")}
    settings["scoring"]["advantages"] = {"type": "batch"}
    result = mr.train(tasks=TASKS, scorers=[share_of_digits], **settings)
    rows = read_metrics(result.run_dir / "metrics.jsonl")
    assert [row["version"] for row in rows] == [1, 2, 3, 4]
    assert all(row["proximal_microbatches"] == 2 for row in rows)
    assert all(0 < row["effective_share"] <= 1 for row in rows)
    samples = (result.run_dir / "rollouts" / "step_1.jsonl").read_text().splitlines()
    assert {json.loads(line)["advantage"] for line in samples} != {0.0}
