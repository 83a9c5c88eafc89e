import io
from dataclasses import replace

import pytest
from rich.console import Console

from millrace.monitoring.activity import Shares
from millrace.monitoring.terminal.progress import (
    LineProgress,
    LiveProgress,
    ProgressDisplay,
    RunView,
    make_progress,
    progress_line,
)
from millrace.monitoring.terminal.snapshot import RunGauges, RunSnapshot

ENGINE = Shares(busy=0.94, doing={"generate": 0.94}, waiting={"staleness limit": 0.06})
TRAINER = Shares(busy=0.41, doing={"step": 0.41}, waiting={"generation": 0.55, "scores": 0.04})
GAUGES = RunGauges(
    version=78,
    buffer_depth=6,
    groups_running=32,
    groups_dropped={"too stale": 3},
    groups_failed={"reward raised": 1},
)
SNAPSHOT = RunSnapshot(
    run_dir="runs/demo",
    gauges=GAUGES,
    steps=120,
    elapsed_s=83,
    eta_s=42,
    values=tuple(step / 100 for step in range(78)),
    evaluations=(0.34, 0.88),
    samples_per_s=812,
    tokens_per_s=10234,
    buffer_capacity=64,
    staleness_mean=1.13,
    staleness_max=2,
    workers={"engine-0": ENGINE, "trainer": TRAINER},
)


EMPTY = RunSnapshot(run_dir="x", gauges=RunGauges(version=0), steps=9, elapsed_s=0)


def with_gauges(**changes) -> RunSnapshot:
    return replace(SNAPSHOT, gauges=replace(GAUGES, **changes))


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def drawn(snapshot: RunSnapshot, *, width: int) -> list[str]:
    console = Console(width=width, file=io.StringIO(), record=True)
    console.print(RunView(snapshot))
    return console.export_text().splitlines()


@pytest.mark.parametrize("width", [60, 80, 120, 200])
def test_run_view_keeps_its_frame_at_every_width(width):
    for snapshot in (SNAPSHOT, EMPTY):
        lines = drawn(snapshot, width=width)
        assert {len(line) for line in lines} == {width}
        assert lines[0].startswith("╭─ millrace ")
        assert all(line[0] == line[-1] == "│" for line in lines[1:-1])


def test_at_80_columns_nothing_is_cut_short():
    text = "\n".join(drawn(SNAPSHOT, width=80))
    assert "…" not in text
    for expected in (
        "runs/demo",
        "78/120  1:23 · 0:42 left",
        "now 0.770",
        "accuracy 0.34 → 0.88",
        "94% busy  waits: staleness limit",
        "41% busy  waits: generation",
        "6/64 groups, 32 running",
        "812 samples/s · 10.2k tokens/s",
        "mean 1.13 · max 2 · version 78",
        "3 (too stale 3)",
        "1 (reward raised 1)",
    ):
        assert expected in text


def test_wasted_tokens_are_shown_as_a_share():
    wasteful = replace(with_gauges(tokens_wasted={"dropped": 30}), tokens_generated=2000)
    assert any("tokens/s · 1.5% of them wasted" in line for line in drawn(wasteful, width=80))
    assert not any("wasted" in line for line in drawn(SNAPSHOT, width=80))


def test_a_worker_that_never_waits_needs_no_reason():
    busy = Shares(busy=1.0, doing={"generate": 1.0}, waiting={"tasks": 1e-6})
    lines = drawn(replace(SNAPSHOT, workers={"engine-0": busy}), width=80)
    assert not any("waits" in line for line in lines)


def test_starting_worker_is_shown_as_starting():
    lines = drawn(replace(SNAPSHOT, workers={"engine-0": None}), width=80)
    assert any("engine-0" in line and "starting" in line for line in lines)


def test_many_workers_are_shown_by_role():
    workers = {f"engine-{number}": ENGINE for number in range(8)} | {"trainer": TRAINER}
    text = "\n".join(drawn(replace(SNAPSHOT, workers=workers), width=80))
    assert "engines " in text
    assert "engine-3" not in text


def test_live_redraws_at_most_four_times_a_second_and_ends_on_the_last_state():
    clock, out = Clock(), io.StringIO()
    live = LiveProgress(Console(file=out, force_terminal=True, width=80), now=clock)
    live.start()
    for step in range(100):
        clock.now_s = step / 50  # two seconds in all
        live.show(with_gauges(version=step))
    redrawn = out.getvalue().count("╭─")
    assert 6 <= redrawn <= 8
    live.note("checkpoint written")
    live.stop()
    assert "checkpoint written" in out.getvalue()
    assert "99/120" in out.getvalue().rpartition("╭─")[2]


def test_lines_come_at_most_every_other_second_and_for_the_last_step():
    clock, out = Clock(), io.StringIO()
    lines = LineProgress(Console(file=out, width=40), now=clock)
    lines.start()
    for step in range(1, 121):
        clock.now_s = step / 10  # twelve seconds in all
        lines.show(with_gauges(version=step))
        lines.show(with_gauges(version=step))
    lines.stop()
    printed = out.getvalue().splitlines()
    assert [line.split(" |")[0] for line in printed] == [
        f"step {step}/120" for step in (20, 40, 60, 80, 100, 120)
    ]


def test_lines_have_a_heartbeat_while_no_step_completes():
    clock, out = Clock(), io.StringIO()
    lines = LineProgress(Console(file=out), now=clock)
    lines.start()
    for second in range(70):
        clock.now_s = float(second)
        lines.show(with_gauges(version=0))
    assert out.getvalue().count("step 0/120") == 2


def test_the_last_line_is_printed_when_a_run_stops_early():
    clock, out = Clock(), io.StringIO()
    lines = LineProgress(Console(file=out), now=clock)
    lines.start()
    lines.show(with_gauges(version=5))
    assert out.getvalue() == ""
    lines.stop()
    assert out.getvalue().startswith("step 5/120 |")


def test_line_has_every_part():
    assert progress_line(SNAPSHOT) == (
        "step 78/120 | reward 0.770 | accuracy 0.880 | 812 samples/s | 10.2k tokens/s"
        " | buffer 6/64 | staleness 1.13 (max 2) | engine 94% busy"
        " | trainer 41% busy (waits: generation) | dropped 3 (too stale 3)"
        " | failed 1 (reward raised 1) | 1:23, 0:42 left"
    )


def test_skipped_steps_are_shown_if_there_are_any():
    shot = with_gauges(steps_skipped=2)
    assert "skipped 2 (steps that were not finite 2)" in progress_line(shot)
    out = io.StringIO()
    for one in (SNAPSHOT, shot):
        Console(file=out, width=80).print(RunView(one))
    assert out.getvalue().count("skipped     2 (steps that were not finite 2)") == 1


def test_rows_without_a_case_and_idle_scorers_are_hidden():
    idle = Shares(busy=0.001, doing={"score": 0.001}, waiting={"work": 0.999})
    busy = Shares(busy=0.2, doing={"score": 0.2}, waiting={"work": 0.8})
    workers = {**SNAPSHOT.workers, "scorer-0": idle, "scorer-1": busy, "environment-0": None}
    shot = replace(with_gauges(groups_dropped={"too stale": 0}, groups_failed={}), workers=workers)
    text = "\n".join(drawn(shot, width=80))
    for hidden in ("dropped", "cancelled", "failed", "restarts", "skipped", "scorer-0"):
        assert hidden not in text
    assert "scorer-1" in text
    assert "environment" in text  # it is still starting
    assert "scorer 20% busy" in progress_line(shot)
    only_idle = replace(shot, workers={**SNAPSHOT.workers, "scorer-0": idle})
    assert "scorer" not in progress_line(only_idle)


def test_auto_is_live_in_a_terminal_and_lines_elsewhere():
    terminal = Console(file=io.TextIOWrapper(io.BytesIO(), encoding="utf-8"), force_terminal=True)
    latin = Console(file=io.TextIOWrapper(io.BytesIO(), encoding="latin-1"), force_terminal=True)
    pipe = Console(file=io.StringIO())
    assert isinstance(make_progress("auto", console=terminal), LiveProgress)
    assert isinstance(make_progress("auto", console=latin), LineProgress)
    assert isinstance(make_progress("auto", console=pipe), LineProgress)
    assert isinstance(make_progress("live", console=pipe), LiveProgress)
    assert type(make_progress("off", console=terminal)) is ProgressDisplay


def test_startup_phases_are_lines_from_the_first_second():
    out = io.StringIO()
    lines = LineProgress(Console(file=out, width=80), now=Clock())
    lines.starting("run", "starting the workers")
    lines.starting("engine-0", "loading the model")
    lines.stop()
    assert out.getvalue() == "run: starting the workers\nengine-0: loading the model\n"


def test_live_startup_view_makes_room_for_the_run():
    clock, out = Clock(), io.StringIO()
    live = LiveProgress(Console(file=out, force_terminal=True, width=80), now=clock)
    live.starting("engine-0", "loading the model")
    clock.now_s = 7.0
    live.starting("trainer", "starting the process")
    view = Console(file=io.StringIO(), width=60, record=True)
    view.print(live.startup())
    assert "engine-0    loading the model  0:07" in view.export_text()
    live.start()
    live.show(SNAPSHOT)
    live.stop()
    assert "loading the model" not in out.getvalue().rpartition("╭")[2]


def test_evaluation_progress_is_shown():
    shot = with_gauges(version=0, evaluating=(12, 256))
    assert progress_line(shot).startswith("step 0/120 | evaluating 12/256 |")
    assert any("evaluating 12/256" in line for line in drawn(shot, width=80))
    clock, out = Clock(), io.StringIO()
    lines = LineProgress(Console(file=out, width=80), now=clock)
    lines.start()
    for second in range(12):
        clock.now_s = float(second)
        lines.show(shot)
    assert out.getvalue().count("evaluating 12/256") == 2
