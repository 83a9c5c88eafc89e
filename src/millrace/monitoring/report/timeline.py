"""timeline.png: a lane per worker, work in strong colours, waiting in pale ones with its reason.

A long run is drawn twice: as shares of time from its start to its end, and span by span in a window
from its middle, short enough that single steps and swaps can be seen.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from millrace.core.spans import Span
from millrace.monitoring.activity import ROLES, STARTING, in_order, role_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

BUSY_COLOURS = ("#2f6fb7", "#2a9d6f", "#8e63b8", "#c9518b", "#4aa8b5", "#7a8a3a", "#5b6b7a")
WAITING_COLOURS = ("#f6dcae", "#f3c9c0", "#dcd8f0", "#d3e8d3", "#e3e7ea")
STARTING_COLOUR = "#cfd6dc"
IDLE, IDLE_COLOUR = "no work", "#eff2f4"  # a scorer without work is no reason to worry
LANE = 0.72  # height of a lane; lanes are 1 apart
BINS = 160  # columns of the whole run
SPANS_IN_WINDOW = 60  # of the engine or trainer with the fewest, about

Activity = tuple[str, bool]  # name, busy


def draw_timeline(figure: "Figure", spans: Sequence[Span]) -> None:
    workers = in_order({span.worker for span in spans})
    colours = _colours(spans)
    joined = _joined(spans)
    begin_s, end_s = min(s.start_s for s in joined), max(s.end_s for s in joined)
    window_s = (end_s - begin_s) * min(1.0, SPANS_IN_WINDOW / _num_spans_of_main_worker(joined))
    if window_s > (end_s - begin_s) / 2:
        figure.set_figheight(1.9 + 0.55 * len(workers))
        axes = figure.subplots()
        axes.set_title("What every worker did, and what it waited for")
        _draw_spans(axes, joined, workers, colours)
        _dress(axes, workers, begin_s, end_s)
    else:
        figure.set_figheight(3.0 + 1.1 * len(workers))
        whole, close = figure.subplots(2, 1)
        whole.set_title("The whole run: share of time")
        _draw_shares(whole, joined, workers, colours, np.linspace(begin_s, end_s, BINS + 1))
        _dress(whole, workers, begin_s, end_s)
        whole.set_xlabel("")
        middle_s = (begin_s + end_s) / 2
        close.set_title(f"{window_s:.2g} s of it, span by span")
        _draw_spans(close, joined, workers, colours)
        _dress(close, workers, middle_s - window_s / 2, middle_s + window_s / 2)
    _add_legend(figure, colours)


def _draw_spans(
    axes: "Axes", spans: Sequence[Span], workers: Sequence[str], colours: dict[Activity, str]
) -> None:
    for (name, busy), colour in colours.items():
        for lane, worker in enumerate(workers):
            ranges = [
                (span.start_s, span.end_s - span.start_s)
                for span in spans
                if (span.worker, span.name, span.busy) == (worker, name, busy)
            ]
            axes.broken_barh(ranges, (lane - LANE / 2, LANE), facecolors=colour, linewidth=0)


def _draw_shares(
    axes: "Axes",
    spans: Sequence[Span],
    workers: Sequence[str],
    colours: dict[Activity, str],
    edges_s: np.ndarray,  # [BINS + 1]
) -> None:
    """One column per bin, filled from below with the shares of what happened in it, busy first."""
    for lane, worker in enumerate(workers):
        top = np.full(len(edges_s) - 1, lane + LANE / 2)  # the axis points down
        for activity, colour in colours.items():
            mine = [s for s in spans if s.worker == worker and (s.name, s.busy) == activity]
            bottom, top = top, top - LANE * _share_per_bin(mine, edges_s)
            axes.fill_between(
                np.repeat(edges_s, 2)[1:-1],
                np.repeat(bottom, 2),
                np.repeat(top, 2),
                facecolor=colour,
                linewidth=0,
            )


def _share_per_bin(spans: Sequence[Span], edges_s: np.ndarray) -> np.ndarray:
    """[bins] share of each bin that these spans, which do not overlap, cover."""
    if not spans:
        return np.zeros(len(edges_s) - 1)
    # Time covered up to t grows linearly within a span and is flat between spans.
    times_s = np.array([(span.start_s, span.end_s) for span in spans]).ravel()
    lengths_s = np.array([span.end_s - span.start_s for span in spans])
    after_s = np.cumsum(lengths_s)
    covered_s = np.stack([after_s - lengths_s, after_s], axis=1).ravel()
    return np.diff(np.interp(edges_s, times_s, covered_s)) / np.diff(edges_s)


def _dress(axes: "Axes", workers: Sequence[str], begin_s: float, end_s: float) -> None:
    axes.set_yticks(range(len(workers)), workers)
    axes.set_ylim(len(workers) - 0.5, -0.5)
    axes.set_xlim(begin_s, end_s)
    axes.set_xlabel("seconds since the start of the run")
    axes.spines["left"].set_visible(False)
    axes.tick_params(axis="y", length=0)


def _add_legend(figure: "Figure", colours: dict[Activity, str]) -> None:
    from matplotlib.patches import Patch

    handles: list[Any] = [
        Patch(facecolor=colour, label=name if busy else f"waits: {name}")
        for (name, busy), colour in colours.items()
    ]
    figure.legend(handles=handles, loc="outside lower left", ncols=4, fontsize=9)


def _colours(spans: Sequence[Span]) -> dict[Activity, str]:
    """Strong colours for work, then pale ones for waiting; in each, what takes most time first."""
    seconds: dict[Activity, float] = {}
    for span in spans:
        key = (span.name, span.busy)
        seconds[key] = seconds.get(key, 0.0) + span.end_s - span.start_s
    special = {(name, True): STARTING_COLOUR for name in STARTING} | {(IDLE, False): IDLE_COLOUR}
    colours: dict[Activity, str] = {}
    for busy, palette in ((True, BUSY_COLOURS), (False, WAITING_COLOURS)):
        keys = [key for key in seconds if key[1] is busy and key not in special]
        keys.sort(key=lambda key: -seconds[key])
        # Rare activities share the last colour: a legend must stay readable.
        colours |= {key: palette[min(i, len(palette) - 1)] for i, key in enumerate(keys)}
    return colours | {key: colour for key, colour in special.items() if key in seconds}


def _num_spans_of_main_worker(spans: Sequence[Span]) -> int:
    """Of the engine or trainer with the fewest; scorers may change a hundred times a second."""
    counts = Counter(span.worker for span in spans)
    main = [n for worker, n in counts.items() if role_of(worker) in ROLES]
    return max(min(main or counts.values()), 1)


def _joined(spans: Sequence[Span]) -> list[Span]:
    """By worker; spans of one activity that touch become one, so no hairlines show between them."""
    tracks: dict[str, list[Span]] = {}
    for span in sorted(spans, key=lambda span: span.start_s):
        track = tracks.setdefault(span.worker, [])
        last = track[-1] if track else span
        touches = span.start_s - last.end_s < 1e-3
        if track and touches and (last.name, last.busy) == (span.name, span.busy):
            track[-1] = replace(last, end_s=span.end_s, count=last.count + span.count)
        else:
            track.append(span)
    return [span for track in tracks.values() for span in track]
