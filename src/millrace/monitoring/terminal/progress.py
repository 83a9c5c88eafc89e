"""Progress in the terminal: a live view, or plain lines where output is not a terminal.

The controller may call show() at any rate, from its event loop; each view limits how often it
draws, so that drawing costs a few milliseconds per second at most. Live views need 80 columns; in a
wider terminal, the bars and the reward curve grow.
"""

import time
from collections.abc import Callable, Iterator
from typing import Literal

from rich.console import Console, ConsoleOptions, Group, RenderResult
from rich.live import Live
from rich.panel import Panel
from rich.text import Text

from millrace.core.errors import printable
from millrace.monitoring.activity import mean_by_role, without_idle
from millrace.monitoring.terminal.snapshot import RunSnapshot
from millrace.monitoring.terminal.text import curve, duration, rate

CURVE_ROWS = 4
MAX_WORKER_ROWS = 6  # with more workers, one row per role
LABEL_COLUMNS = 12
NOTE_COLUMNS = 49  # right of the bars: a share and the longest wait reason
MIN_BAR_COLUMNS = 8
DONE, BUSY, WAITING, BAD = "green", "cyan", "yellow", "red"

Part = str | Text | tuple[str, str]  # text, or text and its style


class ProgressDisplay:
    """Shows nothing, as progress = "off" asks for; the run directory still has everything."""

    def starting(self, worker: str, phase: str) -> None:
        """A worker, or the run itself, enters a phase of its start-up. May come before start()."""

    def start(self) -> None:
        """Snapshots follow."""

    def show(self, snapshot: RunSnapshot) -> None: ...

    def note(self, line: str) -> None:
        """Print a line that stays on the screen: an evaluation, a checkpoint, a failure."""

    def stop(self) -> None:
        """Leave the last state on the screen. Safe to call twice, or without start()."""


def make_progress(
    mode: Literal["auto", "live", "lines", "off"], *, console: Console | None = None
) -> ProgressDisplay:
    """The display that the setting `progress` asks for."""
    console = console or Console()
    if mode == "auto":
        can_draw = console.is_terminal and not console.is_dumb_terminal
        mode = "live" if can_draw and console.encoding.startswith("utf") else "lines"
    if mode == "live":
        return LiveProgress(console)
    if mode == "lines":
        return LineProgress(console)
    return ProgressDisplay()


class LiveProgress(ProgressDisplay):
    """Redraws one view in place, at most four times a second."""

    REDRAW_S = 0.25

    def __init__(self, console: Console, *, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._drawn_s = float("-inf")
        self._console = console
        self._phases: dict[str, tuple[str, float]] = {}  # by worker: its phase, and since when
        # A thread of its own redraws it: the event loop is busy with imports during start-up.
        self._startup_live = Live(
            console=console, get_renderable=self.startup, refresh_per_second=4, transient=True
        )
        self._live = Live(console=console, auto_refresh=False, transient=False)

    def startup(self) -> Panel:
        """What each worker is doing until the run begins."""
        now_s, phases = self._now(), list(self._phases.items())
        lines = [
            _line(worker, phase, (f"  {duration(now_s - since_s)}", "dim"))
            for worker, (phase, since_s) in phases
        ]
        return _panel(lines, Text.assemble(("millrace", "bold"), " starting"))

    def starting(self, worker: str, phase: str) -> None:
        self._phases[worker] = (phase, self._now())
        if not self._live.is_started:
            self._startup_live.start()

    def start(self) -> None:
        self._startup_live.stop()
        self._live.start()

    def show(self, snapshot: RunSnapshot) -> None:
        due = self._now() >= self._drawn_s + self.REDRAW_S
        self._live.update(RunView(snapshot), refresh=due)
        if due:
            self._drawn_s = self._now()

    def note(self, line: str) -> None:
        self._console.print(printable(line), markup=False, highlight=False)

    def stop(self) -> None:
        self._startup_live.stop()
        self._live.stop()  # draws the last snapshot once more


class LineProgress(ProgressDisplay):
    """One line per step, at most every other second; regular lines while no step completes."""

    LINE_S = 2.0
    EVALUATION_S = 5.0
    HEARTBEAT_S = 30.0

    def __init__(self, console: Console, *, now: Callable[[], float] = time.monotonic) -> None:
        self._console = console
        self._now = now
        self._printed_s = float("-inf")
        self._printed_step = -1
        self._last: RunSnapshot | None = None

    def starting(self, worker: str, phase: str) -> None:
        self.note(f"{worker}: {phase}")

    def start(self) -> None:
        self._printed_s = self._now()

    def show(self, snapshot: RunSnapshot) -> None:
        self._last = snapshot
        since_s = self._now() - self._printed_s
        step = snapshot.gauges.version
        new_step = step != self._printed_step and step > 0
        last_step = new_step and step == snapshot.steps
        limit_s = self.HEARTBEAT_S if snapshot.gauges.evaluating is None else self.EVALUATION_S
        if last_step or (new_step and since_s >= self.LINE_S) or since_s >= limit_s:
            self._print(snapshot)

    def note(self, line: str) -> None:
        self._console.print(printable(line), markup=False, highlight=False, soft_wrap=True)

    def stop(self) -> None:
        if self._last is not None and self._last.gauges.version not in (self._printed_step, 0):
            self._print(self._last)

    def _print(self, snapshot: RunSnapshot) -> None:
        self._printed_s, self._printed_step = self._now(), snapshot.gauges.version
        self.note(progress_line(snapshot))


def progress_line(shot: RunSnapshot) -> str:
    """A snapshot in one line of plain text."""
    gauges = shot.gauges
    parts = [f"step {gauges.version}/{shot.steps}"]
    if gauges.evaluating is not None:
        parts.append("evaluating {}/{}".format(*gauges.evaluating))
    if shot.values:
        parts.append(f"{shot.curve} {shot.values[-1]:.3f}")
    if shot.evaluations:
        parts.append(f"{shot.evaluated} {shot.evaluations[-1]:.3f}")
    parts += [f"{rate(shot.samples_per_s)} samples/s", f"{rate(shot.tokens_per_s)} tokens/s"]
    if not shot.is_supervised:
        parts.append(f"buffer {shot.buffer_text}")
        parts.append(f"staleness {shot.staleness_mean:.2f} (max {shot.staleness_max})")
    for role, shares in mean_by_role(without_idle(shot.workers)).items():
        wait = f" (waits: {shares.top_wait})" if shares.top_wait and shares.busy < 0.9 else ""
        parts.append(f"{role} {shares.busy:.0%} busy{wait}")
    parts += [f"{kind} {text}" for kind, text in shot.losses.items()]
    if shot.scoring:
        parts.append(shot.scoring)
    left = "" if shot.eta_s is None else f", {duration(shot.eta_s)} left"
    return " | ".join([*parts, f"{duration(shot.elapsed_s)}{left}"])


class RunView:
    """A rich renderable. Pure: the same snapshot gives the same text."""

    def __init__(self, snapshot: RunSnapshot) -> None:
        self._snapshot = snapshot

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        shot = self._snapshot
        width = options.max_width - 4 - LABEL_COLUMNS  # without frame, padding and labels
        bar = max(width - NOTE_COLUMNS, MIN_BAR_COLUMNS)
        lines = [
            _steps(shot, width),
            Text(),
            *_values(shot, width),
            Text(),
            *_workers(shot, bar),
            *(() if shot.is_supervised else (_buffer(shot, bar),)),
            Text(),
            *_numbers(shot),
        ]
        for line in lines:
            line.no_wrap, line.overflow = True, "ellipsis"
        yield _panel(lines, Text.assemble(("millrace", "bold"), " ", (shot.run_dir, "dim")))


def _panel(lines: list[Text], title: Text) -> Panel:
    return Panel(Group(*lines), border_style="dim", title=title, title_align="left")


def _steps(shot: RunSnapshot, width: int) -> Text:
    left = "" if shot.eta_s is None else f" · {duration(shot.eta_s)} left"
    step, evaluating = shot.gauges.version, shot.gauges.evaluating
    busy = "" if evaluating is None else " · evaluating {}/{}".format(*evaluating)
    note = f"  {step}/{shot.steps}  {duration(shot.elapsed_s)}{left}{busy}"
    columns = max(width - len(note), MIN_BAR_COLUMNS)
    bar = _bar(step / shot.steps, columns=columns, colour=DONE)
    return _line("step", bar, note)


def _values(shot: RunSnapshot, width: int) -> Iterator[Text]:
    if not shot.values:
        yield _line(shot.curve, ("after the first step", "dim"))
        return
    columns = max(width - 31, MIN_BAR_COLUMNS)  # the axis takes 7, the notes 24
    lines, low, high = curve(shot.values, columns=columns, rows=CURVE_ROWS)
    notes = [Text() for _ in range(CURVE_ROWS)]
    notes[0] = Text.assemble("now ", (f"{shot.values[-1]:.3f}", "bold"))
    if shot.evaluations:
        first, last = shot.evaluations[0], shot.evaluations[-1]
        change = f"{first:.2f} → {last:.2f}" if len(shot.evaluations) > 1 else f"{first:.2f}"
        notes[-1] = Text.assemble(f"{shot.evaluated} ", (change, f"bold {DONE}"))
    axis = [f"{high:.2f}", *[""] * (CURVE_ROWS - 2), f"{low:.2f}"]
    for row, line in enumerate(lines):
        yield _line(
            "" if row else shot.curve,
            (f"{axis[row]:>5} ▕", "dim"),
            (line.ljust(columns), DONE),
            "  ",
            notes[row],
        )


def _workers(shot: RunSnapshot, columns: int) -> Iterator[Text]:
    rows = without_idle(shot.workers)
    if len(rows) > MAX_WORKER_ROWS:
        rows = {f"{role}s": shares for role, shares in mean_by_role(rows).items()}
    for name, shares in rows.items():
        if shares is None:
            yield _line(name, (shot.phases.get(name, "starting"), "dim"))
            continue
        is_waiting = shares.top_wait is not None and shares.busy <= 0.995
        yield _line(
            name,
            _bar(shares.busy, columns=columns, colour=BUSY),
            (f"  {shares.busy:4.0%} busy", "bold"),
            (f"  waits: {shares.top_wait}" if is_waiting else "", WAITING),
        )


def _buffer(shot: RunSnapshot, columns: int) -> Text:
    depth, capacity = shot.gauges.buffer_depth, shot.buffer_capacity
    bar = _bar(depth / capacity, columns=columns, colour="magenta")
    note = f"  {shot.buffer_text} groups, {shot.gauges.groups_running} running"
    return _line("buffer", bar, note)


def _numbers(shot: RunSnapshot) -> Iterator[Text]:
    speed = f"{rate(shot.samples_per_s)} samples/s · {rate(shot.tokens_per_s)} tokens/s"
    gauges, wasted = shot.gauges, sum(shot.gauges.tokens_wasted.values())
    if wasted and shot.tokens_generated:
        speed += f" · {wasted / shot.tokens_generated:.1%} of them wasted"
    staleness = f"mean {shot.staleness_mean:.2f} · max {shot.staleness_max}"
    yield _line("speed", speed)
    if not shot.is_supervised:
        yield _line("staleness", f"{staleness} · version {gauges.version}")
    for kind, text in shot.losses.items():
        yield _line(kind, (text, BAD if kind in ("failed", "skipped") else WAITING))
    if shot.scoring:
        yield _line("scoring", (shot.scoring, WAITING))


def _line(label: str, *parts: Part) -> Text:
    return Text.assemble((f"{label[: LABEL_COLUMNS - 1]:<{LABEL_COLUMNS}}", "dim"), *parts)


def _bar(share: float, *, columns: int, colour: str) -> Text:
    filled = round(min(max(share, 0.0), 1.0) * columns)
    return Text.assemble(("━" * filled, colour), ("─" * (columns - filled), "dim"))
