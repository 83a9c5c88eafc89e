import numpy as np
from fakes import make_group
from hypothesis import given
from hypothesis import strategies as st

from millrace.staging.packing import fill_bins, pack


def test_rollouts_lie_end_to_end_with_restarting_positions():
    batch = pack([make_group(size=3)], microbatch_tokens=100)
    (micro,) = batch.microbatches
    assert micro.lengths.tolist() == [7, 7, 7]
    assert micro.positions.tolist() == [*range(7)] * 3
    assert batch.num_sequences == 3
    assert batch.num_trained_tokens == 12 == micro.mask.sum()


def test_each_token_keeps_its_own_columns():
    group = make_group(size=2, versions=[1, 1, 2, 2], temperature=0.7)
    (micro,) = pack([group], microbatch_tokens=100).microbatches
    start = 0
    for length in micro.lengths:
        tokens = micro.tokens[start : start + length]
        rollout = next(r for r in group.rollouts if np.array_equal(r.tokens, tokens))
        row = slice(start, start + length)
        assert np.array_equal(micro.engine_logprobs[row], rollout.engine_logprobs)
        assert np.array_equal(micro.versions[row], rollout.versions)
        start += length
    assert np.allclose(micro.temperatures, 0.7)


def test_advantages_stand_at_trained_tokens_only():
    (micro,) = pack([make_group(size=2)], microbatch_tokens=100).microbatches
    assert set(micro.advantages[micro.mask].tolist()) == {-1.0, 1.0}
    assert not micro.advantages[~micro.mask].any()


def test_kept_rows_follow_their_tokens_even_beside_rollouts_without_them():
    groups = [make_group(0, kept=True), make_group(1)]
    (micro,) = pack(groups, microbatch_tokens=100).microbatches
    assert micro.kept is not None
    assert len(micro.kept.offsets) == len(micro.tokens) + 1
    for t in range(len(micro.tokens)):
        row = micro.kept.ids[micro.kept.offsets[t] : micro.kept.offsets[t + 1]].tolist()
        assert row in ([], [micro.tokens[t], 99])
    assert len(micro.kept.ids) == 2 * sum(r.num_sampled for r in groups[0].rollouts)


@given(st.lists(st.integers(1, 50), min_size=1, max_size=60), st.integers(10, 100))
def test_bins_hold_every_index_once_within_budget(sizes, budget):
    bins = fill_bins(sizes, budget=budget)
    assert sorted(i for b in bins for i in b) == list(range(len(sizes)))
    for b in bins:
        assert len(b) == 1 or sum(sizes[i] for i in b) <= budget


def test_packing_is_over_95_percent_full_on_long_tailed_lengths():
    rng = np.random.default_rng(0)
    sizes = np.minimum(rng.geometric(1 / 300, 4096), 2048)
    bins = fill_bins(sizes.tolist(), budget=8192)
    assert sizes.sum() / (len(bins) * 8192) > 0.95
