from fakes import make_group
from hypothesis import given
from hypothesis import strategies as st

from millrace.controller.buffer import ReplayBuffer, interleave
from millrace.core.staleness import StalenessLimit


def make_replay(*, per_batch=2, capacity=8, max_staleness=3, seed=0):
    limit = StalenessLimit(max_staleness=max_staleness)
    return ReplayBuffer(per_batch=per_batch, capacity=capacity, limit=limit, seed=seed)


def numbers(groups):
    return [group.number for group in groups]


@given(
    ages=st.lists(st.integers(0, 6), max_size=12),
    per_batch=st.integers(1, 4),
    capacity=st.integers(4, 8),
)
def test_group_is_replayed_at_most_once_and_within_the_limit(ages, per_batch, capacity):
    replay = make_replay(per_batch=per_batch, capacity=capacity)
    replay.keep(make_group(number, versions=6 - age) for number, age in enumerate(ages))
    kept = list(enumerate(ages))[-capacity:]
    fit = [number for number, age in kept if age <= 3]
    drawn = []
    while found := numbers(replay.draw(version=6)):
        assert len(found) <= per_batch
        drawn += found
    assert sorted(drawn) == fit


def test_draw_depends_on_seed_and_version_only():
    def draw(**changes):
        replay = make_replay(per_batch=4, capacity=64, **changes)
        replay.keep(make_group(number) for number in range(64))
        return numbers(replay.draw(version=2))

    assert draw() == draw()
    assert draw() != draw(seed=1)


def test_groups_that_became_too_stale_make_room():
    replay = make_replay(capacity=2, max_staleness=1)
    replay.keep([make_group(0, versions=0)])
    assert numbers(replay.draw(version=2)) == []
    replay.keep([make_group(1, versions=2), make_group(2, versions=2)])
    assert numbers(replay.draw(version=2)) == [1, 2]


def test_replayed_groups_are_spread_over_the_batch():
    fresh, replayed = [make_group(n) for n in range(6)], [make_group(n) for n in (10, 11)]
    assert numbers(interleave(fresh, replayed)) == [0, 1, 10, 2, 3, 4, 11, 5]
    assert numbers(interleave(fresh, [])) == list(range(6))
