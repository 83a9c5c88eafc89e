"""A trainer of several ranks computes what one rank computes; `millrace bench ranks` has it all."""

import pytest

from millrace.bench.ranks import FEATURES, LIMIT, MESHES, compare

FAST = (
    *("grpo", "critic", "lora", "minibatches", "one group", "route replay", "lora of experts"),
    *("bfloat16", "bfloat16 lora"),
)


def differences(features, meshes) -> dict[str, dict[str, float]]:
    return compare(
        {name: FEATURES[name] for name in features}, {name: MESHES[name] for name in meshes}
    )


def test_two_ranks_compute_what_one_rank_computes():
    for feature, row in differences(FAST, ["fsdp 2"]).items():
        assert row["fsdp 2"] < LIMIT, feature


def test_ranks_that_share_microbatches_compute_what_one_rank_computes():
    for feature, row in differences(("teacher's top k", "lora of experts"), ["cp 2"]).items():
        assert row["cp 2"] < LIMIT, feature


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_every_feature_on_every_mesh():
    table = differences(FEATURES, MESHES)
    wrong = {
        (f, m): worst for f, row in table.items() for m, worst in row.items() if worst >= LIMIT
    }
    assert not wrong
