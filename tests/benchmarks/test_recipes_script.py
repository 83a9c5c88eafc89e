"""benchmarks/recipes.py in small sizes."""

import pytest
import recipes

SHORT = {"steps": 10, "examples": 9600, "held_out": 128, "every": 10}


def test_runs_are_compared_at_the_same_number_of_tokens():
    rows = [
        {"run": "groups", "seed": 0, "curve": [[0, 0.2], [100, 0.4], [200, 0.8]]},
        {"run": "tree", "seed": 0, "curve": [[0, 0.2], [50, 0.4], [100, 0.7]]},
    ]
    found = recipes.summary(rows)
    assert found["groups"]["accuracy"] == [0.4]
    assert found["groups"]["mean_accuracy"] == [0.3]
    assert found["groups"]["tokens_to_target"] == [200]
    assert found["tree"]["accuracy"] == [0.7]
    assert found["tree"]["tokens_to_target"] == [None]


@pytest.mark.slow
@pytest.mark.parametrize("run", recipes.RUNS)
def test_policy_learns_with_each_recipe(tmp_path, run):
    curve = recipes.measure(tmp_path, run, seed=0, sizes=SHORT)["curve"]
    (_, before), *_, (tokens, after) = curve
    assert 8_000 < tokens < 14_000
    assert after > before + 0.1
