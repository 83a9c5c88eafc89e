import pytest

from millrace.scoring.scheduling.breaker import Breaker


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


def test_it_opens_after_so_many_failures_in_a_row_and_an_answer_starts_the_count_anew(clock):
    breaker = Breaker(failures=2, open_s=10.0, now=clock)
    breaker.failed(is_probe=False)
    breaker.answered()
    breaker.failed(is_probe=False)
    assert not breaker.is_open
    breaker.failed(is_probe=False)
    assert breaker.is_open
    assert breaker.num_opened == 1
    assert breaker.wait_s() == 10.0


def test_with_0_it_never_opens(clock):
    breaker = Breaker(failures=0, open_s=10.0, now=clock)
    for _ in range(50):
        breaker.failed(is_probe=False)
    assert breaker.wait_s() == 0.0


def test_one_call_goes_first_and_the_others_follow_if_it_is_answered(clock):
    breaker = opened(clock)
    clock.now_s += 10.0
    assert breaker.wait_s() == 0.0
    assert breaker.begin()
    assert breaker.wait_s() is None
    breaker.answered()
    assert breaker.wait_s() == 0.0
    assert not breaker.begin()


def test_if_the_first_call_fails_all_wait_again(clock):
    breaker = opened(clock)
    clock.now_s += 10.0
    breaker.failed(is_probe=breaker.begin())
    assert breaker.wait_s() == 10.0
    assert breaker.num_opened == 1


def test_if_the_first_call_is_given_up_another_goes(clock):
    breaker = opened(clock)
    clock.now_s += 10.0
    breaker.abandoned(is_probe=breaker.begin())
    assert breaker.wait_s() == 0.0


def test_calls_that_were_under_way_neither_end_the_probe_nor_prolong_the_wait(clock):
    breaker = opened(clock)
    clock.now_s += 4.0
    breaker.failed(is_probe=False)
    assert breaker.wait_s() == 6.0
    clock.now_s += 6.0
    assert breaker.begin()
    breaker.failed(is_probe=False)
    assert breaker.wait_s() is None


def test_what_the_other_side_says_about_when_to_come_again_goes_before_the_setting(clock):
    breaker = Breaker(failures=1, open_s=10.0, now=clock)
    breaker.failed(is_probe=False, retry_after_s=3.0)
    assert breaker.wait_s() == 3.0
    breaker.failed(is_probe=False, retry_after_s=20.0)
    assert breaker.wait_s() == 20.0
