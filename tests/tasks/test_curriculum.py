import json
import math

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from millrace.core.records import Task
from millrace.tasks.streams import Curriculum


def curriculum(num_tasks=8, *, seed=3, target=0.5, explore_share=0.25) -> Curriculum:
    tasks = [Task(prompt=str(index)) for index in range(num_tasks)]
    return Curriculum(tasks, seed=seed, target=target, explore_share=explore_share)


def index_of(stream: Curriculum, number: int) -> int:
    return int(stream.task(number).prompt)


def play(stream: Curriculum, numbers, rate_of) -> list[int]:
    drawn = []
    for number in numbers:
        index = index_of(stream, number)
        drawn.append(index)
        stream.observe(number, rate_of(index))
        stream.finish(number)
    return drawn


def test_draws_follow_a_gaussian_around_the_target():
    """Rates 0, 0.5 and 1 against the target 0.5: weights e^-3.125, 1 and e^-3.125."""
    stream = curriculum(3, explore_share=0.01)
    play(stream, range(200), lambda index: index / 2)
    drawn = play(stream, range(200, 4200), lambda index: index / 2)
    edge = math.exp(-((0.5 / 0.2) ** 2) / 2)
    share = np.mean([index == 1 for index in drawn])
    expected = 0.99 / (1 + 2 * edge) + 0.01 / 3
    assert abs(share - expected) < 3 * math.sqrt(expected * (1 - expected) / 4000)


def test_solve_rate_is_a_running_mean_with_weight_one_half():
    stream = curriculum(1)
    for number, rate in enumerate([1.0, 0.0, 0.5]):
        stream.task(number)
        stream.observe(number, rate)
    assert stream.state()["solve_rates"]["0"] == ((1.0 + 0.0) / 2 + 0.5) / 2
    assert curriculum().state()["solve_rates"] == {}


@given(
    st.integers(1, 12),
    st.sampled_from([0.1, 0.25, 0.3, 0.5, 1.0]),
    st.integers(0, 2**32),
    st.lists(st.sampled_from([0.0, 0.5, 1.0]), min_size=12, max_size=12),
)
def test_no_task_starves(num_tasks, share, seed, rates):
    stream = curriculum(num_tasks, seed=seed, explore_share=share)
    drawn = play(stream, range(math.ceil(num_tasks / share) + 1), rates.__getitem__)
    assert set(drawn) == set(range(num_tasks))


def test_draws_depend_only_on_seed_and_solve_rates():
    def rate_of(index):
        return index / 7

    first = play(curriculum(), range(100), rate_of)
    assert play(curriculum(), range(100), rate_of) == first
    assert play(curriculum(seed=4), range(100), rate_of) != first
    assert play(curriculum(), range(100), lambda index: 1 - index / 20) != first


def test_scoring_order_does_not_change_draws():
    ahead, behind = curriculum(2), curriculum(2)
    for stream, order in ((ahead, range(8)), (behind, reversed(range(8)))):
        for number in range(8):
            stream.task(number)
        for number in order:
            stream.observe(number, number / 8)
    rates = ahead.state()["solve_rates"]
    assert rates == behind.state()["solve_rates"]
    assert rates.keys() == {"0", "1"}


def test_number_keeps_its_task_until_it_is_finished():
    stream = curriculum()
    stream_of_nine = [index_of(stream, number) for number in range(9)]
    play(stream, range(100, 200), lambda index: 0.0)
    assert [index_of(stream, number) for number in range(9)] == stream_of_nine


def test_restored_curriculum_continues_with_the_same_draws():
    def rate_of(index):
        return index / 7

    whole = curriculum()
    play(whole, range(50), rate_of)
    open_before = [index_of(whole, number) for number in (50, 51)]
    resumed = curriculum()
    resumed.restore(json.loads(json.dumps(whole.state())))
    assert [index_of(resumed, number) for number in (50, 51)] == open_before
    assert play(resumed, range(50, 150), rate_of) == play(whole, range(50, 150), rate_of)


def test_solve_rates_of_other_tasks_are_not_restored():
    earlier = curriculum(9)
    play(earlier, range(50), lambda index: 0.0)
    stream = curriculum(8)
    stream.restore(earlier.state())
    assert stream.state() == curriculum(8).state()
