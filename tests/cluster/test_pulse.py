from millrace.cluster.supervision.watchdog import ProgressWatchdog


class Watched:
    """A pulse and its clock."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.pulse = ProgressWatchdog(
            timeout_s=10.0, first_timeout_s=60.0, clock=lambda: self.now_s
        )

    def after(self, seconds: float, *, is_asked: bool = True) -> float | None:
        self.now_s += seconds
        return self.pulse.hung_s(is_asked=is_asked)


def test_a_worker_that_is_asked_for_something_and_does_nothing_hangs():
    watched = Watched()
    for work in (1, 2):
        watched.pulse.heard(work=work, waits=False)
    assert watched.after(9) is None
    watched.pulse.heard(work=2, waits=False)  # it is alive, which does not count
    assert watched.after(1) == 10


def test_what_moves_does_not_hang():
    watched = Watched()
    for work in range(5):
        watched.pulse.heard(work=work, waits=False)
        assert watched.after(9) is None


def test_a_worker_that_nobody_asks_or_that_has_to_wait_does_not_hang():
    watched = Watched()
    for work in (1, 2):
        watched.pulse.heard(work=work, waits=False)
    assert watched.after(100, is_asked=False) is None
    assert watched.after(9) is None
    watched.pulse.heard(work=2, waits=True)
    assert watched.after(9) is None
    assert watched.after(1) == 10


def test_a_worker_that_has_not_computed_anything_yet_may_take_longer():
    watched = Watched()
    watched.pulse.heard(work=0, waits=False)
    assert watched.after(59) is None
    assert watched.after(1) == 60
