"""The live views of a run: one of its start-up, one of a snapshot while it runs.

They need 80 columns; in a wider terminal, the bars and the reward curve grow.
"""

from collections.abc import Callable, Iterator

from rich.console import Console, ConsoleOptions, Group, RenderResult
from rich.panel import Panel
from rich.text import Text

from millrace.monitoring.activity import Shares, mean_by_role
from millrace.monitoring.terminal.snapshot import RunSnapshot
from millrace.monitoring.terminal.text import counts, curve, duration, rate

CURVE_ROWS = 4
MAX_WORKER_ROWS = 6  # with more workers, one row per role
LABEL_COLUMNS = 12
NOTE_COLUMNS = 49  # right of the bars: a share and the longest wait reason
MIN_BAR_COLUMNS = 8
DONE, BUSY, WAITING, BAD = "green", "cyan", "yellow", "red"


class StartupView:
    """A rich renderable: what each worker is doing until the run begins, and for how long."""

    def __init__(self, *, now: Callable[[], float]) -> None:
        self._now = now
        self._phases: dict[str, tuple[str, float]] = {}  # by worker: its phase, and since when

    def enter(self, worker: str, phase: str) -> None:
        self._phases[worker] = (phase, self._now())

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        lines = [
            Text.assemble(_label(worker), phase, (f"  {duration(self._now() - since_s)}", "dim"))
            for worker, (phase, since_s) in list(self._phases.items())
        ]
        yield Panel(
            Group(*lines),
            border_style="dim",
            title="[bold]millrace[/] starting",
            title_align="left",
        )


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
            *_rewards(shot, width),
            Text(),
            *_workers(shot, bar),
            _buffer(shot, bar),
            Text(),
            *_numbers(shot),
        ]
        for line in lines:
            line.no_wrap, line.overflow = True, "ellipsis"
        title = Text.assemble(("millrace", "bold"), " ", (shot.run_dir, "dim"))
        yield Panel(Group(*lines), border_style="dim", title=title, title_align="left")


def _steps(shot: RunSnapshot, width: int) -> Text:
    left = "" if shot.eta_s is None else f" · {duration(shot.eta_s)} left"
    step, evaluating = shot.gauges.version, shot.gauges.evaluating
    busy = "" if evaluating is None else " · evaluating {}/{}".format(*evaluating)
    note = f"  {step}/{shot.steps}  {duration(shot.elapsed_s)}{left}{busy}"
    columns = max(width - len(note), MIN_BAR_COLUMNS)
    bar = _bar(step / shot.steps, columns=columns, colour=DONE)
    return Text.assemble(_label("step"), bar, note)


def _rewards(shot: RunSnapshot, width: int) -> Iterator[Text]:
    if not shot.rewards:
        yield Text.assemble(_label("reward"), ("after the first step", "dim"))
        return
    columns = max(width - 31, MIN_BAR_COLUMNS)  # the axis takes 7, the notes 24
    chart = curve(shot.rewards, columns=columns, rows=CURVE_ROWS)
    notes = [Text() for _ in range(CURVE_ROWS)]
    notes[0] = Text.assemble("now ", (f"{shot.rewards[-1]:.3f}", "bold"))
    if shot.accuracies:
        first, last = shot.accuracies[0], shot.accuracies[-1]
        change = f"{first:.2f} → {last:.2f}" if len(shot.accuracies) > 1 else f"{first:.2f}"
        notes[-1] = Text.assemble("accuracy ", (change, f"bold {DONE}"))
    axis = [f"{chart.high:.2f}", *[""] * (CURVE_ROWS - 2), f"{chart.low:.2f}"]
    for row, line in enumerate(chart.lines):
        yield Text.assemble(
            _label("" if row else "reward"),
            (f"{axis[row]:>5} ▕", "dim"),
            (line.ljust(columns), DONE),
            "  ",
            notes[row],
        )


def _workers(shot: RunSnapshot, columns: int) -> Iterator[Text]:
    rows: dict[str, Shares | None] = dict(shot.workers)
    if len(rows) > MAX_WORKER_ROWS:
        rows = {f"{role}s": shares for role, shares in mean_by_role(shot.workers).items()}
    for name, shares in rows.items():
        if shares is None:
            yield Text.assemble(_label(name), (shot.phases.get(name, "starting"), "dim"))
            continue
        yield Text.assemble(
            _label(name),
            _bar(shares.busy, columns=columns, colour=BUSY),
            (f"  {shares.busy:4.0%} busy", "bold"),
            (_waits(shares), WAITING),
        )


def _waits(shares: Shares) -> str:
    # Below half a percent there is nothing to explain.
    if shares.top_wait is None or shares.busy > 0.995:
        return ""
    return f"  waits: {shares.top_wait}"


def _buffer(shot: RunSnapshot, columns: int) -> Text:
    depth, capacity = shot.gauges.buffer_depth, shot.buffer_capacity
    bar = _bar(depth / capacity, columns=columns, colour="magenta")
    note = f"  {depth}/{capacity} groups, {shot.gauges.groups_running} running"
    return Text.assemble(_label("buffer"), bar, note)


def _numbers(shot: RunSnapshot) -> Iterator[Text]:
    speed = f"{rate(shot.samples_per_s)} samples/s · {rate(shot.tokens_per_s)} tokens/s"
    gauges, wasted = shot.gauges, sum(shot.gauges.tokens_wasted.values())
    if wasted and shot.tokens_generated:
        speed += f" · {wasted / shot.tokens_generated:.1%} of them wasted"
    staleness = f"mean {shot.staleness_mean:.2f} · max {shot.staleness_max}"
    yield Text.assemble(_label("speed"), speed)
    yield Text.assemble(_label("staleness"), f"{staleness} · version {gauges.version}")
    for name, reasons, colour in (
        ("dropped", gauges.groups_dropped, WAITING),
        ("cancelled", gauges.groups_cancelled, WAITING),
        ("failed", gauges.groups_failed, BAD),
    ):
        yield Text.assemble(_label(name), (counts(reasons), colour if reasons else "dim"))
    if shot.scoring:
        yield Text.assemble(_label("scoring"), (shot.scoring, WAITING))
    if shot.restarts:
        yield Text.assemble(_label("restarts"), (counts(shot.restarts), WAITING))
    if gauges.steps_skipped:
        yield Text.assemble(_label("skipped"), (f"steps {gauges.steps_skipped} (not finite)", BAD))


def _label(name: str) -> Text:
    return Text(f"{name[: LABEL_COLUMNS - 1]:<{LABEL_COLUMNS}}", style="dim")


def _bar(share: float, *, columns: int, colour: str) -> Text:
    filled = round(min(max(share, 0.0), 1.0) * columns)
    return Text.assemble(("━" * filled, colour), ("─" * (columns - filled), "dim"))
