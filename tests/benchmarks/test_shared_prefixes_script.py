"""The workload of benchmarks/shared_prefixes.py, and the gradient that it compares."""

from argparse import Namespace

from shared_prefixes import measure


def test_trees_compute_fewer_rows_and_the_same_gradient():
    options = {"turn_tokens": 8, "microbatch_tokens": 400, "device": "cpu", "dtype": None}
    result = measure(Namespace(model="tiny", groups=1, repeats=1, **options))
    assert result["rows_trees"] < result["rows_first_level"] < result["rows_unshared"]
    assert result["gradient_error"] < 1e-5
