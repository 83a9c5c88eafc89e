"""Tree advantages, computed by hand."""

import itertools

import numpy as np
import pytest

from millrace.core.records import Branching, Episode, Group, Rollout, Sampling, Score, Task
from millrace.scoring.advantages import (
    TreeAdvantages,
    estimate_by_agent,
    with_advantages,
)

LOCAL = TreeAdvantages(normalize_std=False, weigh_shared=False)
WEIGHED = TreeAdvantages(normalize_std=False)


def rollout(places: range, *, num_shared: int = 0, agent: str = "") -> Rollout:
    """One prompt token, then sampled tokens at these places; the first are shared."""
    length = 1 + len(places)
    mask = np.arange(length) > num_shared
    return Rollout(
        tokens=np.arange(length, dtype=np.int32),
        mask=mask,
        engine_logprobs=np.zeros(length, np.float32),
        versions=np.where(mask, 0, -1).astype(np.int32),
        sampling=Sampling(),
        agent=agent,
        places=np.array([-1, *places], np.int32),
    )


def leaf(number: int, length: int, *, parent: int | None = None, place: int = 0) -> Episode:
    return Episode(
        turns=(),
        rollouts=(rollout(range(length), num_shared=place),),
        branching=Branching(number=number, parent=parent, place=place),
    )


def group_of(episodes: list[Episode], scores: list[float | dict[str, float]]) -> Group:
    return Group(
        number=0,
        task=Task(prompt=""),
        episodes=tuple(episodes),
        scores=tuple(
            Score(total=float(np.mean([*s.values()])), parts={}, by_agent=s)
            if isinstance(s, dict)
            else Score(total=s, parts={})
            for s in scores
        ),
    )


def test_tokens_after_a_branch_are_compared_with_siblings_and_earlier_tokens_have_the_mean():
    # A root of 5 tokens with two branches after its second; another root alone.
    episodes = [
        leaf(0, 5),
        leaf(1, 4, parent=0, place=2),
        leaf(2, 6, parent=0, place=2),
        leaf(3, 3),
    ]
    first, *others = LOCAL(group_of(episodes, [1.0, 0.0, 0.5, 0.0]))
    # The value of the tree is (1 + 0 + 0.5) / 3 = 0.5; the mean of both trees is 0.25.
    np.testing.assert_allclose(first, [0, 0.25, 0.25, 0.5, 0.5, 0.5])
    np.testing.assert_allclose(others[0], [0, 0, 0, -0.5, -0.5])
    np.testing.assert_allclose(others[1], [0, 0, 0, 0, 0, 0, 0])
    np.testing.assert_allclose(others[2], [0, -0.25, -0.25, -0.25])


def test_advantages_along_an_episode_add_up_to_its_score_minus_the_mean():
    # 0 branches after 1 (into 1) and after 3 (into 2); 1 branches after its place 2 (into 3).
    episodes = [
        leaf(0, 5),
        leaf(1, 4, parent=0, place=1),
        leaf(2, 5, parent=0, place=3),
        leaf(3, 4, parent=1, place=2),
    ]
    scores = [8.0, 0.0, 4.0, 2.0]
    root, one, two, three = LOCAL(group_of(episodes, scores))
    # Values: after 3 in the root (8 + 4) / 2 = 6; after 2 in the other (0 + 2) / 2 = 1; all 3.5.
    np.testing.assert_allclose(root, [0, 0, 2.5, 2.5, 2, 2])
    np.testing.assert_allclose(one, [0, 0, -2.5, -1, -1])
    np.testing.assert_allclose(two, [0, 0, 0, 0, -2, -2])
    np.testing.assert_allclose(three, [0, 0, 0, 1, 1])
    paths = {0: [0, 2.5, 2], 1: [0, -2.5, -1], 2: [0, 2.5, -2], 3: [0, -2.5, 1]}
    for index, path in paths.items():
        assert sum(path) == pytest.approx(scores[index] - 3.5)


def test_shared_tokens_weigh_as_if_each_episode_had_sampled_them():
    episodes = [
        leaf(0, 5),
        leaf(1, 4, parent=0, place=1),
        leaf(2, 5, parent=0, place=3),
        leaf(3, 4, parent=1, place=2),
        leaf(4, 2),
    ]
    group = group_of(episodes, [8.0, 0.0, 4.0, 2.0, 1.5])
    sharers = [[0, 4, 2, 2, 1, 1], [0, 0, 2, 1, 1], [0, 0, 0, 0, 1, 1], [0, 0, 0, 1, 1], [0, 1, 1]]
    for weighed, plain, counts in zip(WEIGHED(group), LOCAL(group), sharers, strict=True):
        np.testing.assert_allclose(weighed, plain * counts)


def test_expected_gradient_of_a_tree_equals_that_of_independent_episodes():
    """Gradients of a policy that samples two tokens, each 0 or 1, with rewards from a table. Sums
    over all outcomes of a group of two trees with two episodes each."""
    p, q, rewards = 0.3, 0.6, np.array([[0.0, 1.0], [2.0, 5.0]])
    trees = [leaf(0, 2), leaf(1, 2, parent=0, place=1), leaf(2, 2), leaf(3, 2, parent=2, place=1)]
    gradient = np.zeros(2)
    for drawn in itertools.product([0, 1], repeat=6):
        first, second = np.array(drawn[:2]), np.array(drawn[2:])
        scores = rewards[first.repeat(2), second]
        found = WEIGHED(group_of(trees, scores.tolist()))
        chance = np.where(first, p, 1 - p).prod() * np.where(second, q, 1 - q).prod()
        of_first = sum(found[2 * tree][1] * (first[tree] - p) for tree in (0, 1))
        of_second = sum(found[i][2] * (second[i] - q) for i in range(4))
        gradient += chance * np.array([of_first, of_second])
    of_one = [
        p * (1 - p) * np.diff(rewards @ [1 - q, q])[0],
        q * (1 - q) * np.diff([1 - p, p] @ rewards)[0],
    ]
    # Half of it: the baseline of each is a mean of two that includes itself.
    np.testing.assert_allclose(gradient, 4 * np.array(of_one) / 2)


def test_tree_with_a_missing_episode_uses_the_remaining_ones():
    episodes = [leaf(1, 4, parent=0, place=2), leaf(2, 6, parent=0, place=2), leaf(3, 3)]
    one, two, alone = LOCAL(group_of(episodes, [0.0, 1.0, 1.0]))
    np.testing.assert_allclose(one, [0, 0, 0, -0.5, -0.5])
    np.testing.assert_allclose(two, [0, 0, 0, 0.5, 0.5, 0.5, 0.5])
    np.testing.assert_allclose(alone, [0, 0.25, 0.25, 0.25])


def test_each_agent_is_compared_with_itself_even_on_shared_tokens():
    both = (rollout(range(2), agent="a"), rollout(range(2, 4), agent="b"))
    root = Episode(turns=(), rollouts=both, branching=Branching(number=0))
    only_b = (rollout(range(2, 5), agent="b"),)
    branch = Episode(turns=(), rollouts=only_b, branching=Branching(number=1, parent=0, place=2))
    group = group_of([root, branch], [{"a": 1.0, "b": 3.0}, {"a": 0.0, "b": 1.0}])
    found = estimate_by_agent(LOCAL, group)
    # There is only one tree, so its first segment has nothing to be compared with.
    np.testing.assert_allclose(found[0], [0, 0, 0])
    np.testing.assert_allclose(found[1], [0, 1, 1])
    np.testing.assert_allclose(found[2], [0, -1, -1, -1])


def test_without_branches_tree_advantages_equal_group_advantages():
    plain = [Episode(turns=(), rollouts=(rollout(range(2)),)) for _ in range(3)]
    group = group_of(plain, [0.0, 1.0, 2.0])
    found = with_advantages(group, TreeAdvantages(epsilon=0.0)(group))
    assert found.advantages is not None
    np.testing.assert_allclose(found.advantages, [-1, 0, 1])
    same = group_of(plain, [0.1, 0.1, 0.1])
    assert not np.concatenate(TreeAdvantages()(same)).any()
