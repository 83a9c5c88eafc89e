import pytest
from hypothesis import given
from hypothesis import strategies as st
from synthetic_run import spans

from millrace.core.spans import Span
from millrace.monitoring.activity import (
    Activity,
    Shares,
    in_order,
    mean_by_role,
    role_of,
    total_shares,
)


def span(start_s: float, end_s: float, name: str, *, busy: bool) -> Span:
    return Span(worker="trainer", name=name, busy=busy, start_s=start_s, end_s=end_s)


def of(activity: Activity, worker: str = "trainer") -> Shares:
    shares = activity.recent()[worker]
    assert shares is not None
    return shares


def test_shares_over_the_whole_run_leave_out_the_start_up():
    total = total_shares(spans(5))
    assert total["engine-0"] is not None
    assert total["trainer"] is not None
    assert total["engine-0"].busy == pytest.approx(0.75)
    assert total["trainer"].doing == pytest.approx({"step": 0.4, "publish": 0.1})
    assert total["trainer"].waiting == pytest.approx({"generation": 0.3, "scores": 0.2})
    assert total["trainer"].top_wait == "generation"


def test_window_drops_earlier_spans():
    activity = Activity(window_s=10.0)
    activity.add([span(0, 100, "step", busy=True), span(100, 105, "scores", busy=False)])
    assert of(activity).waiting == pytest.approx({"scores": 0.5})
    activity.add([span(105, 115, "step", busy=True)])
    assert of(activity).busy == pytest.approx(1.0)
    assert of(activity).top_wait is None


def test_a_worker_that_starts_has_no_shares_yet():
    activity, starting = Activity(), [span(0, 3, "start", busy=True), span(3, 5, "load", busy=True)]
    activity.add(starting)
    assert activity.recent() == total_shares(starting) == {"trainer": None}


@given(
    lengths=st.lists(
        st.tuples(st.floats(0.001, 30), st.sampled_from(["step", "scores"]), st.booleans()),
        min_size=1,
    )
)
def test_shares_always_sum_to_one(lengths):
    activity, added, now = Activity(window_s=10.0), [], 0.0
    for length, name, busy in lengths:
        added.append(span(now, now + length, name, busy=busy))
        activity.add(added[-1:])
        now += length
    for shares in (of(activity), total_shares(added)["trainer"]):
        assert shares is not None
        assert shares.busy + sum(shares.waiting.values()) == pytest.approx(1.0)
        assert shares.busy == pytest.approx(sum(shares.doing.values()))


def test_workers_of_one_role_are_averaged():
    busy = Shares(busy=1.0, doing={"generate": 1.0}, waiting={})
    idle = Shares(busy=0.0, doing={}, waiting={"tasks": 1.0})
    mean = mean_by_role({"engine-0": busy, "engine-1": idle, "engine-2": None, "trainer": busy})
    assert mean["engine"] == Shares(busy=0.5, doing={"generate": 0.5}, waiting={"tasks": 0.5})
    assert mean["trainer"] == busy


def test_a_role_is_a_name_without_its_number():
    assert [role_of(name) for name in ("engine-12", "trainer", "scorer-x")] == [
        "engine",
        "trainer",
        "scorer-x",
    ]


def test_engines_come_first_then_the_trainer_then_the_rest():
    workers = ["scorer-0", "trainer", "engine-10", "engine-2", "helper"]
    assert in_order(workers) == ["engine-2", "engine-10", "trainer", "helper", "scorer-0"]
