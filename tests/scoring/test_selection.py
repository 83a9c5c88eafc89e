from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scored_groups import scored, totals_of

from millrace.core.errors import ConfigError, ScoreError
from millrace.scoring.shaping import (
    FirstSelection,
    RocSelection,
    Shaping,
    build_selection,
    select,
)


def test_cleanest_then_shortest_successes_are_kept():
    group = scored(
        1.0, 1.0, 1.0, 1.0, 1.0, 0.0,
        lengths=[9, 3, 5, 1, 4, 7],
        finishes=["stop", "stop", "stop", "length", "stop", "stop"],
        form=[1.0, 0.0, 1.0, 1.0, None, 1.0],
    )  # fmt: skip
    rng = np.random.default_rng(0)
    # 5 of 6 are solved; failures get 0.5 of 3 places, rounded up to 1.
    assert RocSelection()(group, keep=3, rng=rng) == [1, 4, 5]
    assert RocSelection(quality="form")(group, keep=3, rng=rng) == [0, 2, 5]


def test_random_failures_are_kept_in_proportion():
    group = scored(*[0.0] * 8, *[1.0] * 4)
    chosen = Counter()
    for seed in range(300):
        kept = RocSelection()(group, keep=6, rng=np.random.default_rng(seed))
        assert sum(index < 8 for index in kept) == 4
        chosen.update(index for index in kept if index < 8)
    assert min(chosen.values()) > 100  # 150 each on average


@given(
    st.lists(st.sampled_from([0.0, 0.5, 1.0]), min_size=2, max_size=16),
    st.data(),
)
def test_selection_keeps_the_right_number_of_successes_and_failures(totals, data):
    keep = data.draw(st.integers(2, len(totals)))
    group = scored(*totals, number=data.draw(st.integers(0, 99)))
    selected = select(group, RocSelection(), keep=keep, seed=1)
    assert len(selected.episodes) == len(selected.scores) == keep
    pairs = zip(group.episodes, group.scores, strict=True)
    played = {id(episode): score for episode, score in pairs}
    assert len({id(episode) for episode in selected.episodes}) == keep
    for episode, score in zip(selected.episodes, selected.scores, strict=True):
        assert played[id(episode)] is score
    for is_solved in (True, False):
        before = sum((total >= 1) == is_solved for total in totals)
        after = sum((total >= 1) == is_solved for total in totals_of(selected))
        assert after >= min(before, 1)
        assert abs(after - keep * before / len(totals)) <= 1
    assert select(group, RocSelection(), keep=keep, seed=1).scores == selected.scores


def test_success_ignores_length_penalties():
    group = scored(0.6, 0.0, 0.0, 0.0)
    first = replace(group.scores[0], unpenalized=1.0)
    group = replace(group, scores=(first, *group.scores[1:]))
    assert 0 in RocSelection()(group, keep=2, rng=np.random.default_rng(0))


def test_unselected_tokens_are_counted_as_wasted():
    group = scored(1.0, 1.0, 0.0, 0.0, lengths=[1, 2, 4, 8])
    wasted = Counter()
    selected = Shaping(keep=2).select(group, wasted=wasted)
    assert totals_of(selected) == [1.0, 1.0]
    assert wasted == {"unselected": 12}
    assert Shaping(keep=4).select(group, wasted=wasted) is group
    assert Shaping().select(group, wasted=wasted) is group


def test_user_function_gets_its_settings():
    selection = build_selection({"type": "scored_groups:every_second", "first": 1})
    selected = select(scored(0.0, 0.1, 0.2, 0.3), selection, keep=2, seed=0)
    assert totals_of(selected) == [0.1, 0.3]
    assert build_selection({}) == RocSelection()
    assert build_selection({"type": "first"}) == FirstSelection()


@pytest.mark.parametrize(
    ("table", "sentence"),
    [
        ({"type": "scored_groups:every_second", "second": 1}, "does not fit .*every_second"),
        ({"type": "rok"}, "did you mean 'roc'"),
        ({"type": "roc", "solved": 1}, "did you mean 'solved_at'"),
    ],
)
def test_invalid_settings_are_config_errors(table, sentence):
    with pytest.raises(ConfigError, match=sentence):
        build_selection(table)


@pytest.mark.parametrize(
    ("selection", "sentence"),
    [
        (
            {"type": "scored_groups:every_second"},
            r"returned \[0, 2\].*3 different indices of its 4",
        ),
        ({"type": "scored_groups:broken"}, "raised KeyError"),
        (
            {"type": "roc", "quality": "style"},
            "quality = 'style' is not a part of the score.*exact",
        ),
    ],
)
def test_invalid_selection_fails_its_group_with_one_error(selection, sentence):
    group = scored(1.0, 1.0, 1.0, 0.0, exact=[1.0] * 4)
    with pytest.raises(ScoreError, match=sentence):
        select(group, build_selection(selection), keep=3, seed=0)
