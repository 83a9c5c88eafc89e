"""trace.json: activities and waits of every worker, as trace events for Perfetto and Chrome.

Promise: the file can be opened at any moment, also after a kill: it is one JSON array with an event
per line, and viewers (and read_trace) do not need the closing bracket. Times count from the run's
start. A resumed run continues at the end of the trace, so the time in between leaves no gap. A file
that has become too large is moved aside, replacing the one before it, and a new file begins.
Called from the controller's event loop.
"""

import contextlib
import json
import time
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec

from millrace.core.errors import ConfigError
from millrace.core.spans import Span
from millrace.monitoring.run_dir import write_atomically

PROCESS = 1  # all workers are tracks of one process, so that overlap is visible
MAX_BYTES = 256 * 2**20  # viewers have trouble with larger files
MAX_SPANS_PER_BATCH = 16  # per worker; a batch comes a few times a second
BUSY_COLOUR, WAITING_COLOUR = "thread_state_running", "grey"  # names the viewers know

_METADATA = {"ph": "M", "pid": PROCESS}

Event = dict[str, Any]


class TraceArguments(msgspec.Struct, gc=False):
    count: int = 1
    name: str = ""
    reason: str | None = None


class TraceEvent(msgspec.Struct, gc=False):
    """What is read of an event."""

    ph: str
    name: str
    tid: int
    args: TraceArguments
    cat: str = ""
    ts: float = 0.0  # microseconds, as dur
    dur: float = 0.0

    @property
    def is_track(self) -> bool:
        return self.name == "thread_name"


_DECODER = msgspec.json.Decoder(list[TraceEvent])


class TraceWriter:
    """Streams spans to disk, one write per batch. `start_s`: time 0 of the trace, since the epoch;
    that of a resumed run is later than the run's start."""

    def __init__(
        self,
        path: Path,
        *,
        start_s: float | None = None,
        resume: bool = False,
        max_bytes: int = MAX_BYTES,
    ) -> None:
        self._path, self._max_bytes = path, max_bytes
        text, events = _read(path) if resume and path.exists() else ("", [])
        self._tracks = {event.args.name: event.tid for event in events if event.is_track}
        end_us = max((event.ts + event.dur for event in events if event.ph == "X"), default=0.0)
        self.start_s = (time.time() if start_s is None else start_s) - end_us / 1e6
        self._begin(text if events else self._heading())

    def write(self, spans: Iterable[Span]) -> None:
        events = [event for span in _condensed(spans) for event in self._events(span)]
        self._file.write("".join(f",\n{_line(event)}" for event in events))
        self._file.flush()
        if self._file.tell() > self._max_bytes:
            self.close()
            self._path.replace(self._path.with_name(f"earlier_{self._path.name}"))
            self._begin(self._heading())

    def close(self) -> None:
        with contextlib.suppress(OSError):  # the closing bracket is optional
            self._file.write("\n]\n")
            self._file.close()

    def _begin(self, text: str) -> None:
        write_atomically(self._path, text)
        self._file = self._path.open("a")

    def _heading(self) -> str:
        process = {**_METADATA, "name": "process_name", "tid": 0, "args": {"name": "millrace"}}
        tracks = [event for item in self._tracks.items() for event in _track(*item)]
        return "[\n" + ",\n".join(_line(event) for event in [process, *tracks])

    def _events(self, span: Span) -> list[Event]:
        is_new = span.worker not in self._tracks
        track = self._tracks.setdefault(span.worker, len(self._tracks) + 1)
        event = {
            "name": span.name if span.busy else f"waiting: {span.name}",
            "cat": "busy" if span.busy else "waiting",
            "ph": "X",
            "ts": round((span.start_s - self.start_s) * 1e6, 1),
            "dur": round((span.end_s - span.start_s) * 1e6, 1),
            "pid": PROCESS,
            "tid": track,
            "cname": BUSY_COLOUR if span.busy else WAITING_COLOUR,
            "args": {"count": span.count} | ({} if span.busy else {"reason": span.name}),
        }
        return [*(_track(span.worker, track) if is_new else []), event]


def _condensed(spans: Iterable[Span]) -> Iterator[Span]:
    """Join large batches by activity: durations stay exact, the order within a batch is lost.
    A worker that changes its activity hundreds of times a second would fill the disk otherwise."""
    by_worker: dict[str, list[Span]] = {}
    for span in spans:
        by_worker.setdefault(span.worker, []).append(span)
    for batch in by_worker.values():
        if len(batch) <= MAX_SPANS_PER_BATCH:
            yield from batch
            continue
        begin_s = batch[0].start_s
        for name, busy in dict.fromkeys((span.name, span.busy) for span in batch):
            same = [span for span in batch if (span.name, span.busy) == (name, busy)]
            end_s = begin_s + sum(span.end_s - span.start_s for span in same)
            count = sum(span.count for span in same)
            yield replace(same[0], start_s=begin_s, end_s=end_s, count=count)
            begin_s = end_s


def read_trace(path: Path) -> list[Span]:
    """The spans of a trace, complete or cut short, in seconds from the run's start."""
    if not path.is_file():
        return []
    _, events = _read(path)
    workers = {event.tid: event.args.name for event in events if event.is_track}
    return [
        Span(
            worker=workers[event.tid],
            name=event.args.reason or event.name,
            busy=event.cat == "busy",
            start_s=event.ts / 1e6,
            end_s=(event.ts + event.dur) / 1e6,
            count=event.args.count,
        )
        for event in events
        if event.ph == "X"
    ]


def _read(path: Path) -> tuple[str, list[TraceEvent]]:
    """The text of a trace without its end, and its events."""
    text = path.read_text().rstrip().removesuffix("]").rstrip().rstrip(",")
    whole, _, last = text.rpartition("\n")
    events = parse_events(whole.encode(), path)
    try:
        return text, events + parse_events(last.encode(), path)
    except ConfigError:  # only the last line may be incomplete
        return whole.rstrip(","), events


def parse_events(lines: bytes, path: Path) -> list[TraceEvent]:
    """The events of whole lines of the file at `path`; commas are between them."""
    body = lines.strip().removeprefix(b"[").removesuffix(b"]").strip().strip(b",")
    try:
        return _DECODER.decode(b"[" + body + b"]")
    except msgspec.DecodeError as error:
        line = body.partition(b"\n")[0][:40].decode(errors="replace")
        raise ConfigError(f"{path} is not a trace of Millrace: {line!r} ({error}).") from None


def _track(worker: str, track: int) -> list[Event]:
    event = {**_METADATA, "tid": track}
    return [
        {**event, "name": "thread_name", "args": {"name": worker}},
        {**event, "name": "thread_sort_index", "args": {"sort_index": track}},
    ]


def _line(event: Event) -> str:
    return json.dumps(event, separators=(",", ":"))
