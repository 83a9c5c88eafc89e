import numpy as np
import pytest

from millrace.core.errors import ConfigError
from millrace.core.plugins import build_plugin
from millrace.core.records import Score
from millrace.scoring.advantages import ADVANTAGES, GroupAdvantages


def scores(*totals: float) -> list[Score]:
    return [Score(total=total, parts={}) for total in totals]


def test_advantages_are_deviations_from_the_mean_over_the_std():
    # Mean 2, deviations -1, -1, 2; variance (1 + 1 + 4) / 2 = 3.
    advantages = GroupAdvantages(epsilon=0.0)(scores(1.0, 1.0, 4.0))
    expected = np.array([-1.0, -1.0, 2.0]) / 3**0.5
    np.testing.assert_allclose(advantages, expected, rtol=1e-6)
    assert advantages.dtype == np.float32


def test_epsilon_is_added_to_the_std():
    # Mean 1, deviations -1, 1; variance (1 + 1) / 1 = 2.
    advantages = GroupAdvantages(epsilon=0.5)(scores(0.0, 2.0))
    np.testing.assert_allclose(advantages, [-1 / (2**0.5 + 0.5), 1 / (2**0.5 + 0.5)], rtol=1e-6)


def test_without_normalisation_only_the_mean_is_taken_off():
    advantages = GroupAdvantages(normalize_std=False)(scores(0.0, 1.0, 5.0))
    np.testing.assert_array_equal(advantages, np.float32([-2.0, -1.0, 3.0]))


@pytest.mark.parametrize("normalize_std", [True, False])
@pytest.mark.parametrize("totals", [[0.1] * 3, [0.7] * 7, [1.0], [-3.0] * 8])
def test_a_group_without_variance_gives_exact_zeros(totals, normalize_std):
    advantages = GroupAdvantages(normalize_std=normalize_std, epsilon=0.0)(scores(*totals))
    np.testing.assert_array_equal(advantages, np.zeros(len(totals), np.float32))


def test_the_estimator_is_built_from_its_table():
    table = {"type": "group", "normalize_std": False, "epsilon": 0.01}
    built = build_plugin(table, builtins=ADVANTAGES, default="group", section="scoring.advantages")
    assert built == GroupAdvantages(normalize_std=False, epsilon=0.01)


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"normalise_std": True}, "did you mean 'normalize_std'"),
        ({"normalize_std": "no"}, "normalize_std = 'no' must be true or false"),
        ({"epsilon": -1.0}, r"epsilon = -1.0 must be a finite number, at least 0"),
    ],
)
def test_wrong_settings_are_refused(settings, sentence):
    table = {"type": "group", **settings}
    with pytest.raises(ConfigError, match=sentence):
        build_plugin(table, builtins=ADVANTAGES, default="group", section="scoring.advantages")
