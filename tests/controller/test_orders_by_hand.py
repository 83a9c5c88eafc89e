import dataclasses

import pytest
from fakes import make_group

from millrace.controller.orders import build_group_order, check_room
from millrace.core.errors import ConfigError
from millrace.core.records import Score
from millrace.core.staleness import BufferedGroup, StalenessLimit, TokenVersions


def waiting(*versions, solved=()):
    """A group of four episodes for each entry; `solved` of them, 2 unless said."""
    found = []
    for number, stamped in enumerate(versions):
        num_solved = solved[number] if solved else 2
        scores = tuple(Score(total=float(i < num_solved), parts={}) for i in range(4))
        group = make_group(number, versions=stamped, size=4)
        group = dataclasses.replace(group, scores=scores)
        found.append(BufferedGroup(group=group, token_versions=TokenVersions.of_group(group)))
    return found


def chosen(order, groups, n, **settings):
    return list(build_group_order({"type": order, **settings}).choose(groups, n, version=9))


def test_ready_hands_out_in_order_of_admission():
    assert chosen("ready", waiting(5, 3, 4), 2) == [0, 1]


def test_oldest_goes_by_the_oldest_token_then_by_admission():
    assert chosen("oldest", waiting([5, 5, 5, 6], [4, 9, 9, 9], 5), 3) == [1, 0, 2]


def test_freshest_goes_by_the_mean_then_by_admission():
    assert chosen("freshest", waiting([5, 5, 5, 6], [4, 9, 9, 9], 5, [4, 9, 9, 9]), 3) == [1, 3, 0]


def test_difficulty_goes_by_the_distance_from_half_solved_then_by_age():
    groups = waiting(5, 6, 4, 5, solved=[4, 2, 3, 1])
    assert chosen("difficulty", groups, 4) == [1, 2, 3, 0]


def test_difficulty_uses_solved_at():
    groups = waiting(5, 5, solved=[2, 4])
    assert chosen("difficulty", groups, 1, solved_at=0.5) == [0]
    assert chosen("difficulty", groups, 2, solved_at=1.5) == [0, 1]  # none of either


def test_difficulty_counts_a_long_correct_episode_as_solved():
    short, long = waiting(5, 5, solved=[4, 2])
    scores = tuple(
        dataclasses.replace(score, total=score.total / 2, unpenalized=score.total)
        for score in long.group.scores
    )
    long = dataclasses.replace(long, group=dataclasses.replace(long.group, scores=scores))
    assert chosen("difficulty", [short, long], 1) == [1]


def test_difficulty_uses_solved_at_of_the_evaluation_unless_it_has_its_own():
    groups = waiting(5, 5, solved=[4, 2])
    for table, first in (({}, 0), ({"solved_at": 1.0}, 1)):
        order = build_group_order({"type": "difficulty", **table}, solved_at=1.5)
        assert list(order.choose(groups, 1, version=9)) == [first]


def room(order, **changes):
    settings = {"max_staleness": 3, **changes}
    capacity = settings.pop("capacity", 64)
    limit = StalenessLimit(**settings)
    check_room({"type": order}, groups_per_step=8, capacity=capacity, limit=limit)


def test_order_that_never_has_enough_groups_is_refused():
    room("oldest", capacity=8, max_staleness=0)
    room("freshest", capacity=16, max_staleness=3)
    with pytest.raises(ConfigError, match=r"16 waiting groups, but buffer\.capacity = 15; raise"):
        room("freshest", capacity=15)
    with pytest.raises(ConfigError, match=r"max_staleness = 2; raise it to 3, or"):
        room("difficulty", max_staleness=2)
    room("difficulty", max_staleness=2, only_at_take=True)  # admission does not limit it


@pytest.mark.parametrize(
    ("table", "hint"),
    [
        ({"type": "fresh"}, "did you mean 'freshest'"),
        ({"type": "difficulty", "solved": 1}, "did you mean 'solved_at'"),
    ],
)
def test_misspelled_order_is_an_error_with_a_suggestion(table, hint):
    with pytest.raises(ConfigError, match=hint):
        build_group_order(table)
