"""Plots of a run directory: reward.png, parts.png of its parts, staleness.png and timeline.png.

Matplotlib is imported only when a plot is drawn, and without pyplot: no window, no global state.
"""

import itertools
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

import numpy as np

from millrace.core.spans import Span
from millrace.monitoring.activity import ROLES, STARTING, in_order, role_of
from millrace.monitoring.files.metrics import read_metrics, table
from millrace.monitoring.files.trace import read_trace
from millrace.monitoring.report.summary import accuracy_by_step
from millrace.monitoring.run_dir import RunDir
from millrace.monitoring.terminal.text import duration

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

INK, FAINT = "#22303c", "#d5dbe1"
ORANGE = "#e07b39"
SMOOTH_SHARE = 0.05  # the smooth reward line averages this share of the run's steps
DPI = 150
MAX_LABELLED_BARS = 16  # of more, the labels would overlap

BUSY_COLOURS = ("#2f6fb7", "#2a9d6f", "#8e63b8", "#c9518b", "#4aa8b5", "#7a8a3a", "#5b6b7a")
WAITING_COLOURS = ("#f6dcae", "#f3c9c0", "#dcd8f0", "#d3e8d3", "#e3e7ea")
STARTING_COLOUR = "#cfd6dc"
IDLE, IDLE_COLOUR = "no work", "#eff2f4"  # an idle scorer is no reason to worry
TRACK_HEIGHT = 0.72  # tracks are 1 apart
MAX_TRACKS = 10
BINS = 400  # columns of the timeline

Activity = tuple[str, bool]  # name, busy


def render_plots(path: Path) -> list[Path]:
    """Draw every plot that has data into RUN_DIR/plots; returns the files written."""
    run_dir = RunDir(path)
    rows = read_metrics(run_dir.metrics)
    spans = read_trace(run_dir.trace)
    run_dir.plots.mkdir(exist_ok=True)
    plots: dict[str, tuple[Any, ...]] = {}  # by name: the function that draws it, and its data
    if any("reward/mean" in row for row in rows):
        accuracy = accuracy_by_step(rows, run_dir.read_summary())
        label = {"reward/mean": "mean reward (smoothed)"}
        plots["reward"] = (_curves, rows, label, "Reward", accuracy)
    elif rows:  # of supervised fine-tuning
        labels = {"loss": "loss", "eval/loss": "eval/loss"}
        plots["loss"] = (_curves, rows, labels, "Loss", {})
    if len(names := {name for row in rows for name in table(row, "rewards", suffix="/mean")}) > 1:
        labels = {f"rewards/{name}/mean": name for name in sorted(names)}
        plots["parts"] = (_curves, rows, labels, "Parts of the reward", {})
    if any("staleness/mean" in row for row in rows):
        plots["staleness"] = (_staleness, rows)
    if spans:
        plots["timeline"] = (draw_timeline, spans)
    return [draw_plot(run_dir.plots / f"{name}.png", *plot) for name, plot in plots.items()]


def draw_plot(path: Path, plot: Callable[..., None], *data: Any) -> Path:
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    style: dict[Any, Any] = {
        **dict.fromkeys(("text.color", "axes.labelcolor", "xtick.color", "ytick.color"), INK),
        **dict.fromkeys(("axes.edgecolor", "grid.color"), FAINT),
        **dict.fromkeys(("axes.spines.top", "axes.spines.right", "legend.frameon"), False),
        "axes.titlesize": 12,
        "axes.titleweight": "bold",
        "axes.titlelocation": "left",
        "axes.titlepad": 10,
        "axes.axisbelow": True,
        "grid.linewidth": 0.7,
    }
    with rc_context(style):
        figure = Figure(figsize=(9.0, 4.0), dpi=DPI, layout="constrained")
        plot(figure, *data)
        figure.savefig(path)
    return path


def _curves(
    figure: "Figure",
    rows: Sequence[dict[str, Any]],
    labels: Mapping[str, str],
    title: str,
    accuracy: Mapping[int, float],
) -> None:
    """Metrics with their moving averages, by key: such as those of scorers, penalties, or roles of
    an episode; and the held-out accuracy by step, if it is known."""
    axes = figure.subplots()
    for colour, (key, label) in zip(itertools.cycle(BUSY_COLOURS), labels.items(), strict=False):
        points = {row["step"]: row[key] for row in rows if row.get(key) is not None}
        steps, values = list(points), list(points.values())
        axes.plot(steps, values, color=colour, alpha=0.3, linewidth=1.0)
        half = max(int(len(values) * SMOOTH_SHARE), 1)
        smooth = [fmean(values[max(i - half, 0) : i + half + 1]) for i in range(len(values))]
        axes.plot(steps, smooth, color=colour, linewidth=2.0, label=label)
    if accuracy:
        at = sorted(accuracy)
        values = [accuracy[step] for step in at]
        axes.plot(at, values, "o--", color=ORANGE, linewidth=1.0, label="held-out accuracy")
        style: dict[str, Any] = {"color": ORANGE, "textcoords": "offset points", "ha": "center"}
        for step, above in {at[0]: -16, at[-1]: 7}.items():  # points; curves rise from the first
            axes.annotate(f"{accuracy[step]:.2f}", (step, accuracy[step]), (0, above), **style)
    axes.set_title(title)
    axes.set_xlabel("step")
    axes.margins(x=0.03, y=0.12)
    axes.grid(axis="y")
    axes.legend(loc="lower right")


def _staleness(figure: "Figure", rows: Sequence[dict[str, Any]]) -> None:
    axes = figure.subplots()
    histograms = [found for row in rows if (found := table(row, "staleness/share"))]
    most = max(int(staleness) for found in histograms for staleness in found)
    at = list(range(most + 1))
    shares = [sum(f.get(str(age), 0.0) for f in histograms) / len(histograms) for age in at]
    bars = axes.bar(at, shares, color=BUSY_COLOURS[0], width=0.7)
    if len(at) <= MAX_LABELLED_BARS:
        labels = [f"{share:.1%}" if share else "" for share in shares]
        axes.bar_label(bars, labels=labels, padding=3, color=INK)
    mean = sum(age * share for age, share in zip(at, shares, strict=True))
    axes.set_title(f"Staleness of trained tokens, {mean:.2f} on average over {len(rows):,} steps")
    axes.set_xlabel("trainer version minus the version that sampled the token")
    axes.set_ylabel("share of tokens")
    axes.set_xlim(-0.9, most + 0.9)
    axes.locator_params(axis="x", integer=True, min_n_ticks=1)
    axes.margins(y=0.12)
    axes.yaxis.set_major_formatter(lambda share, _: f"{100 * share:.3g}%")
    axes.grid(axis="y")


def draw_timeline(figure: "Figure", spans: Sequence[Span]) -> None:
    """A track per worker, or with many workers per role: shares of time, with work in strong
    colours and waiting in pale ones. Time starts with the first work of an engine or the trainer,
    so start-up takes no room."""
    from matplotlib.patches import Patch

    spans = _from_first_work(spans)
    tracks, colours = _tracks(in_order({span.worker for span in spans})), _colours(spans)
    grouped: defaultdict[tuple[str, Activity], list[Span]] = defaultdict(list)
    for span in sorted(spans, key=lambda span: span.start_s):
        grouped[span.worker, (span.name, span.busy)].append(span)
    end_s = max(span.end_s for span in spans)
    edges_s = np.linspace(0.0, end_s, BINS + 1)
    figure.set_figheight(1.9 + 0.55 * len(tracks))
    axes = figure.subplots()
    axes.set_title("Activity of the workers: share of time")
    for track, workers in enumerate(tracks.values()):
        # Each bin is a column, filled from below with the share of each activity, work first.
        top = np.full(BINS, track + TRACK_HEIGHT / 2)  # the axis points down
        for activity, colour in colours.items():
            shares = [_share_per_bin(grouped[worker, activity], edges_s) for worker in workers]
            bottom, top = top, top - TRACK_HEIGHT * np.mean(shares, axis=0)
            axes.stairs(top, edges_s, baseline=bottom, fill=True, color=colour)
    _set_axes(axes, list(tracks), end_s)
    handles: list[Any] = [
        Patch(facecolor=colour, label=name if busy else f"waits: {name}")
        for (name, busy), colour in colours.items()
    ]
    figure.legend(handles=handles, loc="outside lower left", ncols=4, fontsize=9)


def _from_first_work(spans: Sequence[Span]) -> list[Span]:
    """Spans in seconds since an engine or the trainer first worked; earlier ones are left out."""
    work = [span for span in spans if span.busy and span.name not in STARTING]
    main = [span for span in work if role_of(span.worker) in ROLES]
    begin_s = min(span.start_s for span in main or work or spans)
    return [
        replace(span, start_s=max(span.start_s - begin_s, 0.0), end_s=span.end_s - begin_s)
        for span in spans
        if span.end_s > begin_s
    ]


def _tracks(workers: Sequence[str]) -> dict[str, list[str]]:
    """Workers by track: one each, or with many workers one per role."""
    if len(workers) <= MAX_TRACKS:
        return {worker: [worker] for worker in workers}
    roles: dict[str, list[str]] = {}
    for worker in workers:
        roles.setdefault(role_of(worker), []).append(worker)
    return {
        f"{len(members)} {role}s" if len(members) > 1 else members[0]: members
        for role, members in roles.items()
    }


def _share_per_bin(spans: Sequence[Span], edges_s: np.ndarray) -> np.ndarray:
    """[bins] share of each bin that these spans cover; they do not overlap."""
    if not spans:
        return np.zeros(len(edges_s) - 1)
    # The time covered up to t grows linearly within a span and is flat between spans.
    times_s = np.array([(span.start_s, span.end_s) for span in spans])
    lengths_s = times_s[:, 1] - times_s[:, 0]
    covered_s = np.cumsum(lengths_s)[:, None] - np.outer(lengths_s, (1, 0))
    covered_at_s = np.interp(edges_s, times_s.ravel(), covered_s.ravel())
    return np.diff(covered_at_s) / np.diff(edges_s)


def _set_axes(axes: "Axes", tracks: Sequence[str], end_s: float) -> None:
    axes.set_yticks(range(len(tracks)), tracks)
    axes.set_ylim(len(tracks) - 0.5, -0.5)
    axes.set_xlim(0.0, end_s)
    axes.spines["left"].set_visible(False)
    axes.tick_params(axis="y", length=0)
    if end_s < 120:
        axes.set_xlabel("seconds since the first work")
        return
    # A round number of seconds that gives at most ten ticks.
    sizes = (15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 21600, 43200)
    days = 86400.0 * np.ceil(end_s / 864000)
    tick_s = next((size for size in sizes if end_s / size <= 10), days)
    axes.set_xticks(np.arange(0.0, end_s + 1e-9, tick_s))
    axes.xaxis.set_major_formatter(lambda seconds, _: duration(seconds))
    axes.set_xlabel("time since the first work, [h:]mm:ss")


def _colours(spans: Sequence[Span]) -> dict[Activity, str]:
    """Strong colours for work, then pale ones for waiting; in each, longest total time first."""
    seconds: dict[Activity, float] = defaultdict(float)
    for span in spans:
        seconds[span.name, span.busy] += span.end_s - span.start_s
    special = {(name, True): STARTING_COLOUR for name in STARTING} | {(IDLE, False): IDLE_COLOUR}
    colours: dict[Activity, str] = {}
    for busy, palette in ((True, BUSY_COLOURS), (False, WAITING_COLOURS)):
        keys = [key for key in seconds if key[1] is busy and key not in special]
        keys.sort(key=lambda key: -seconds[key])
        # Rare activities share the last colour: a legend must stay readable.
        colours |= {key: palette[min(i, len(palette) - 1)] for i, key in enumerate(keys)}
    return colours | {key: colour for key, colour in special.items() if key in seconds}
