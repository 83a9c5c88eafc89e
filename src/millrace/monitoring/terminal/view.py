"""The live views of a run: one of its start-up, one of a snapshot while it runs.

They need 80 columns; in a wider terminal, the bars and the reward curve grow.
"""

from collections.abc import Iterator, Mapping

from rich.console import Console, ConsoleOptions, Group, RenderResult
from rich.panel import Panel
from rich.text import Text

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


def startup_view(phases: Mapping[str, tuple[str, float]], *, now_s: float) -> Panel:
    """What each worker is doing until the run begins. `phases`: its phase, and since when."""
    lines = [
        _line(worker, phase, (f"  {duration(now_s - since_s)}", "dim"))
        for worker, (phase, since_s) in list(phases.items())
    ]
    return _panel(lines, Text.assemble(("millrace", "bold"), " starting"))


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
