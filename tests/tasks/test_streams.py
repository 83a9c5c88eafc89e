import pytest
from hypothesis import given
from hypothesis import strategies as st

from millrace.core.records import Task
from millrace.tasks.streams import Epochs, Mixture


def tasks(num_tasks: int) -> list[Task]:
    return [Task(prompt=str(index)) for index in range(num_tasks)]


def test_unshuffled_stream_repeats_tasks_in_order():
    stream = Epochs(tasks(3), seed=0, shuffle=False)
    assert [stream.task(number).prompt for number in range(7)] == list("0120120")


@given(st.integers(1, 40), st.integers(-(2**70), 2**70), st.integers(0, 10**6))
def test_shuffled_epoch_contains_each_task_once(num_tasks, seed, epoch):
    stream = Epochs(tasks(num_tasks), seed=seed, shuffle=True)
    first = epoch * num_tasks
    prompts = [stream.task(number).prompt for number in range(first, first + num_tasks)]
    assert sorted(prompts) == sorted(task.prompt for task in tasks(num_tasks))


def test_task_depends_only_on_seed_and_number():
    numbers = list(range(100))
    straight = Epochs(tasks(16), seed=5, shuffle=True)
    expected = [straight.task(number) for number in numbers]
    resumed = Epochs(tasks(16), seed=5, shuffle=True)
    assert [resumed.task(number) for number in reversed(numbers)] == expected[::-1]


def test_order_differs_between_epochs_and_seeds():
    stream = Epochs(tasks(16), seed=5, shuffle=True)
    other = Epochs(tasks(16), seed=6, shuffle=True)
    first = [stream.task(number) for number in range(16)]
    assert first != [stream.task(number) for number in range(16, 32)]
    assert first != [other.task(number) for number in range(16)]


def mixture(*weights: float, num_tasks: int = 5) -> Mixture:
    streams = {
        name: Epochs(
            [Task(prompt=f"{name} {n}", source=name) for n in range(num_tasks)],
            seed=0,
            shuffle=False,
        )
        for name in "abcdef"[: len(weights)]
    }
    return Mixture(streams, weights=weights)


def test_equal_sources_alternate():
    prompts = [mixture(1.0, 1.0).task(number).prompt for number in range(12)]
    assert prompts[:4] == ["a 0", "b 0", "a 1", "b 1"]
    assert prompts[10:] == ["a 0", "b 0"]


def test_weights_of_three_to_one_interleave_evenly():
    names = [mixture(3.0, 1.0).task(number).source for number in range(8)]
    assert "".join(names) == "aabaaaba"


@given(
    st.lists(st.floats(0.01, 100), min_size=1, max_size=6),
    st.integers(0, 10**6),
)
def test_sources_get_their_shares_without_repeated_numbers(weights, first_cycle):
    mix = mixture(*weights)
    start = first_cycle * Mixture.CYCLE
    places = [mix.locate(number) for number in range(start, start + 2 * Mixture.CYCLE)]
    assert len(set(places)) == len(places)
    for name, weight in zip("abcdef", weights, strict=False):
        own = [number for source, number in places if source == name]
        assert own == list(range(own[0], own[0] + len(own)))
        share = 2 * Mixture.CYCLE * weight / sum(weights)
        assert abs(len(own) - share) <= 2 * len(weights)  # a slot or so of 1000, in each cycle


@given(st.lists(st.integers(1, 20), min_size=2, max_size=6), st.integers(1, 1000))
def test_no_source_is_a_whole_group_ahead_of_its_share(weights, number):
    mix = mixture(*map(float, weights))
    counts = dict.fromkeys("abcdef", 0)
    for earlier in range(number):
        counts[mix.locate(earlier)[0]] += 1
    for name, weight in zip("abcdef", weights, strict=False):
        share = mix.shares[name]
        assert share == pytest.approx(weight / sum(weights), abs=6e-3)
        assert counts[name] - number * share < 1


def test_observe_and_finish_reach_the_source_with_its_own_numbers():
    class Recording(Epochs):
        def __init__(self, name):
            super().__init__([Task(prompt=name)], seed=0, shuffle=False)
            self.calls = []

        def observe(self, number, solve_rate):
            self.calls.append((number, solve_rate))

        def finish(self, number):
            self.calls.append(number)

    streams = Recording("a"), Recording("b")
    mix = Mixture(dict(zip("ab", streams, strict=True)), weights=[1.0, 1.0])
    for number in range(4):
        mix.observe(number, number / 10)
        mix.finish(number)
    assert streams[0].calls == [(0, 0.0), 0, (1, 0.2), 1]
    assert streams[1].calls == [(0, 0.1), 0, (1, 0.3), 1]
