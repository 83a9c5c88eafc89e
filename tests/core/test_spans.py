import itertools
import time

from hypothesis import given
from hypothesis import strategies as st

from millrace.core.spans import Timeline


def test_repeats_of_one_activity_are_one_span_with_a_count():
    timeline = Timeline("w", name="start")
    for _ in range(3):
        timeline.enter("generate", busy=True)
    timeline.enter("no work", busy=False)
    names = [(span.name, span.busy, span.count) for span in timeline.drain()]
    assert names[:2] == [("start", True, 1), ("generate", True, 3)]


@given(st.lists(st.sampled_from(["a", "b", "drain"]), max_size=30))
def test_spans_follow_each_other_without_gap_or_overlap(activities):
    timeline = Timeline("w")
    spans = []
    for name in activities:
        if name == "drain":
            spans += timeline.drain()
        else:
            timeline.enter(name, busy=name == "a")
        time.sleep(1e-6)
    spans += timeline.drain()
    for before, after in itertools.pairwise(spans):
        assert before.end_s == after.start_s
    assert all(span.end_s > span.start_s for span in spans)
