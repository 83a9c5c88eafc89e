"""The timeline of a run: spans of trace.json, and the share of every activity in any time bin.

For each worker and activity, the index keeps the time covered up to each start and end. The share
of a bin is a difference of two interpolated values, so it is exact, and a tile costs the same at
every zoom. Used by one thread.

A tile of level L covers TILE_S * 2**L seconds in BINS bins. Its bytes are, for each track, a uint32
count and so many entries: uint16 bin, uint8 activity, uint8 share (255 = all), little-endian.
"""

from array import array
from collections.abc import Sequence
from typing import Any

import numpy as np

from millrace.core.files import FileTail
from millrace.monitoring.activity import in_order
from millrace.monitoring.files.trace import TraceEvent, parse_events
from millrace.monitoring.run_dir import RunDir

TILE_S = 0.064
BINS = 512
MAX_LEVEL = 30
MAX_READ_BYTES = 16 * 2**20  # in one go; a viewer of a long trace sees its beginning meanwhile
_ENTRY = np.dtype([("bin", "<u2"), ("activity", "u1"), ("share", "u1")])


class _ActivityIndex:
    """One activity of one worker. times: start and end of each span; covered: seconds of the
    activity before each of them."""

    def __init__(self) -> None:
        self.times = array("d")
        self.covered = array("d")
        self.counts = array("Q")  # activities joined in each span

    def add(self, events: Sequence[TraceEvent]) -> None:
        starts_s = np.fromiter((event.ts for event in events), float, len(events)) / 1e6
        lengths_s = np.fromiter((event.dur for event in events), float, len(events)) / 1e6
        times_s = np.stack([starts_s, starts_s + lengths_s], axis=1).ravel()
        # Rounding may let neighbours overlap by 0.1 µs.
        times_s = np.maximum.accumulate(np.append(self.times[-1:], times_s))[-len(times_s) :]
        steps_s = np.diff(times_s, prepend=0.0)
        steps_s[::2] = 0.0  # between two spans
        before_s = self.covered[-1] if self.covered else 0.0
        self.times.frombytes(times_s.tobytes())
        self.covered.frombytes((before_s + np.cumsum(steps_s)).tobytes())
        self.counts.extend(event.args.count for event in events)

    def entries(self, activity: int, edges_s: np.ndarray) -> np.ndarray:
        """[entries] the bins that this activity has a share of."""
        covered_s = np.interp(edges_s, np.frombuffer(self.times), np.frombuffer(self.covered))
        shares = np.diff(covered_s) / (edges_s[1] - edges_s[0])
        bins = np.flatnonzero(shares > 1e-6)
        entries = np.empty(len(bins), _ENTRY)
        entries["bin"], entries["activity"] = bins, activity
        # However short, a swap must stay visible.
        entries["share"] = np.clip(np.round(shares[bins] * 255), 1, 255)
        return entries

    def span_at(self, time_s: float) -> tuple[float, float, int] | None:
        """Start, end and count of the span at this time."""
        place = int(np.searchsorted(np.frombuffer(self.times), time_s, side="right"))
        if place % 2 == 0:  # between two spans
            return None
        return self.times[place - 1], self.times[place], self.counts[place // 2]


class SpanIndex:
    def __init__(self, run_dir: RunDir, *, max_read_bytes: int = MAX_READ_BYTES) -> None:
        self._max_read_bytes = max_read_bytes
        self._tails = [FileTail(run_dir.earlier_trace), FileTail(run_dir.trace)]
        self._clear()

    def _clear(self) -> None:
        self._tracks: dict[int, str] = {}  # worker by track number, in order of appearance
        self._activities: dict[tuple[str, bool], int] = {}  # number by name and busy
        self._index: dict[int, dict[int, _ActivityIndex]] = {}  # by track and activity
        self.num_spans = 0
        self.end_s = 0.0
        self.is_complete = True  # nothing is left to read, as far as refresh() has looked

    def refresh(self) -> None:
        """Read what the run has appended, or a part of it."""
        if sum(tail.has_restarted() for tail in self._tails):  # asks all of them
            # trace.json has become earlier_trace.json, or the run was resumed.
            self._tails = [FileTail(tail.path) for tail in self._tails]
            self._clear()
        num_bytes, self.is_complete = 0, True
        for tail in self._tails:
            for chunk in tail.chunks():
                self._add(chunk, tail)
                num_bytes += len(chunk)
                if num_bytes >= self._max_read_bytes:
                    self.is_complete = False
                    return

    def _add(self, chunk: bytes, tail: FileTail) -> None:
        spans: dict[tuple[int, str, str], list[TraceEvent]] = {}
        for event in parse_events(chunk, tail.path):
            if event.ph == "X":
                spans.setdefault((event.tid, event.name, event.cat), []).append(event)
            elif event.is_track:
                self._tracks[event.tid] = event.args.name
        for (track, name, kind), found in spans.items():
            key = (found[0].args.reason or name, kind == "busy")
            number = self._activities.setdefault(key, min(len(self._activities), 255))  # uint8
            index = self._index.setdefault(track, {}).setdefault(number, _ActivityIndex())
            index.add(found)
            self.num_spans += len(found)
            self.end_s = max(self.end_s, index.times[-1])

    def describe(self) -> dict[str, Any]:
        """What a client needs to read tiles."""
        totals = dict.fromkeys(self._activities.values(), 0.0)
        for of_track in self._index.values():
            for number, index in of_track.items():
                totals[number] += index.covered[-1]
        order = in_order(self._tracks.values())
        activities = [
            {"name": name, "busy": busy, "seconds": totals[number]}
            for (name, busy), number in self._activities.items()
        ]
        return {
            "tracks": [{"worker": w, "place": order.index(w)} for w in self._tracks.values()],
            "activities": activities,
            "end_s": self.end_s,
            "num_spans": self.num_spans,
            "is_complete": self.is_complete,
            "scale": (TILE_S, BINS, MAX_LEVEL),
        }

    def tile(self, level: int, index: int) -> bytes:
        length_s = TILE_S * 2.0 ** min(level, MAX_LEVEL)
        edges_s = np.linspace(index * length_s, (index + 1) * length_s, BINS + 1)
        parts: list[bytes] = []
        for track in self._tracks:
            found = [of.entries(n, edges_s) for n, of in self._index.get(track, {}).items()]
            entries = np.concatenate(found) if found else np.empty(0, _ENTRY)
            entries = entries[np.argsort(entries["bin"], kind="stable")]
            parts += [np.uint32(len(entries)).tobytes(), entries.tobytes()]
        return b"".join(parts)

    def span_at(self, worker: str, time_s: float) -> dict[str, Any] | None:
        """The span of a worker at one moment."""
        numbers = {number: key for key, number in self._activities.items()}
        tracks = [track for track, name in self._tracks.items() if name == worker]
        for number, index in self._index.get(tracks[0], {}).items() if tracks else ():
            if (found := index.span_at(time_s)) is not None:
                names = ("name", "busy", "start_s", "end_s", "count")
                return dict(zip(names, (*numbers[number], *found), strict=True))
        return None
