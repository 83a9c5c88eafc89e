from millrace.cluster.supervision.watchdog import ProgressWatchdog


class Watched:
    """A watchdog with the clock that it reads."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.watchdog = ProgressWatchdog(clock=lambda: self.now_s)

    def report(self, *work: float, waits: bool = False) -> None:
        for each in work:
            self.watchdog.report(work=each, waits=waits)

    def after(self, seconds: float) -> float | None:
        self.now_s += seconds
        return self.watchdog.stalled_s(timeout_s=10.0, first_timeout_s=60.0)


def test_worker_with_a_call_in_flight_and_no_progress_is_stalled():
    watched = Watched()
    with watched.watchdog.expect_progress():
        watched.report(1, 2)
        assert watched.after(9) is None
        watched.report(2)  # a sign of life is no progress
        assert watched.after(1) == 10


def test_worker_that_reports_progress_is_not_stalled():
    watched = Watched()
    with watched.watchdog.expect_progress():
        for work in range(5):
            watched.report(work)
            assert watched.after(9) is None


def test_worker_without_calls_or_that_has_to_wait_is_not_stalled():
    watched = Watched()
    watched.report(1, 2)
    assert watched.after(100) is None
    with watched.watchdog.expect_progress():
        assert watched.after(9) is None
        watched.report(2, waits=True)
        assert watched.after(9) is None
        assert watched.after(1) == 10
    assert watched.after(100) is None


def test_second_call_does_not_restart_the_clock():
    watched = Watched()
    watched.report(1, 2)
    with watched.watchdog.expect_progress():
        assert watched.after(9) is None
        with watched.watchdog.expect_progress():
            assert watched.after(1) == 10


def test_worker_that_has_not_computed_anything_yet_may_take_longer():
    watched = Watched()
    with watched.watchdog.expect_progress():
        watched.report(0)
        assert watched.after(59) is None
        assert watched.after(1) == 60
