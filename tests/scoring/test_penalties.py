from dataclasses import replace

import pytest
from scored_groups import scored, totals_of

from millrace.core.errors import ConfigError, ScoreError
from millrace.core.records import Branching
from millrace.scoring.shaping import (
    CosineLength,
    LinearLength,
    Shaping,
    SoftOverlong,
    build_penalties,
    build_shaping,
)


@pytest.mark.parametrize(
    ("num_tokens", "expected"),
    [(0, 0.0), (80, 0.0), (85, -0.25), (90, -0.5), (100, -1.0), (150, -1.0)],
)
def test_soft_overlong_by_hand(num_tokens, expected):
    assert SoftOverlong(max_tokens=100, buffer_tokens=20)(num_tokens) == expected


@pytest.mark.parametrize(
    ("num_tokens", "linear", "cosine"),
    [
        (10, 0.0, 0.0),
        (20, 0.0, 0.0),
        (40, -0.25, -(1 - 2**-0.5) / 2),
        (60, -0.5, -0.5),
        (100, -1.0, -1.0),
        (200, -1.0, -1.0),
    ],
)
def test_linear_and_cosine_by_hand(num_tokens, linear, cosine):
    settings = {"max_tokens": 100, "from_tokens": 20}
    assert LinearLength(**settings)(num_tokens) == linear
    assert CosineLength(**settings)(num_tokens) == pytest.approx(cosine, abs=1e-12)


def test_penalties_compose_with_rewards_and_with_each_other():
    penalties = build_penalties(
        [
            {"type": "linear", "max_tokens": 10, "weight": 0.5},
            {"type": "soft_overlong", "max_tokens": 8, "buffer_tokens": 4, "name": "late"},
            {"type": "scored_groups:as_many_as_sqrt", "weight": 0.1},
        ]
    )
    group = scored(1.0, 1.0, lengths=[4, 9], exact=[1.0, 1.0])
    short, long = Shaping(penalties=penalties).penalize(group).scores
    assert short.parts == {"exact": 1.0, "linear": -0.4, "late": 0.0, "as_many_as_sqrt": -2.0}
    assert short.total == pytest.approx(1 - 0.2 - 0.2)
    assert long.parts["late"] == -1.0
    assert long.total == pytest.approx(1 - 0.45 - 1 - 0.3)


def test_penalty_of_a_branch_counts_the_tokens_that_it_shares():
    root, branch = scored(1.0, 1.0, lengths=[9, 3]).episodes
    root = replace(root, branching=Branching(number=0))
    branch = replace(branch, branching=Branching(number=1, parent=0, place=6))
    group = replace(scored(1.0, 1.0), episodes=(root, branch))
    (penalty,) = build_penalties([{"type": "linear", "max_tokens": 10}])
    assert penalty.score(group) == [-0.9, -0.9]


def test_correct_answer_that_was_too_long_is_still_solved():
    penalties = build_penalties([{"type": "linear", "max_tokens": 10}])
    group = scored(1.0, 0.0, lengths=[9, 1])
    long, wrong = Shaping(penalties=penalties).penalize(group).scores
    assert long.total < 1
    assert long.is_solved(1.0)
    assert not wrong.is_solved(1.0)
    assert totals_of(group) == [1.0, 0.0]


@pytest.mark.parametrize(
    ("table", "sentence"),
    [
        ({"type": "soft_overlong", "max_tokens": 4, "buffer_tokens": 5}, "buffer_tokens = 5 must"),
        ({"type": "linear", "max_tokens": 0}, "from_tokens = 0 must be at least 0 and below"),
        ({"type": "cosin", "max_tokens": 9}, "did you mean 'cosine'"),
        ({"type": "linear", "max_token": 9}, "did you mean 'max_tokens'"),
        ({"type": "linear", "max_tokens": 9, "weight": "much"}, "weight = 'much' of 'linear'"),
    ],
)
def test_invalid_settings_are_config_errors(table, sentence):
    with pytest.raises(ConfigError, match=sentence):
        build_penalties([table])


def test_score_parts_need_different_names():
    with pytest.raises(ConfigError, match=r"Two parts of the score are named 'linear'"):
        build_shaping(
            penalties=[{"type": "linear", "max_tokens": 9}],
            filters=(),
            selection={},
            keep=4,
            seed=0,
            scorers=["linear"],
        )


def test_broken_penalty_fails_its_group_with_one_error():
    (penalty,) = build_penalties([{"type": "scored_groups:broken"}])
    with pytest.raises(ScoreError, match="Penalty 'broken' raised KeyError"):
        penalty.score(scored(1.0, 0.0))
