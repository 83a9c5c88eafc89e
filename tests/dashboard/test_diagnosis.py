"""The sentences of the dashboard: what limits a run, and what looks wrong."""

import pytest

from millrace.dashboard.diagnosis import MetricColumns, diagnose, find_alerts, waits_of

SETTINGS = {
    "buffer.max_staleness": 2,
    "engine.count": 1,
    "scorers": [{"function": "rewards.py:slow"}, {"type": "judge"}],
    "scoring.workers": 2,
}


def recent(engine: float, trainer: float, **waits: float) -> dict[str, float]:
    """`waits`: shares by worker and reason, such as trainer__scores."""
    names = {key.replace("__", "/"): share for key, share in waits.items()}
    return {
        "busy/engine": engine,
        "busy/trainer": trainer,
        **{f"waiting/{name}": share for name, share in names.items()},
    }


@pytest.mark.parametrize(
    ("metrics", "start", "setting"),
    [
        (recent(0.98, 0.4, trainer__generation=0.6), "Generation limits", "engine.count"),
        (recent(0.5, 0.97, engine__buffer_full=0.5), "Training limits", "trainer.ranks"),
        (
            recent(0.5, 0.5, engine__staleness_limit=0.5, trainer__generation=0.5),
            "Engines and trainer take turns",
            "buffer.max_staleness",
        ),
        (
            recent(0.3, 0.3, engine__max_running_groups=0.7, trainer__generation=0.7),
            "Too few groups",
            "rollout.max_running_groups",
        ),
        (
            recent(0.4, 0.2, engine__tasks=0.6, trainer__generation=0.8),
            "Episodes wait",
            "environment.workers",
        ),
        (
            recent(0.6, 0.3, trainer__scores=0.7) | {"scorer/slow/busy": 0.9},
            "Scoring limits",
            "scoring.workers",
        ),
        (
            recent(0.6, 0.3, trainer__scores=0.7)
            | {"scorer/slow/busy": 0.1, "scorer/judge/busy": 1.0},
            "Scoring limits",
            "scorers.concurrency",
        ),
        (recent(0.97, 0.95, trainer__generation=0.05), "No stage limits", None),
        ({}, "The run has not finished a step", None),
    ],
)
def test_diagnosis_names_the_stage_and_the_setting(metrics, start, setting):
    found = diagnose(metrics, SETTINGS)

    assert found["sentence"].startswith(start)
    assert found["setting"] == setting
    assert setting is None or setting in found["sentence"]


def test_diagnosis_says_what_the_setting_is_now():
    found = diagnose(recent(0.98, 0.4, trainer__generation=0.6), SETTINGS)

    assert found["sentence"] == (
        "Generation limits the run: the trainer waits 60% of its time while the engines are 98%"
        " busy; raise engine.count (now 1), or lower sampling.max_new_tokens."
    )


def test_waits_of_a_role_sum_to_its_idle_share():
    metrics = {"busy/engine": 0.75, "waiting/engine-0/tasks": 0.4, "waiting/engine-0/scores": 0.1}

    assert waits_of("engine", metrics) == pytest.approx({"tasks": 0.2, "scores": 0.05})


def columns(steps: int = 60, **series) -> MetricColumns:
    """`series`: a function of the step for each metric, with __ for a slash."""
    metrics = MetricColumns()
    for step in range(1, steps + 1):
        row = {key.replace("__", "/"): value(step) for key, value in series.items()}
        metrics.append({"step": step, "time_s": 2.0 * step, **row})
    return metrics


def kinds(metrics: MetricColumns, *, idle_s: float | None = None) -> list[str]:
    return [alert["kind"] for alert in find_alerts(metrics, idle_s=idle_s)]


@pytest.mark.parametrize(
    ("idle_s", "expected"), [(5.0, []), (59.0, []), (61.0, ["stall"]), (None, [])]
)
def test_stall_needs_a_live_run_without_steps(idle_s, expected):
    assert kinds(columns(), idle_s=idle_s) == expected


def test_stall_allows_for_long_steps():
    slow = columns(5, time_s=lambda step: 600.0 * step)

    assert kinds(slow, idle_s=3000.0) == []
    assert kinds(slow, idle_s=6001.0) == ["stall"]


@pytest.mark.parametrize(
    ("series", "expected"),
    [
        ({"entropy": lambda step: 1.0 / step**2}, ["entropy"]),
        ({"entropy": lambda step: 1.0 - step / 100}, []),
        ({"entropy": lambda _: 0.01}, []),  # low from the start is no collapse
        ({"mismatch__kl_k3": lambda step: 1e-5 * step**2}, ["mismatch"]),
        ({"mismatch__kl_k3": lambda step: 1e-9 * step**2}, []),
        ({"reward__mean": lambda _: 1.0, "reward__std": lambda _: 0.0}, ["reward"]),
        ({"reward__mean": lambda _: 0.5, "reward__std": lambda _: 0.5}, []),
        ({"failed__task": lambda step: step // 30}, ["failures"]),
        ({"failed__task": lambda _: 0, "skipped__steps": lambda _: 0}, []),
    ],
)
def test_alerts_compare_the_start_with_the_newest_steps(series, expected):
    assert kinds(columns(**series)) == expected


def test_no_alert_compares_before_there_are_enough_steps():
    assert kinds(columns(39, entropy=lambda step: 1.0 / step**2)) == []


def test_gaps_in_a_metric_do_not_hide_a_collapse():
    assert kinds(columns(entropy=lambda step: None if step % 3 == 1 else 1.0 / step**2)) == [
        "entropy"
    ]
