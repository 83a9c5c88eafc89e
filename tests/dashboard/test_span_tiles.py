"""The index behind the timeline: shares of time bins, whatever the zoom."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from synthetic_run import START_S, spans

from millrace.core.spans import Span
from millrace.dashboard.spans import BINS, TILE_S, SpanIndex
from millrace.monitoring.files.trace import TraceWriter
from millrace.monitoring.run_dir import RunDir


def index_of(path) -> SpanIndex:
    index = SpanIndex(RunDir(path))
    index.refresh()
    return index


def write_trace(path, found) -> None:
    """In small batches, because larger ones are condensed."""
    writer = TraceWriter(RunDir(path).trace, start_s=START_S)
    for start in range(0, len(found), 14):
        writer.write(found[start : start + 14])
    writer.close()


def read_tile(index: SpanIndex, level: int, place: int) -> dict[str, np.ndarray]:
    """[BINS] shares by "worker/activity"."""
    about, data, offset = index.describe(), index.tile(level, place), 0
    shares: dict[str, np.ndarray] = {}
    for track in about["tracks"]:
        count = int(np.frombuffer(data, "<u4", 1, offset)[0])
        entries = np.frombuffer(data, np.dtype("<u2,u1,u1"), count, offset + 4)
        offset += 4 + 4 * count
        for bin, activity, share in entries.tolist():
            name = f"{track['worker']}/{about['activities'][activity]['name']}"
            shares.setdefault(name, np.zeros(BINS))[bin] = share / 255
    assert offset == len(data)
    return shares


def test_shares_of_a_long_tile_are_those_of_the_run(tmp_path):
    write_trace(tmp_path, spans(200))
    level = 12  # 262 s
    shares = read_tile(index_of(tmp_path), level, 0)
    inside = slice(10, 300)  # without start-up

    assert shares["engine-0/generate"][inside].mean() == pytest.approx(0.7, abs=0.01)
    assert shares["engine-0/swap"][inside].mean() == pytest.approx(0.05, abs=0.01)
    assert shares["trainer/step"][inside].mean() == pytest.approx(0.4, abs=0.01)


def test_a_short_tile_shows_single_spans(tmp_path):
    write_trace(tmp_path, spans(20))
    level, length_s = 4, TILE_S * 16
    shares = read_tile(index_of(tmp_path), level, 5)
    middles_s = 5 * length_s + (np.arange(BINS) + 0.5) * length_s / BINS

    is_generating = (middles_s % 1) < 0.7
    assert np.abs(shares["engine-0/generate"] - is_generating).mean() < 0.01


@settings(max_examples=25)
@given(
    lengths=st.lists(st.floats(1e-4, 3.0), min_size=1, max_size=30),
    level=st.integers(0, 8),
    place=st.integers(0, 40),
)
def test_shares_of_a_bin_sum_to_the_covered_time(tmp_path_factory, lengths, level, place):
    path = tmp_path_factory.mktemp("run")
    ends_s = np.cumsum(lengths)
    found = [
        Span(
            worker="engine-0",
            name=f"activity {i % 3}",
            busy=True,
            start_s=START_S + end - length,
            end_s=START_S + end,
        )
        for i, (length, end) in enumerate(zip(lengths, ends_s.tolist(), strict=True))
    ]
    write_trace(path, found)

    shares = read_tile(index_of(path), level, place)

    bin_s = TILE_S * 2**level / BINS
    edges_s = place * TILE_S * 2**level + np.arange(BINS + 1) * bin_s
    covered = np.clip(np.diff(np.minimum(edges_s, ends_s[-1])) / bin_s, 0, 1)
    total = sum(shares.values(), np.zeros(BINS))
    # Each of three activities is rounded to 1/255, and to no less than that.
    assert np.abs(total - covered).max() < 3 / 255 + 1e-5 / bin_s


def test_a_growing_trace_is_read_piece_by_piece(tmp_path):
    run_dir = RunDir(tmp_path)
    writer = TraceWriter(run_dir.trace, start_s=START_S)
    found = spans(4)
    writer.write(found[:9])
    index = index_of(tmp_path)
    # The last event has no end of line until the next one comes.
    assert index.num_spans == 8

    writer.write(found[9:])
    writer.close()
    index.refresh()

    assert index.num_spans == len(found)
    assert index.end_s == pytest.approx(4.0)


def test_a_trace_that_was_moved_aside_is_not_lost(tmp_path):
    run_dir = RunDir(tmp_path)
    writer = TraceWriter(run_dir.trace, start_s=START_S, max_bytes=3000)
    found = spans(8)
    writer.write(found[:10])
    index = index_of(tmp_path)
    writer.write(found[10:20])
    assert run_dir.earlier_trace.is_file()
    writer.write(found[20:30])
    writer.close()

    index.refresh()

    assert index.num_spans == 30


def test_span_at_a_moment_is_exact(tmp_path):
    write_trace(tmp_path, spans(20))
    index = index_of(tmp_path)

    span = index.span_at("engine-0", 3.72)
    assert span is not None
    assert (span["name"], span["busy"]) == ("swap", True)
    assert (span["start_s"], span["end_s"]) == pytest.approx((3.7, 3.75))
    assert index.span_at("engine-0", 1000.0) is None
    assert index.span_at("nobody", 3.0) is None


def test_a_long_trace_is_read_in_parts(tmp_path):
    run_dir = RunDir(tmp_path)
    write_trace(tmp_path, spans(10))
    run_dir.trace.rename(run_dir.earlier_trace)
    write_trace(tmp_path, spans(10))
    index = SpanIndex(run_dir, max_read_bytes=1)

    seen = []
    for _ in range(3):
        index.refresh()
        seen.append((index.describe()["num_spans"], index.is_complete))

    half = len(spans(10))
    assert seen == [(half, False), (2 * half, False), (2 * half, True)]
