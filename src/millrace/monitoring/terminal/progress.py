"""Progress in the terminal: a live picture, or plain lines where nobody watches.

The controller calls show() as often as it likes, from its event loop; each view decides what it
draws, so that drawing costs a few milliseconds a second at most.
"""

import time
from collections.abc import Callable
from typing import Literal, Protocol

from rich.console import Console
from rich.live import Live

from millrace.monitoring.activity import mean_by_role
from millrace.monitoring.terminal.snapshot import RunSnapshot
from millrace.monitoring.terminal.text import counts, duration, rate
from millrace.monitoring.terminal.view import RunView


class ProgressDisplay(Protocol):
    def start(self) -> None: ...

    def show(self, snapshot: RunSnapshot) -> None: ...

    def note(self, line: str) -> None:
        """Something worth keeping on the screen: an evaluation, a checkpoint, a failure."""
        ...

    def stop(self) -> None:
        """Leaves the last state on the screen. Safe to call twice, or without start()."""
        ...


def make_progress(
    mode: Literal["auto", "live", "lines", "off"], *, console: Console | None = None
) -> ProgressDisplay:
    """The view that `watch.progress` asks for."""
    console = console or Console()
    if mode == "auto":
        can_draw = console.is_terminal and not console.is_dumb_terminal
        mode = "live" if can_draw and console.encoding.startswith("utf") else "lines"
    if mode == "live":
        return LiveProgress(console)
    if mode == "lines":
        return LineProgress(console)
    return NoProgress()


class LiveProgress:
    """Redraws one picture in place, at most four times a second."""

    REDRAW_S = 0.25

    def __init__(self, console: Console, *, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._drawn_s = float("-inf")
        self._live = Live(console=console, auto_refresh=False, transient=False)

    def start(self) -> None:
        self._live.start()

    def show(self, snapshot: RunSnapshot) -> None:
        due = self._now() >= self._drawn_s + self.REDRAW_S
        self._live.update(RunView(snapshot), refresh=due)
        if due:
            self._drawn_s = self._now()

    def note(self, line: str) -> None:
        self._live.console.print(line, markup=False, highlight=False)

    def stop(self) -> None:
        self._live.stop()  # draws the last snapshot once more


class LineProgress:
    """One line for a step, at most every other second; a sign of life when no step completes."""

    LINE_S = 2.0
    SIGN_OF_LIFE_S = 30.0

    def __init__(self, console: Console, *, now: Callable[[], float] = time.monotonic) -> None:
        self._console = console
        self._now = now
        self._printed_s = float("-inf")
        self._printed_step = -1
        self._last: RunSnapshot | None = None

    def start(self) -> None:
        self._printed_s = self._now()

    def show(self, snapshot: RunSnapshot) -> None:
        self._last = snapshot
        since_s = self._now() - self._printed_s
        new_step = snapshot.step != self._printed_step and snapshot.step > 0
        last_step = new_step and snapshot.step == snapshot.steps
        if last_step or (new_step and since_s >= self.LINE_S) or since_s >= self.SIGN_OF_LIFE_S:
            self._print(snapshot)

    def note(self, line: str) -> None:
        self._console.print(line, markup=False, highlight=False, soft_wrap=True)

    def stop(self) -> None:
        if self._last is not None and self._last.step not in (self._printed_step, 0):
            self._print(self._last)

    def _print(self, snapshot: RunSnapshot) -> None:
        self._printed_s, self._printed_step = self._now(), snapshot.step
        self.note(progress_line(snapshot))


class NoProgress:
    """For `watch.progress = "off"`: the run directory still tells everything."""

    def start(self) -> None:
        """Nothing to open."""

    def show(self, snapshot: RunSnapshot) -> None:
        """Nothing to draw."""

    def note(self, line: str) -> None:
        """Nothing to print."""

    def stop(self) -> None:
        """Nothing to close."""


def progress_line(shot: RunSnapshot) -> str:
    """A snapshot in one line of plain text."""
    parts = [f"step {shot.step}/{shot.steps}"]
    if shot.rewards:
        parts.append(f"reward {shot.rewards[-1]:.3f}")
    if shot.accuracies:
        parts.append(f"accuracy {shot.accuracies[-1]:.3f}")
    parts += [
        f"{rate(shot.samples_per_s)} samples/s",
        f"{rate(shot.tokens_per_s)} tokens/s",
        f"buffer {shot.buffer_depth}/{shot.buffer_capacity}",
        f"staleness {shot.staleness_mean:.2f} (max {shot.staleness_max})",
    ]
    for role, shares in mean_by_role(shot.workers).items():
        wait = f" (waits: {shares.top_wait})" if shares.top_wait and shares.busy < 0.9 else ""
        parts.append(f"{role} {shares.busy:.0%} busy{wait}")
    if any(shot.dropped.values()):
        parts.append(f"dropped {counts(shot.dropped)}")
    if any(shot.cancelled.values()):
        parts.append(f"cancelled {counts(shot.cancelled)}")
    if any(shot.failed.values()):
        parts.append(f"failed {counts(shot.failed)}")
    if shot.steps_skipped:
        parts.append(f"steps skipped {shot.steps_skipped}")
    if shot.restarts:
        parts.append(f"restarts {counts(shot.restarts)}")
    if shot.scoring:
        parts.append(shot.scoring)
    left = "" if shot.eta_s is None else f", {duration(shot.eta_s)} left"
    return " | ".join([*parts, f"{duration(shot.elapsed_s)}{left}"])
