from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from scored_groups import scored, totals_of

from millrace.core.errors import ConfigError, Filtered, ScoreError
from millrace.core.staleness import TokenVersions
from millrace.scoring.advantages import GroupAdvantages, with_advantages
from millrace.scoring.shaping import Overlong, ZeroVariance, build_filters
from millrace.training.packing.packer import pack


def estimated(*totals, **settings):
    group = scored(*totals, **settings)
    return with_advantages(group, GroupAdvantages()(group))


def test_groups_whose_scores_are_all_equal_are_dropped():
    assert ZeroVariance()(scored(0.5, 0.5, 0.5)) is None
    group = scored(0.5, 0.5, 0.75)
    assert ZeroVariance()(group) is group


def test_overlong_masks_cut_episodes_but_keeps_their_scores():
    group = estimated(1.0, 0.0, 0.0, lengths=[2, 3, 4], finishes=["stop", "length", "stop"])
    masked = Overlong()(group)
    assert masked is not None
    assert [rollout.num_sampled for rollout in masked.rollouts] == [2, 0, 4]
    assert [rollout.num_generated for rollout in masked.rollouts] == [2, 3, 4]
    assert np.array_equal(masked.advantages, group.advantages)
    assert totals_of(masked) == [1.0, 0.0, 0.0]
    assert TokenVersions.of_group(masked).oldest == 0
    batch = pack([masked], microbatch_tokens=100)
    assert batch.num_trained_tokens == 6
    trained = np.concatenate([micro.advantages for micro in batch.microbatches])
    assert sorted(trained.tolist()) == sorted([group.advantages[0]] * 2 + [group.advantages[2]] * 4)


def test_overlong_can_drop_the_whole_group():
    group = estimated(1.0, 0.0, finishes=["stop", "length"])
    assert Overlong(action="drop")(group) is None
    finished = estimated(1.0, 0.0)
    assert Overlong(action="drop")(finished) is finished
    assert Overlong()(finished) is finished


def test_filters_run_in_order_and_count_wasted_tokens():
    filters = build_filters(
        [
            {"type": "zero_variance"},
            {"type": "overlong"},
            {"type": "scored_groups:OnlyNumber", "number": 7},
        ]
    )
    wasted = Counter()
    left = filters(
        estimated(1.0, 0.0, lengths=[2, 3], finishes=["stop", "length"], number=7), wasted=wasted
    )
    assert left.num_sampled == 2
    assert wasted == {"overlong": 3}
    for group, reason in (
        (estimated(1.0, 1.0), "zero_variance"),
        (estimated(1.0, 0.0, finishes=["length", "length"], number=7), "overlong"),
        (estimated(1.0, 0.0, number=8), "OnlyNumber"),
    ):
        with pytest.raises(Filtered) as caught:
            filters(group, wasted=wasted)
        assert caught.value.reason == reason
    assert wasted == {"overlong": 3 + 8, "zero_variance": 8, "OnlyNumber": 8}


def test_two_filters_of_one_type_are_counted_separately():
    filters = build_filters([{"type": "scored_groups:OnlyNumber", "number": n} for n in (1, 2)])
    with pytest.raises(Filtered, match="OnlyNumber'"):
        filters(estimated(1.0, 0.0, number=1), wasted=Counter())


def test_without_filters_groups_are_unchanged():
    group = estimated(1.0, 1.0)
    assert build_filters([])(group, wasted=Counter()) is group


@pytest.mark.parametrize(
    ("table", "sentence"),
    [
        (
            {"type": "overlong", "action": "cut"},
            "action' = 'cut': input should be 'mask' or 'drop'",
        ),
        ({"type": "zerovariance"}, "did you mean 'zero_variance'"),
        ({"type": "scored_groups:OnlyNumber"}, "'rollout.filter' does not fit.*'number'"),
    ],
)
def test_invalid_settings_are_config_errors(table, sentence):
    with pytest.raises(ConfigError, match=sentence):
        build_filters([table])


@pytest.mark.parametrize(
    ("function", "sentence"),
    [
        ("broken", r"Filter 'broken' .* raised KeyError"),
        ("true", "returned True; return the group"),
    ],
)
def test_broken_filter_fails_its_group_with_one_error(function, sentence):
    filters = build_filters([{"type": f"scored_groups:{function}"}])
    with pytest.raises(ScoreError, match=sentence):
        filters(estimated(1.0, 0.0), wasted=Counter())


def test_group_without_episodes_after_a_filter_is_dropped():
    filters = build_filters([{"type": "scored_groups:without_episodes"}])
    with pytest.raises(Filtered):
        filters(replace(estimated(1.0, 0.0), number=3), wasted=Counter())
