"""Plots of a run directory: reward.png, parts.png for rewards of several parts, staleness.png and
timeline.png.

Matplotlib is imported only when a plot is drawn, and without pyplot: no window, no global state.
"""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from millrace.monitoring.files.metrics import read_metrics, table
from millrace.monitoring.files.trace import read_trace
from millrace.monitoring.report.summary import accuracy_by_step
from millrace.monitoring.report.timeline import draw_timeline
from millrace.monitoring.run_dir import RunDir

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

INK, FAINT = "#22303c", "#d5dbe1"
BLUE, ORANGE = "#2f6fb7", "#e07b39"
SMOOTH_SHARE = 0.05  # the smooth reward line averages this share of the run's steps
DPI = 150


def render_plots(path: Path) -> list[Path]:
    """Draw every plot that has data into RUN_DIR/plots; returns the files written."""
    run_dir = RunDir(path)
    rows = read_metrics(run_dir.metrics)
    spans = read_trace(run_dir.trace)
    summary = json.loads(run_dir.summary.read_text()) if run_dir.is_finished else {}
    run_dir.plots.mkdir(exist_ok=True)
    written = []
    if any("reward/mean" in row for row in rows):
        written.append(draw_plot(run_dir.plots / "reward.png", _reward, rows, summary))
    elif rows:  # of supervised fine-tuning
        written.append(
            draw_plot(run_dir.plots / "loss.png", _lines, rows, ["loss", "eval/loss"], "Loss")
        )
    if len(names := {name for row in rows for name in table(row, "rewards", suffix="/mean")}) > 1:
        keys = [f"rewards/{name}/mean" for name in sorted(names)]
        written.append(
            draw_plot(run_dir.plots / "parts.png", _lines, rows, keys, "Parts of the reward")
        )
    if any("staleness/mean" in row for row in rows):
        written.append(draw_plot(run_dir.plots / "staleness.png", _staleness, rows))
    if spans:
        written.append(draw_plot(run_dir.plots / "timeline.png", draw_timeline, spans))
    return written


def draw_plot(path: Path, plot: Callable[..., None], *data: Any) -> Path:
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    style: dict[Any, Any] = {
        "font.size": 10,
        "text.color": INK,
        "axes.edgecolor": FAINT,
        "axes.labelcolor": INK,
        "axes.titlesize": 12,
        "axes.titleweight": "bold",
        "axes.titlelocation": "left",
        "axes.titlepad": 10,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.axisbelow": True,
        "grid.color": FAINT,
        "grid.linewidth": 0.7,
        "xtick.color": INK,
        "ytick.color": INK,
        "legend.frameon": False,
    }
    with rc_context(style):
        figure = Figure(figsize=(9.0, 4.0), dpi=DPI, layout="constrained")
        plot(figure, *data)
        figure.savefig(path)
    return path


def _reward(figure: "Figure", rows: list[dict[str, Any]], summary: dict[str, Any]) -> None:
    axes = figure.subplots()
    steps = _draw_smoothed(axes, rows, "reward/mean", label="mean reward (smoothed)", color=BLUE)
    accuracy = accuracy_by_step(rows)
    if summary.get("accuracy_before") is not None:
        accuracy[0] = summary["accuracy_before"]
    if summary.get("accuracy_after") is not None:
        accuracy[steps[-1] if steps else 0] = summary["accuracy_after"]
    if accuracy:
        at = sorted(accuracy)
        values = [accuracy[step] for step in at]
        axes.plot(at, values, "o--", color=ORANGE, linewidth=1.0, label="held-out accuracy")
        for step in (at[0], at[-1]):
            axes.annotate(
                f"{accuracy[step]:.2f}",
                (step, accuracy[step]),
                xytext=(0, 7),
                textcoords="offset points",
                ha="center",
                color=ORANGE,
            )
    _over_steps(axes, title="Reward")


def _lines(
    figure: "Figure", rows: Sequence[dict[str, Any]], keys: Sequence[str], title: str
) -> None:
    """A line for each metric, such as those of scorers, penalties, or roles of an episode."""
    axes = figure.subplots()
    for number, key in enumerate(keys):
        label = key.removeprefix("rewards/").removesuffix("/mean")
        _draw_smoothed(axes, rows, key, label=label, color=f"C{number}")
    _over_steps(axes, title=title)


def _draw_smoothed(
    axes: "Axes", rows: Sequence[dict[str, Any]], key: str, *, label: str, color: str
) -> list[int]:
    """Draw a metric and its moving average; returns the steps that have it."""
    points = {row["step"]: row[key] for row in rows if row.get(key) is not None}
    steps, values = list(points), list(points.values())
    axes.plot(steps, values, color=color, alpha=0.3, linewidth=1.0)
    axes.plot(steps, _smooth(values), color=color, linewidth=2.0, label=label)
    return steps


def _over_steps(axes: "Axes", *, title: str) -> None:
    axes.set_title(title)
    axes.set_xlabel("step")
    axes.margins(x=0.03, y=0.12)
    axes.grid(axis="y")
    axes.legend(loc="lower right")


def _smooth(values: Sequence[float]) -> list[float]:
    half = max(int(len(values) * SMOOTH_SHARE), 1)
    windows = (values[max(i - half, 0) : i + half + 1] for i in range(len(values)))
    return [sum(window) / len(window) for window in windows]


def _staleness(figure: "Figure", rows: Sequence[dict[str, Any]]) -> None:
    axes = figure.subplots()
    histograms = [found for row in rows if (found := table(row, "staleness/share"))]
    most = max(int(staleness) for found in histograms for staleness in found)
    at = list(range(max(most, 3) + 1))
    shares = [sum(f.get(str(age), 0.0) for f in histograms) / len(histograms) for age in at]
    bars = axes.bar(at, shares, color=BLUE, width=0.7)
    axes.bar_label(
        bars, labels=[f"{share:.1%}" if share else "" for share in shares], padding=3, color=INK
    )
    mean = sum(age * share for age, share in zip(at, shares, strict=True))
    axes.set_title(f"Staleness of trained tokens, {mean:.2f} on average over {len(rows):,} steps")
    axes.set_xlabel("trainer version minus the version that sampled the token")
    axes.set_ylabel("share of tokens")
    axes.set_xticks(at)
    axes.margins(y=0.12)
    axes.yaxis.set_major_formatter(lambda share, _: f"{share:.0%}")
    axes.grid(axis="y")
