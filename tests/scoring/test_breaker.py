import pytest

from millrace.scoring.scheduling.scorer_queue import Breaker


class Clock:
    def __init__(self):
        self.now_s = 100.0

    def __call__(self):
        return self.now_s


@pytest.fixture
def clock():
    return Clock()


def opened(clock, *, failures=2):
    breaker = Breaker(failures=failures, open_s=10.0, now=clock)
    for _ in range(failures):
        breaker.failed(is_probe=False)
    return breaker


def test_breaker_opens_after_consecutive_failures_and_an_answer_resets_the_count(clock):
    breaker = Breaker(failures=2, open_s=10.0, now=clock)
    breaker.failed(is_probe=False)
    breaker.answered()
    breaker.failed(is_probe=False)
    assert not breaker.is_open
    breaker.failed(is_probe=False)
    assert breaker.is_open
    assert breaker.num_opened == 1
    assert breaker.wait_s() == 10.0


def test_breaker_with_0_failures_never_opens(clock):
    breaker = Breaker(failures=0, open_s=10.0, now=clock)
    for _ in range(50):
        breaker.failed(is_probe=False)
    assert breaker.wait_s() == 0.0


def test_answered_probe_closes_the_breaker(clock):
    breaker = opened(clock)
    clock.now_s += 10.0
    assert breaker.wait_s() == 0.0
    assert breaker.begin()
    assert breaker.wait_s() is None
    breaker.answered()
    assert breaker.wait_s() == 0.0
    assert not breaker.begin()


def test_failed_probe_keeps_the_breaker_open(clock):
    breaker = opened(clock)
    clock.now_s += 10.0
    breaker.failed(is_probe=breaker.begin())
    assert breaker.wait_s() == 10.0
    assert breaker.num_opened == 1


def test_cancelled_probe_is_replaced_by_another(clock):
    breaker = opened(clock)
    clock.now_s += 10.0
    breaker.abandoned(is_probe=breaker.begin())
    assert breaker.wait_s() == 0.0


def test_late_failures_neither_end_the_probe_nor_prolong_the_wait(clock):
    breaker = opened(clock)
    clock.now_s += 4.0
    breaker.failed(is_probe=False)
    assert breaker.wait_s() == 6.0
    clock.now_s += 6.0
    assert breaker.begin()
    breaker.failed(is_probe=False)
    assert breaker.wait_s() is None


def test_retry_after_overrides_the_setting(clock):
    breaker = Breaker(failures=1, open_s=10.0, now=clock)
    breaker.failed(is_probe=False, retry_after_s=3.0)
    assert breaker.wait_s() == 3.0
    breaker.failed(is_probe=False, retry_after_s=20.0)
    assert breaker.wait_s() == 20.0
