import dataclasses

import numpy as np
import pytest
import torch
from fakes import make_group
from hypothesis import given, settings
from hypothesis import strategies as st

from millrace.core.microbatch import MIN_SHARED_TOKENS, Microbatch, segment_order
from millrace.core.records import (
    Episode,
    Group,
    Rollout,
    Sampling,
    Score,
    Task,
    TeacherLogprobs,
    Turn,
)
from millrace.models.attention.layout import PackedLayout
from millrace.training.packing.bins import fill_bins, fill_rank_bins
from millrace.training.packing.packer import minibatches_of, pack
from millrace.training.packing.prefix_trees import Sample, grow_trees
from millrace.training.packing.splitting import by_rollout


def rollout_of(tokens: list[int], *, prompt: int) -> Rollout:
    length = len(tokens)
    mask = np.arange(length) >= prompt
    return Rollout(
        tokens=np.array(tokens, np.int32),
        mask=mask,
        engine_logprobs=np.where(mask, -np.arange(length), 0).astype(np.float32),
        versions=np.where(mask, 3, -1).astype(np.int32),
        sampling=Sampling(),
    )


def group_of(*rollouts: Rollout, number: int = 0) -> Group:
    """One rollout an episode; the advantage of episode i is i + 1."""
    return Group(
        number=number,
        task=Task(prompt=""),
        episodes=tuple(Episode(turns=(), rollouts=(rollout,)) for rollout in rollouts),
        advantages=np.arange(1, len(rollouts) + 1, dtype=np.float32),
    )


def rows_seen(micro: Microbatch, row: int) -> list[int]:
    """The rows that a row sees, in order, itself last."""
    starts = np.cumsum(micro.lengths) - micro.lengths
    segment = int(np.searchsorted(starts, row, side="right")) - 1
    rows = [*range(starts[segment], row + 1)]
    while (segment := micro.parents[segment]) >= 0:
        rows = [*range(starts[segment], starts[segment] + micro.lengths[segment]), *rows]
    return rows


def trained_with_context(micro: Microbatch) -> list[tuple]:
    """(tokens before it, positions, token, logprob, advantage) of every trained token."""
    found = []
    for i, row in enumerate(micro.predictors):
        rows = rows_seen(micro, int(row))
        assert micro.positions[rows].tolist() == list(range(len(rows)))
        context = tuple(micro.tokens[rows].tolist())
        found.append(
            (context, micro.targets[i], micro.engine_logprobs[i], float(micro.advantages[i]))
        )
    return found


def expected_of(group: Group) -> list[tuple]:
    assert group.advantages is not None
    return [
        (tuple(r.tokens[:t].tolist()), r.tokens[t], r.engine_logprobs[t], float(advantage))
        for r, advantage in zip(group.rollouts, group.advantages, strict=True)
        for t in np.flatnonzero(r.mask)
    ]


def test_unrelated_rollouts_are_packed_end_to_end_without_their_last_token():
    batch = pack([make_group(size=3)], microbatch_tokens=100)
    (micro,) = batch.microbatches
    assert micro.lengths.tolist() == [6, 6, 6]  # what a seventh row would predict is not trained
    assert micro.parents.tolist() == [-1, -1, -1]
    assert micro.positions.tolist() == [*range(6)] * 3
    assert batch.num_sequences == 3
    assert batch.num_trained_tokens == 12 == len(micro.targets)


def test_a_shared_prompt_is_stored_once_and_predicts_the_first_token_of_each():
    prompt = [5, 6, 7, 8, 9]
    rollouts = [rollout_of([*prompt, *own], prompt=5) for own in ([1, 2, 3], [2, 4], [3])]
    (micro,) = pack([group_of(*rollouts)], microbatch_tokens=100).microbatches
    # The last token of a rollout needs no row, so the third rollout adds none.
    assert micro.tokens.tolist() == [*prompt, 1, 2, 2]
    assert micro.lengths.tolist() == [5, 2, 1]
    assert micro.parents.tolist() == [-1, 0, 0]
    assert micro.positions.tolist() == [0, 1, 2, 3, 4, 5, 6, 5]
    by_rollout = [micro.predictors[micro.rollouts == i].tolist() for i in range(3)]
    assert sorted(by_rollout) == [[4], [4, 5, 6], [4, 7]]
    assert sorted(trained_with_context(micro)) == sorted(expected_of(group_of(*rollouts)))


def test_equal_rollouts_share_all_rows_and_keep_their_own_columns():
    tokens = [5, 6, 7, 8, 9, 1, 2]
    group = group_of(*(rollout_of(tokens, prompt=4) for _ in range(3)))
    (micro,) = pack([group], microbatch_tokens=100).microbatches
    assert micro.tokens.tolist() == tokens[:-1]
    assert micro.rollouts.tolist() == [0, 0, 0, 1, 1, 1, 2, 2, 2]
    assert micro.advantages.tolist() == [1, 1, 1, 2, 2, 2, 3, 3, 3]


def test_a_rollout_that_extends_another_shares_all_of_it():
    group = group_of(
        rollout_of([5, 6, 7, 8, 1, 2], prompt=4), rollout_of([5, 6, 7, 8, 1, 3, 4, 5], prompt=6)
    )
    (micro,) = pack([group], microbatch_tokens=100).microbatches
    assert micro.tokens.tolist() == [5, 6, 7, 8, 1, 3, 4]
    assert micro.lengths.tolist() == [7]


def test_a_prefix_that_is_too_short_is_not_shared():
    own = range(20, 20 + 2 * MIN_SHARED_TOKENS)
    for shared in (MIN_SHARED_TOKENS - 1, MIN_SHARED_TOKENS):
        rollouts = [rollout_of([*range(3, 3 + shared), i, *own], prompt=1) for i in (1, 2)]
        (micro,) = pack([group_of(*rollouts)], microbatch_tokens=100).microbatches
        assert (micro.parents >= 0).any() == (shared == MIN_SHARED_TOKENS)


def test_an_unrelated_rollout_does_not_prevent_sharing_among_the_others():
    long = list(range(100, 150))
    alike = [rollout_of([*long, i, i], prompt=50) for i in range(3)]
    odd = rollout_of([*long[:8], *range(50)], prompt=8)
    (micro,) = pack([group_of(*alike, odd)], microbatch_tokens=1000).microbatches
    assert micro.lengths.tolist() == [8, 49, 42, 1, 1, 1]
    assert micro.parents.tolist() == [-1, 0, 0, 2, 2, 2]


def test_prefixes_are_shared_at_any_depth():
    """An episode of four turns and an attempt at each of its turns but the first, twice."""
    turns = [[*range(10 * t, 10 * t + 8)] for t in range(1, 5)]
    main = [token for turn in turns for token in turn]
    attempts = [[*main[: 8 * t], 90 + t, *range(60, 66)] for t in (1, 2, 3)]
    rollouts = [rollout_of(tokens, prompt=4) for tokens in (main, *attempts) * 2]
    (micro,) = pack([group_of(*rollouts)], microbatch_tokens=200).microbatches
    assert micro.lengths.tolist() == [8, 8, 8, 7, 6, 6, 6]
    assert micro.parents.tolist() == [-1, 0, 1, 2, 2, 1, 0]
    assert sorted(trained_with_context(micro)) == sorted(expected_of(group_of(*rollouts)))


def test_a_short_prefix_of_long_completions_is_not_worth_a_call():
    for length, is_shared in ((40, True), (400, False)):
        tokens = [[*range(3, 9), i, *range(20, 20 + length)] for i in (1, 2)]
        rollouts = [rollout_of(own, prompt=1) for own in tokens]
        (micro,) = pack([group_of(*rollouts)], microbatch_tokens=1000).microbatches
        assert (micro.parents >= 0).any() == is_shared


def test_parts_of_a_tree_fit_the_budget_and_share_what_they_can():
    turns = [[*range(10 * t, 10 * t + 8)] for t in range(1, 5)]
    main = [token for turn in turns for token in turn]
    attempts = [[*main[:24], 90 + i, *range(60, 66)] for i in range(6)]
    rollouts = [rollout_of(tokens, prompt=4) for tokens in (main, *attempts)]
    batch = pack([group_of(*rollouts)], microbatch_tokens=40)
    assert [len(micro.tokens) for micro in batch.microbatches] == [37, 36, 36, 30]
    found = [row for micro in batch.microbatches for row in trained_with_context(micro)]
    assert sorted(found) == sorted(expected_of(group_of(*rollouts)))


def test_a_group_over_the_budget_is_split_with_a_copy_of_the_shared_prefix():
    prompt = list(range(100, 120))
    rollouts = [rollout_of([*prompt, *([i] * 11)], prompt=20) for i in range(8)]  # 20 + 8 * 10 rows
    batch = pack([group_of(*rollouts)], microbatch_tokens=50)
    assert [len(micro.tokens) for micro in batch.microbatches] == [50, 50, 40]
    found = [row for micro in batch.microbatches for row in trained_with_context(micro)]
    assert sorted(found) == sorted(expected_of(group_of(*rollouts)))


def test_a_rollout_over_the_budget_gets_a_microbatch_of_its_own():
    prompt = list(range(100, 120))
    rollouts = [rollout_of([*prompt, i, i, i], prompt=20) for i in range(2)]
    batch = pack([group_of(*rollouts)], microbatch_tokens=10)
    assert [micro.lengths.tolist() for micro in batch.microbatches] == [[22], [22]]


def test_each_token_keeps_its_own_columns():
    group = make_group(size=2, versions=[1, 1, 2, 2], temperature=0.7)
    (micro,) = pack([group], microbatch_tokens=100).microbatches
    for number in range(2):
        mine = micro.rollouts == number
        rollout = next(
            r for r in group.rollouts if np.array_equal(r.tokens[3:], micro.targets[mine])
        )
        assert np.array_equal(micro.engine_logprobs[mine], rollout.engine_logprobs[rollout.mask])
        assert micro.versions[mine].tolist() == [1, 1, 2, 2]
    assert np.allclose(micro.temperatures, 0.7)
    assert sorted(set(micro.advantages.tolist())) == [-1.0, 1.0]


def test_token_advantages_replace_those_of_episodes():
    rollouts = [rollout_of([5, 6, 7, 8, own, 2], prompt=4) for own in (1, 3)]
    by_token = tuple(np.arange(6, dtype=np.float32) + 10 * i for i in range(2))
    group = dataclasses.replace(group_of(*rollouts), token_advantages=by_token)
    (micro,) = pack([group], microbatch_tokens=100).microbatches
    assert micro.advantages.tolist() == [4, 5, 14, 15]


def test_rollouts_without_trained_tokens_are_counted_but_not_packed():
    trained, untrained = rollout_of([1, 2, 3, 4], prompt=2), rollout_of([1, 2, 3, 4], prompt=4)
    batch = pack([group_of(trained, untrained)], microbatch_tokens=100)
    assert batch.num_sequences == 2
    assert batch.num_trained_tokens == 2
    (micro,) = batch.microbatches
    assert micro.tokens.tolist() == [1, 2, 3]


def test_tokens_have_the_score_of_their_episode_if_the_loss_needs_it():
    group = group_of(*(rollout_of([5, 6, i, i], prompt=2) for i in range(3)))
    group = dataclasses.replace(
        group, scores=tuple(Score(total=total, parts={}) for total in (0.5, 0.0, -1.0))
    )
    (whole,) = pack([group], microbatch_tokens=100, scores=True).microbatches
    assert whole.scores is not None
    expected = {0: 0.5, 1: 0.0, 2: -1.0}  # by token
    for part in (whole, *by_rollout(whole)):
        assert part.scores.tolist() == [expected[token] for token in part.targets.tolist()]
    (without,) = pack([group], microbatch_tokens=100).microbatches
    assert without.scores is None


def test_minibatches_hold_whole_groups_in_order():
    groups = [make_group(number, size=2) for number in range(5)]
    minibatches = minibatches_of(groups, num_minibatches=2)
    assert [[group.number for group in part] for part in minibatches] == [[0, 1], [2, 3, 4]]
    batches = [pack(part, microbatch_tokens=100) for part in minibatches]
    assert [batch.num_sequences for batch in batches] == [4, 6]


def test_kept_rows_follow_their_tokens_even_beside_rollouts_without_them():
    groups = [make_group(0, kept=True), make_group(1)]
    (micro,) = pack(groups, microbatch_tokens=100).microbatches
    assert micro.kept is not None
    assert len(micro.kept.offsets) == len(micro.targets) + 1
    for i, target in enumerate(micro.targets):
        row = micro.kept.ids[micro.kept.offsets[i] : micro.kept.offsets[i + 1]].tolist()
        assert row in ([], [target, 99])
    assert len(micro.kept.ids) == 2 * sum(r.num_sampled for r in groups[0].rollouts)


tokens = st.integers(1, 2)  # of two kinds only, so that much is shared
rollouts = st.builds(
    lambda prompt, own: rollout_of([*prompt, *own], prompt=len(prompt)),
    st.lists(tokens, min_size=1, max_size=12),
    st.lists(tokens, min_size=1, max_size=8),
)


@settings(max_examples=100)
@given(st.lists(st.lists(rollouts, min_size=1, max_size=6), min_size=1, max_size=3), st.data())
def test_every_trained_token_is_predicted_once_from_exactly_its_context(members, data):
    groups = [group_of(*rows, number=i) for i, rows in enumerate(members)]
    budget = data.draw(st.integers(1, 60))
    batch = pack(groups, microbatch_tokens=budget)
    found = [row for micro in batch.microbatches for row in trained_with_context(micro)]
    assert sorted(found) == sorted(row for group in groups for row in expected_of(group))
    for micro in batch.microbatches:
        assert len(micro.tokens) <= budget or not (micro.parents >= 0).any()
        assert segment_order(micro.parents).tolist() == [*range(len(micro.parents))]
        PackedLayout(micro.lengths, parents=micro.parents, device=torch.device("cpu"))
        assert (micro.lengths > 0).all()


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


@given(
    st.lists(st.integers(1, 50), min_size=1, max_size=60),
    st.integers(10, 100),
    st.sampled_from([2, 3, 4]),
)
def test_rank_bins_hold_every_index_once_within_budget_and_equally_many(sizes, budget, num_ranks):
    ranks = fill_rank_bins(sizes, sizes, budget=budget, num_ranks=num_ranks)
    assert len(ranks) == num_ranks
    assert len({len(rank) for rank in ranks}) == 1
    bins = [b for rank in ranks for b in rank]
    assert sorted(i for b in bins for i in b) == list(range(len(sizes)))
    for b in bins:
        assert len(b) <= 1 or sum(sizes[i] for i in b) <= budget


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_rank_bins_of_long_tailed_lengths_cost_the_same_at_each_position_and_in_sum(num_ranks):
    rng = np.random.default_rng(0)
    sizes = np.minimum(rng.geometric(1 / 300, 512), 2048)
    costs = sizes + sizes**2 / 24_576
    ranks = fill_rank_bins(sizes.tolist(), costs.tolist(), budget=8192, num_ranks=num_ranks)
    loads = np.array([[costs[b].sum() for b in rank] for rank in ranks])  # [ranks, positions]
    assert (loads.max(0) / loads.mean(0)).max() < 1.02
    assert loads.sum(1).max() / loads.sum(1).mean() < 1.01
    num_bins = len(fill_bins(sizes.tolist(), budget=8192))
    assert loads.size <= num_bins + 2 * num_ranks


def samples_of(group: Group) -> list[Sample]:
    return [
        Sample(rollout=r, advantages=np.ones(r.num_sampled, np.float32)) for r in group.rollouts
    ]


def packed_group(num: int, *, number: int = 0) -> Group:
    rng = np.random.default_rng(number)
    prompt = rng.integers(3, 30, 6).tolist()
    lengths = rng.integers(1, 20, num)
    return group_of(
        *(rollout_of([*prompt, *rng.integers(3, 30, n)], prompt=6) for n in lengths), number=number
    )


@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize("pairs", [False, True])
def test_ranks_get_equally_many_microbatches_and_together_the_whole_batch(num_ranks, pairs):
    groups = [packed_group(8, number=number) for number in range(24 if pairs else 6)]
    settings = {"microbatch_tokens": 128, "pairs": pairs}
    whole = pack(groups, **settings)
    batch = pack(groups, **settings, num_ranks=num_ranks)
    shares = [batch.of_rank(rank) for rank in range(num_ranks)]
    assert len({len(share.microbatches) for share in shares}) == 1
    for share in shares:
        assert share.num_ranks == 1
        for total in ("num_sequences", "num_trained_tokens", "num_groups"):
            assert getattr(share, total) == getattr(whole, total)
    trained = [one for m in batch.microbatches for one in trained_with_context(m)]
    expected = [one for m in whole.microbatches for one in trained_with_context(m)]
    assert sorted(trained) == sorted(expected)
    rows = [sum(len(m.tokens) for m in share.microbatches) for share in shares]
    assert max(rows) / np.mean(rows) < 1.15
    assert whole.balance == 1
    assert batch.balance == pytest.approx(np.mean(rows) / max(rows), abs=0.01)  # short rows


def num_rows(groups: list[Group], *, num_ranks: int) -> int:
    batch = pack(groups, microbatch_tokens=512, num_ranks=num_ranks)
    return sum(len(m.tokens) for m in batch.microbatches if len(m.targets))


@pytest.mark.parametrize("num_ranks", [2, 8])
def test_as_many_equal_families_as_ranks_are_not_split(num_ranks):
    families = [packed_group(8)] * num_ranks
    assert num_rows(families, num_ranks=num_ranks) == num_rows(families, num_ranks=1)
    assert pack(families, microbatch_tokens=512, num_ranks=num_ranks).balance == 1


def test_a_family_is_split_if_its_rank_would_have_much_more_work_than_the_other():
    families = [packed_group(8), packed_group(2, number=1)]
    assert num_rows(families, num_ranks=2) > num_rows(families, num_ranks=1)  # prompts have copies
    assert pack(families, microbatch_tokens=512, num_ranks=2).balance > 0.9


@settings(max_examples=50)
@given(
    st.lists(
        st.tuples(st.integers(1, 200), st.lists(st.integers(1, 100), min_size=1, max_size=8)),
        min_size=1,
        max_size=8,
    ),
    st.sampled_from([2, 4, 8]),
)
def test_costliest_rank_is_as_cheap_as_without_splits_and_with_parts_of_half_a_share(
    families, num_ranks
):
    rng = np.random.default_rng(0)
    groups: list[Group] = []
    for number, (prompt, lengths) in enumerate(families):
        shared = rng.integers(3, 30, prompt).tolist()
        rows = [[*shared, *rng.integers(3, 30, length)] for length in lengths]
        groups.append(group_of(*(rollout_of(row, prompt=prompt) for row in rows), number=number))
    batch = pack(groups, microbatch_tokens=1024, num_ranks=num_ranks)
    costliest = max(
        sum(
            len(m.tokens) + (m.positions + 0.5).sum() / 24_576
            for m in batch.of_rank(rank).microbatches
            if len(m.targets)
        )
        for rank in range(num_ranks)
    )
    trees = [tree for group in groups for tree in grow_trees(samples_of(group))]
    half = sum(tree.num_rows for tree in trees) // (2 * num_ranks)
    for limit in (half, 1024):
        limits = [min(1024, max(limit, 2 * tree.num_shared)) for tree in trees]
        parts = [p for t, most in zip(trees, limits, strict=True) for p in t.parts(budget=most)]
        sizes, costs = [part.num_rows for part in parts], [part.cost for part in parts]
        ranks = fill_rank_bins(sizes, costs, budget=1024, num_ranks=num_ranks)
        loads = [sum(costs[i] for bin_ in rank for i in bin_) for rank in ranks]
        assert costliest <= max(loads) * (1 + 1e-9)


def test_a_rank_without_rollouts_gets_a_microbatch_without_trained_tokens():
    batch = pack([packed_group(1)], microbatch_tokens=128, num_ranks=4)
    assert len(batch.microbatches) == 4
    counts = [len(m.targets) for m in batch.microbatches]
    assert sorted(counts) == [0, 0, 0, batch.num_trained_tokens]
    assert batch.balance == 0.25  # one of four ranks has work
    for micro in batch.microbatches:
        assert micro.lengths.sum() == len(micro.tokens) == len(micro.positions) > 0
        for name in ("predictors", "rollouts", "advantages", "temperatures", "versions"):
            assert len(getattr(micro, name)) == len(micro.targets)


def critic_group() -> Group:
    """Two episodes that ended and two that were cut, one of them after a single token."""
    rollouts = [
        rollout_of([5, 6, 7, 8, 9, 1], prompt=4),
        rollout_of([5, 6, 7, 8, 9, 2, 3], prompt=4),
        rollout_of([5, 6, 7, 8, 9, 2], prompt=4),
        rollout_of([5, 6, 7, 8, 4], prompt=4),
    ]
    finishes = ("stop", "length", "stop", "length")
    return dataclasses.replace(
        group_of(*rollouts),
        episodes=tuple(
            Episode(turns=(Turn(prompt="", completion="", finish=finish),), rollouts=(rollout,))
            for rollout, finish in zip(rollouts, finishes, strict=True)
        ),
        scores=tuple(Score(total=float(i + 1), parts={}) for i in range(4)),
    )


def states_of(micro: Microbatch) -> dict[tuple, tuple]:
    """By sequence: its rewards, and the tokens of the state it was cut in, if it was."""
    found = {}
    for number, last_row in enumerate(micro.last_rows):
        mine = micro.rollouts == number
        context = micro.tokens[rows_seen(micro, int(micro.predictors[mine][0]))].tolist()
        sequence = (*context, *micro.targets[mine].tolist())
        last = None if last_row < 0 else tuple(micro.tokens[rows_seen(micro, last_row)].tolist())
        found[sequence] = (micro.rewards[mine].tolist(), last)
    return found


@pytest.mark.parametrize("budget", [1, 8, 100])
def test_a_critic_gets_scores_at_the_last_token_and_end_states_of_truncated_rollouts(budget):
    group = critic_group()
    micros = pack([group], microbatch_tokens=budget, critic=True).microbatches
    assert {s: found for micro in micros for s, found in states_of(micro).items()} == {
        (5, 6, 7, 8, 9, 1): ([0.0, 1.0], None),
        (5, 6, 7, 8, 9, 2, 3): ([0.0, 0.0, 2.0], (5, 6, 7, 8, 9, 2, 3)),
        (5, 6, 7, 8, 9, 2): ([0.0, 3.0], None),
        (5, 6, 7, 8, 4): ([4.0], (5, 6, 7, 8, 4)),
    }
    trained = [row[:3] for micro in micros for row in trained_with_context(micro)]
    assert sorted(trained) == sorted(row[:3] for row in expected_of(group))


def test_without_a_critic_no_rewards_are_packed():
    (with_critic,) = pack([critic_group()], microbatch_tokens=100, critic=True).microbatches
    (without,) = pack([critic_group()], microbatch_tokens=100).microbatches
    assert without.rewards is None
    assert without.last_rows is None
    assert len(without.tokens) == len(with_critic.tokens) - 2


def test_teacher_logprobs_follow_their_tokens_and_are_nan_without_a_teacher():
    group = make_group(0, size=3)
    rng = np.random.default_rng(0)
    rollouts = []
    for number, rollout in enumerate(group.rollouts):
        length = len(rollout.tokens)
        teaching = TeacherLogprobs(
            logprobs=-rng.random(length, np.float32),
            top_ids=rng.permuted(np.tile(np.arange(9, dtype=np.int32), (length, 1)), axis=1)[:, :2],
            top_logprobs=-rng.random((length, 2), np.float32),
        )
        rollouts.append(dataclasses.replace(rollout, teacher=None if number == 1 else teaching))
    episodes = [
        dataclasses.replace(episode, rollouts=(rollout,))
        for episode, rollout in zip(group.episodes, rollouts, strict=True)
    ]
    (packed,) = pack(
        [dataclasses.replace(group, episodes=tuple(episodes))], microbatch_tokens=100
    ).microbatches
    found = {int(n): packed.rollouts == n for n in np.unique(packed.rollouts)}
    by_tokens = {r.tokens[r.mask].tobytes(): r for r in rollouts}
    for rows in found.values():
        rollout = by_tokens[packed.targets[rows].tobytes()]
        if rollout.teacher is None:
            assert np.isnan(packed.teacher_logprobs[rows]).all()
            assert np.isnan(packed.topk_logprobs[rows]).all()
            assert (np.diff(packed.topk_ids[rows], axis=1) > 0).all()  # still different ones
            continue
        expected = rollout.teacher
        assert packed.teacher_logprobs[rows].tolist() == expected.logprobs[rollout.mask].tolist()
        assert packed.topk_ids[rows].tolist() == expected.top_ids[rollout.mask].tolist()
        assert packed.topk_logprobs[rows].tolist() == expected.top_logprobs[rollout.mask].tolist()


def routed(rollout: Rollout, first: int) -> Rollout:
    """With one layer and one expert per token: `first`, `first` + 1, ..."""
    routes = np.arange(first, first + len(rollout.tokens), dtype=np.uint8)
    return dataclasses.replace(rollout, routes=routes.reshape(-1, 1, 1))


def test_each_row_has_the_route_of_its_token_and_shared_rows_that_of_the_first_rollout():
    shared = [1, 2, 3, 4, 5]
    rollouts = [
        routed(rollout_of([*shared, 6, 7, 8], prompt=5), 10),
        routed(rollout_of([*shared, 9, 9], prompt=5), 30),
        rollout_of([20, 21, 22], prompt=1),
    ]
    (micro,) = pack([group_of(*rollouts)], microbatch_tokens=100).microbatches
    assert micro.routes is not None
    rows = zip(micro.tokens, micro.positions, micro.routes[:, 0, 0], strict=True)
    routes = {(int(token), int(position)): int(route) for token, position, route in rows}
    assert [routes[token, t] for t, token in enumerate(shared)] == [10, 11, 12, 13, 14]
    assert (routes[6, 5], routes[7, 6], routes[9, 5]) == (15, 16, 35)
    assert (routes[20, 0], routes[21, 1]) == (255, 255)  # no routes


def test_rollouts_without_routes_make_a_microbatch_without_routes():
    (micro,) = pack([make_group(0)], microbatch_tokens=100).microbatches
    assert micro.routes is None
