import subprocess
import sys

import numpy as np
import pytest
from matplotlib.figure import Figure
from synthetic_run import make_run, metrics_row, spans

from millrace.core.spans import Span
from millrace.monitoring.files.metrics import MetricsLog
from millrace.monitoring.report.plots import (
    _colours,
    _from_first_work,
    _share_per_bin,
    _staleness,
    _tracks,
    render_plots,
)
from millrace.monitoring.run_dir import RunDir

PNG = b"\x89PNG\r\n\x1a\n"


@pytest.mark.parametrize("steps", [4, 200])
@pytest.mark.parametrize("finished", [True, False])
def test_run_gives_three_plots(tmp_path, steps, finished):
    run_dir = make_run(tmp_path / "x", steps=steps, finished=finished)
    written = render_plots(run_dir.path)
    assert [path.name for path in written] == ["reward.png", "staleness.png", "timeline.png"]
    for path in written:
        assert path.parent == run_dir.plots
        assert path.read_bytes().startswith(PNG)


def test_reward_of_several_parts_gives_a_plot_of_them(tmp_path):
    run_dir = make_run(tmp_path / "x", steps=4)
    log = MetricsLog(run_dir.metrics, resume_from=4)
    for step, parts in ((5, {"correct": 0.5, "format": 1.0}), (6, {"format": None})):
        log.write(
            {**metrics_row(step), "rewards": {name: {"mean": part} for name, part in parts.items()}}
        )
    log.close()
    written = render_plots(run_dir.path)
    assert [path.name for path in written][:2] == ["reward.png", "parts.png"]
    assert written[1].read_bytes().startswith(PNG)


def test_run_without_steps_gives_no_plot(tmp_path):
    (tmp_path / "x").mkdir()
    assert render_plots(RunDir(tmp_path / "x").path) == []


@pytest.mark.parametrize(("most", "ticks"), [(0, [0]), (2, [0, 1, 2]), (69, range(0, 70, 10))])
def test_staleness_axis_ends_with_the_stalest_token(most, ticks):
    figure = Figure()
    shares = {f"staleness/share/{age}": 1 / (most + 1) for age in range(most + 1)}
    _staleness(figure, [{"step": 1, **shares}])
    (axes,) = figure.axes
    low, high = axes.get_xlim()
    assert [tick for tick in axes.get_xticks() if low <= tick <= high] == [*ticks]


def test_matplotlib_is_not_imported_before_a_plot_is_drawn():
    code = "import sys, millrace.monitoring.report.plots; print('matplotlib' in sys.modules)"
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


def test_shares_per_bin_split_spans_at_the_edges():
    found = [
        Span(worker="w", name="step", busy=True, start_s=start, end_s=end)
        for start, end in ((0.5, 1.5), (2.0, 2.25))
    ]
    shares = _share_per_bin(found, np.array([0.0, 1.0, 2.0, 3.0]))
    np.testing.assert_allclose(shares, [0.5, 0.5, 0.25])
    np.testing.assert_allclose(_share_per_bin([], np.array([0.0, 1.0])), [0.0])


def test_work_and_waiting_never_share_a_colour():
    colours = _colours(spans(5))
    busy = {colour for (_, is_busy), colour in colours.items() if is_busy}
    waiting = {colour for (_, is_busy), colour in colours.items() if not is_busy}
    assert len(busy) == 5
    assert len(waiting) == 3
    assert not busy & waiting


def test_timeline_starts_with_the_first_work_of_an_engine_or_the_trainer():
    def span(worker, name, start_s, end_s, *, busy=True):
        return Span(worker=worker, name=name, busy=busy, start_s=start_s, end_s=end_s)

    spans = [
        span("engine-0", "load", 0, 20),
        span("engine-0", "generate", 20, 24),
        span("trainer", "load", 0, 15),
        span("trainer", "generation", 15, 22, busy=False),
        span("scorer-0", "exact", 3, 4),
    ]
    found = [(s.worker, s.name, s.start_s, s.end_s) for s in _from_first_work(spans)]
    assert found == [("engine-0", "generate", 0, 4), ("trainer", "generation", 0, 2)]
    assert [s.name for s in _from_first_work(spans[:1])] == ["load"]  # there is nothing else


def test_many_workers_share_tracks_by_role():
    workers = [*(f"engine-{n}" for n in range(16)), "trainer", "scorer-0", "scorer-1"]
    assert list(_tracks(workers)) == ["16 engines", "trainer", "2 scorers"]
    assert list(_tracks(workers[-3:])) == workers[-3:]
