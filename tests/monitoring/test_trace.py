import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from synthetic_run import START_S, spans

from millrace.core.errors import ConfigError
from millrace.core.spans import Span
from millrace.monitoring.files.trace import TraceWriter, read_trace


def span(start_s: float, end_s: float, *, name: str = "step", busy: bool = True) -> Span:
    return Span(worker="trainer", name=name, busy=busy, start_s=start_s, end_s=end_s, count=3)


def test_a_closed_trace_is_strict_json_with_one_named_track_per_worker(tmp_path):
    path = tmp_path / "trace.json"
    trace = TraceWriter(path, start_s=START_S)
    trace.write(spans(3))
    trace.close()
    events = json.loads(path.read_text())
    names = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert names == {1: "engine-0", 2: "trainer"}
    complete = [event for event in events if event["ph"] == "X"]
    assert {event["tid"] for event in complete} == {1, 2}
    assert {event["pid"] for event in events} == {1}


def test_events_are_in_microseconds_from_the_start_of_the_run(tmp_path):
    path = tmp_path / "trace.json"
    trace = TraceWriter(path, start_s=100.0)
    trace.write([span(100.5, 100.75), span(100.75, 101.0, name="generation", busy=False)])
    trace.close()
    step, wait = (event for event in json.loads(path.read_text()) if event["ph"] == "X")
    assert (step["name"], step["cat"], step["ts"], step["dur"]) == ("step", "busy", 5e5, 2.5e5)
    assert step["args"] == {"count": 3}
    assert (wait["name"], wait["cat"]) == ("waiting: generation", "waiting")
    assert wait["args"] == {"count": 3, "reason": "generation"}
    assert step["cname"] != wait["cname"]


def test_spans_read_back_as_they_were(tmp_path):
    path = tmp_path / "trace.json"
    trace = TraceWriter(path, start_s=0.0)
    written = [span(0.25, 0.5), span(0.5, 1.0, name="generation", busy=False)]
    trace.write(written)
    trace.close()
    assert read_trace(path) == written


def test_large_trace_continues_in_a_new_file(tmp_path):
    path, earlier = tmp_path / "trace.json", tmp_path / "earlier_trace.json"
    trace = TraceWriter(path, start_s=0.0, max_bytes=2000)
    written = [span(float(n), n + 1.0) for n in range(100)]
    for one in written:
        trace.write([one])
        assert path.stat().st_size <= 2000 + 200
    trace.close()
    newest = [*read_trace(earlier), *read_trace(path)]
    assert newest == written[-len(newest) :]
    assert len(newest) > 10
    json.loads(earlier.read_text())


@given(cut=st.integers(min_value=2))
def test_a_trace_cut_anywhere_reads_up_to_the_cut(tmp_path_factory, cut):
    path = tmp_path_factory.mktemp("cut") / "trace.json"
    trace = TraceWriter(path, start_s=START_S)
    trace.write(spans(4))
    trace.close()
    whole, text = read_trace(path), path.read_text()
    cut %= len(text)
    path.write_text(text[:cut])
    some = read_trace(path)
    assert some == whole[: len(some)]
    lines_lost = text[cut:].count('"ph":"X"') + 1
    assert len(some) >= len(whole) - lines_lost


def test_a_trace_can_be_read_while_it_is_written(tmp_path):
    path = tmp_path / "trace.json"
    trace = TraceWriter(path, start_s=0.0)
    assert read_trace(path) == []
    trace.write([span(0.0, 1.0)])
    assert len(read_trace(path)) == 1


@pytest.mark.parametrize("ending", ["closed", "killed", "cut"])
def test_resumed_trace_continues_at_its_end(tmp_path, ending):
    path = tmp_path / "trace.json"
    first = TraceWriter(path, start_s=100.0)
    first.write([span(100.0, 102.0)])
    if ending == "closed":
        first.close()
    if ending == "cut":
        with path.open("a") as file:
            file.write(',\n{"name": "st')
    second = TraceWriter(path, start_s=5000.0, resume=True)  # more than an hour later
    second.write([span(5000.5, 5001.0)])
    second.close()
    json.loads(path.read_text())
    assert [(s.worker, s.start_s, s.end_s) for s in read_trace(path)] == [
        ("trainer", 0.0, 2.0),
        ("trainer", 2.5, 3.0),
    ]


def test_another_file_is_not_mistaken_for_a_trace(tmp_path):
    path = tmp_path / "trace.json"
    path.write_text("hello\nworld\n")
    with pytest.raises(ConfigError, match=r"trace\.json is not a trace of Millrace: 'hello'"):
        read_trace(path)


def test_a_worker_that_changes_too_often_is_joined_by_activity_with_exact_times(tmp_path):
    path = tmp_path / "trace.json"
    trace = TraceWriter(path, start_s=0.0)
    flicker = [
        span(i / 100, (i + 1) / 100, name="score" if i % 4 == 0 else "no work", busy=i % 4 == 0)
        for i in range(100)
    ]
    trace.write([*flicker, replace(flicker[0], worker="engine-0")])
    trace.close()
    found = [(s.worker, s.name, s.start_s, s.end_s, s.count) for s in read_trace(path)]
    assert found == [
        ("trainer", "score", 0.0, pytest.approx(0.25), 75),
        ("trainer", "no work", pytest.approx(0.25), pytest.approx(1.0), 225),
        ("engine-0", "score", 0.0, 0.01, 3),
    ]
