"""A run with curriculum, penalties, selection, filters, and evaluations of exact versions."""

import json

import pytest
from metrics_page import unknown_metrics
from tiny_model import make_tiny_model

import millrace as mr
from millrace.monitoring.files.metrics import read_metrics, table
from millrace.monitoring.files.trace import read_trace

pytestmark = pytest.mark.slow

STEPS = 8


def even_first(completions, **columns):
    """A reward that is equal for all episodes of some groups."""
    return [float(text[:1].isdigit() and int(text[0]) % 2 == 0) for text in completions]


@pytest.fixture(scope="module")
def shaped(tmp_path_factory) -> mr.RunResult:
    folder = tmp_path_factory.mktemp("shaped")
    for name, sign in (("sums", "+"), ("products", "*")):
        rows = [json.dumps({"prompt": f"{n}{sign}1="}) for n in range(10)]
        (folder / f"{name}.jsonl").write_text("\n".join(rows))
    tasks = {
        "order": "curriculum",
        "source": {
            "sums": {"path": str(folder / "sums.jsonl"), "weight": 3.0},
            "products": {"path": str(folder / "products.jsonl")},
        },
    }
    return mr.train(
        {"tasks": tasks},
        model=str(make_tiny_model(folder / "model")),
        run_dir=str(folder / "run"),
        eval_tasks=[{"prompt": f"{n}+2="} for n in range(6)],
        scorers=[even_first],
        sampling={"max_new_tokens": 12},
        scoring={
            "workers": 1,
            "penalty": [{"type": "soft_overlong", "max_tokens": 12, "buffer_tokens": 6}],
        },
        rollout={
            "group_size": 3,
            "oversample": 2,
            "selection": "roc",
            "filter": [{"type": "zero_variance"}, {"type": "overlong"}],
        },
        evaluate={"every_steps": 2, "samples": 4, "engines": 1},
        trainer={"steps": STEPS, "groups_per_step": 4},
        weights={"transport": "collective"},  # to the engine and to the evaluator
        cluster={"threads": 1},
        checkpoint={"every_steps": 4},
        monitoring={"progress": "off"},
    )


def test_steps_are_full_of_useful_groups_and_the_others_are_counted(shaped):
    rows = read_metrics(shaped.run_dir / "metrics.jsonl")
    assert unknown_metrics(rows[-1]) == []
    assert shaped.episodes == STEPS * 4 * 3
    assert all(row["reward/std"] > 0 for row in rows)
    assert rows[-1]["tokens/wasted/unselected"] > 0
    assert rows[-1]["tokens/wasted/overlong"] > 0
    dropped = table(rows[-1], "dropped")
    assert dropped.get("zero_variance", 0) + dropped.get("overlong", 0) > 0
    assert all(-1 <= row["rewards/soft_overlong/mean"] <= 0 for row in rows)
    assert {name for row in rows for name in table(row, "reward/source")} == {"sums", "products"}


def test_each_evaluation_uses_exactly_one_version(shaped):
    rows = read_metrics(shaped.run_dir / "metrics.jsonl")
    summary = json.loads((shaped.run_dir / "summary.json").read_text())
    evaluations = [row for row in rows if "eval/accuracy" in row]
    evaluations += [summary["evaluation_before"], summary["evaluation_after"]]
    for row in evaluations:
        assert row["eval/version_min"] == row["eval/version_max"] == row["eval/step"]
        assert row["eval/accuracy"] == row["eval/mean@4"] == pytest.approx(row["eval/pass@1"])
        assert row["eval/pass@1"] <= row["eval/pass@2"] <= row["eval/pass@4"]
    assert summary["evaluation_before"]["eval/step"] == 0
    assert summary["evaluation_after"]["eval/step"] == STEPS


def test_evaluators_only_evaluate(shaped):
    names = {span.name for span in read_trace(shaped.run_dir / "trace.json")
             if span.worker == "evaluator-0" and span.busy}  # fmt: skip
    assert names <= {"load", "compile", "generate", "swap"}
    assert "swap" in names
    assert shaped.after is not None
    assert len(shaped.after.groups) == 6
    assert {len(group.episodes) for group in shaped.after.groups} == {4}


def test_checkpoint_contains_the_state_of_the_curriculum(shaped):
    state = json.loads((shaped.run_dir / "checkpoints" / "step_4" / "run_state.json").read_text())
    assert set(state["tasks"]) == {"sums", "products"}
    for source in state["tasks"].values():
        assert source["num_tasks"] == 10
        assert source["solve_rates"]
    num_open = sum(len(source["drawn"]) for source in state["tasks"].values())
    assert 0 < num_open <= len(state["unfinished"])
