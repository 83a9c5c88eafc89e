"""Lays the rollouts of a batch end to end into microbatches under a token budget.

Promise: every rollout lands in exactly one microbatch, unpadded; a beginning that rollouts of a
group share is laid once for all of them that land together. The budget counts rows (what is
computed), and no microbatch exceeds it unless a single rollout does. Pure numpy, so the controller
can run it in a thread.
"""

import bisect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from millrace.core.microbatch import Batch, Microbatch
from millrace.core.records import Group, Rollout
from millrace.core.returns import sampled_rewards
from millrace.training.packing.joining import (
    join_kept,
    join_references,
    join_routes,
    join_teachings,
)

# A shared beginning costs a second look at keys in every layer; a shorter one is not worth it.
MIN_SHARED_TOKENS = 4


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Row:
    """A rollout and what its trained tokens are worth. n = their number."""

    rollout: Rollout
    advantages: np.ndarray  # [n] float32
    rewards: np.ndarray | None = None  # [n] float64; for a critic
    was_cut: bool = False  # a critic wants to see the state after the last trained token


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Branch:
    """The rollouts of a group that are computed from the very same rows."""

    tokens: np.ndarray  # [rows] int32; up to the last row that somebody looks at
    members: tuple[_Row, ...]

    @property
    def routes(self) -> np.ndarray | None:  # [rows, layers, top_k]
        """Of its first rollout: what several have in common goes one way."""
        routes = self.members[0].rollout.routes
        return None if routes is None else routes[: len(self.tokens)]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Family:
    """Branches laid together: the first `shared` rows of each are the same and lie there once."""

    shared: int  # 0 for a branch on its own
    branches: tuple[_Branch, ...]

    @property
    def num_rows(self) -> int:
        return self.shared + sum(len(branch.tokens) - self.shared for branch in self.branches)

    @property
    def num_trained(self) -> int:
        return sum(len(row.advantages) for b in self.branches for row in b.members)


def pack(
    groups: Sequence[Group], *, microbatch_tokens: int, pairs: bool = False, critic: bool = False
) -> Batch:
    """One optimizer update's worth of microbatches from scored groups.

    With `pairs`, only rollouts that have an advantage are laid, and those of a group together: they
    are learned from in comparison. With `critic`, what one needs to judge them goes with them.
    """
    rows = [_judged_rows(group) if critic else _rows(group) for group in groups]
    if pairs:
        rows = _compared(rows)
    families = [_families(_branches(of_group)) for of_group in rows]
    if pairs:
        bundles = [_alike(of_group) for of_group in families]
    else:
        bundles = [
            [part]
            for of_group in families
            for family in of_group
            for part in _split(family, budget=microbatch_tokens)
        ]
    sizes = [sum(family.num_rows for family in bundle) for bundle in bundles]
    bins = fill_bins(sizes, budget=microbatch_tokens)
    return Batch(
        microbatches=tuple(_lay_out([bundles[i] for i in bin_], pairs=pairs) for bin_ in bins),
        num_sequences=sum(len(of_group) for of_group in rows),
        num_trained_tokens=sum(len(row.advantages) for of_group in rows for row in of_group),
        num_groups=len(rows),
    )


def pack_minibatches(
    groups: Sequence[Group],
    *,
    num_minibatches: int,
    microbatch_tokens: int,
    pairs: bool = False,
    critic: bool = False,
) -> tuple[Batch, ...]:
    """A batch of each of minibatches_of()."""
    return tuple(
        pack(part, microbatch_tokens=microbatch_tokens, pairs=pairs, critic=critic)
        for part in minibatches_of(groups, num_minibatches=num_minibatches)
    )


def minibatches_of(groups: Sequence[Group], *, num_minibatches: int) -> list[Sequence[Group]]:
    """About as many whole groups each, in order."""
    assert num_minibatches <= len(groups), "a minibatch holds at least one group"
    bounds = [len(groups) * i // num_minibatches for i in range(num_minibatches + 1)]
    return [groups[begin:end] for begin, end in pairwise(bounds)]


def fill_bins(sizes: Sequence[int], *, budget: int) -> list[list[int]]:
    """Indices of `sizes` in as few bins as best-fit-decreasing finds; an oversized one sits
    alone."""
    bins: list[list[int]] = []
    by_room: list[
        tuple[int, int]
    ] = []  # (room left, bin), ascending: the first that fits is the best
    for index in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
        slot = bisect.bisect_left(by_room, (sizes[index], -1))
        if slot < len(by_room):
            room, chosen = by_room.pop(slot)
            bins[chosen].append(index)
        else:
            room, chosen = budget, len(bins)
            bins.append([index])
        bisect.insort(by_room, (room - sizes[index], chosen))
    return bins


def _rows(group: Group) -> list[_Row]:
    assert group.advantages is not None, "a group is scored before it is packed"
    if group.token_advantages is not None:
        by_token = zip(group.rollouts, group.token_advantages, strict=True)
        return [_Row(rollout=r, advantages=advantages[r.mask]) for r, advantages in by_token]
    return [
        _Row(rollout=rollout, advantages=np.full(rollout.num_sampled, advantage, np.float32))
        for episode, advantage in zip(group.episodes, group.advantages, strict=True)
        for rollout in episode.rollouts
    ]


def _judged_rows(group: Group) -> list[_Row]:
    """Every branch of an episode ends with its score."""
    return [
        _Row(
            rollout=rollout,
            advantages=np.zeros(rollout.num_sampled, np.float32),  # until the critic has judged
            rewards=sampled_rewards(rollout, score=score.of_agent(rollout.agent)),
            was_cut=episode.was_cut,
        )
        for episode, score in zip(group.episodes, group.scores, strict=True)
        for rollout in episode.rollouts
    ]


def _compared(rows: Sequence[list[_Row]]) -> list[list[_Row]]:
    """Of each group the rollouts with an advantage. A step in which there are none still takes
    place, with one that teaches nothing."""
    found = [[row for row in of_group if row.advantages.any()] for of_group in rows]
    return [of_group for of_group in found if of_group] or [rows[0][:1]]


def _branches(rows: Sequence[_Row]) -> list[_Branch]:
    """Of a group, in an order in which those that begin alike are neighbours."""
    members: dict[bytes, list[_Row]] = {}
    for row in rows:
        trained = np.flatnonzero(row.rollout.mask)
        if len(trained):
            needed = row.rollout.tokens[: trained[-1] + row.was_cut].astype(np.int32)
            members.setdefault(needed.tobytes(), []).append(row)
    return [
        _Branch(tokens=np.frombuffer(needed, np.int32), members=tuple(members[needed]))
        for needed in sorted(members)
    ]


def _families(branches: Sequence[_Branch]) -> list[_Family]:
    """Of all ways to join neighbours, the one that saves the most rows."""
    common = [_common(earlier.tokens, later.tokens) for earlier, later in pairwise(branches)]
    # Of the branches before each: the rows saved, the begin of the last family, what it shares.
    best = [(0, 0, 0)]
    for end in range(1, len(branches) + 1):
        begin = end - 1
        choices = [(best[begin][0], begin, 0)]
        shared = len(branches[end - 1].tokens)
        while begin and (shared := min(shared, common[begin - 1])) >= MIN_SHARED_TOKENS:
            begin -= 1
            choices.append((best[begin][0] + shared * (end - begin - 1), begin, shared))
        best.append(max(choices))
    families: list[_Family] = []
    end = len(branches)
    while end:
        _, begin, shared = best[end]
        families.append(_Family(shared=shared, branches=tuple(branches[begin:end])))
        end = begin
    return families[::-1]


def _common(a: np.ndarray, b: np.ndarray) -> int:
    """Length of the longest common beginning."""
    shortest = min(len(a), len(b))
    differs = a[:shortest] != b[:shortest]
    return int(differs.argmax()) if differs.any() else shortest


def _split(family: _Family, *, budget: int) -> Iterator[_Family]:
    """Parts within the budget, each with its own copy of what is shared."""
    if family.num_rows <= budget or len(family.branches) == 1:
        yield family
        return
    own = [len(branch.tokens) - family.shared for branch in family.branches]
    # With no room beside the shared rows, bins of nothing put every branch on its own.
    for bin_ in fill_bins(own, budget=max(0, budget - family.shared)):
        branches = tuple(family.branches[i] for i in sorted(bin_))
        yield _Family(shared=family.shared if len(branches) > 1 else 0, branches=branches)


def _alike(families: list[_Family]) -> list[_Family]:
    """All with something shared or all without, so that they are laid one after the other."""
    if len({family.shared == 0 for family in families}) == 1:
        return families
    branches = [branch for family in families for branch in family.branches]
    return [_Family(shared=0, branches=(branch,)) for branch in branches]


def _lay_out(bundles: Sequence[Sequence[_Family]], *, pairs: bool) -> Microbatch:
    """Shared rows first, then what follows them, then branches on their own."""
    bundles = sorted(bundles, key=lambda bundle: bundle[0].shared == 0)
    families = [family for bundle in bundles for family in bundle]
    segments = _Segments([(f.branches[0], f.shared) for f in families if f.shared])
    predictors: list[np.ndarray] = []
    last_rows: list[int] = []
    members: list[_Row] = []
    for number, family in enumerate(families):
        parent = number if family.shared else -1
        for branch in family.branches:
            rows = segments.lay(branch, parent=parent, shared=family.shared)
            for row in branch.members:
                trained = np.flatnonzero(row.rollout.mask)
                predictors.append(rows[trained - 1])
                last_rows.append(int(rows[trained[-1]]) if row.was_cut else -1)
            members += branch.members
    lengths = np.array([len(tokens) for tokens in segments.tokens], np.int32)
    rollouts = [row.rollout for row in members]
    rewards = [row.rewards for row in members if row.rewards is not None]
    counts = [rollout.num_sampled for rollout in rollouts]
    temperatures = [rollout.sampling.temperature for rollout in rollouts]
    sizes = [sum(family.num_trained for family in bundle) for bundle in bundles]
    return Microbatch(
        tokens=np.concatenate(segments.tokens),
        positions=np.concatenate(segments.positions).astype(np.int32),
        lengths=lengths,
        parents=np.array(segments.parents, np.int32),
        predictors=np.concatenate(predictors).astype(np.int32),
        targets=np.concatenate([r.tokens[r.mask] for r in rollouts]),
        rollouts=np.repeat(np.arange(len(members), dtype=np.int32), counts),
        engine_logprobs=np.concatenate([r.engine_logprobs[r.mask] for r in rollouts]),
        versions=np.concatenate([r.versions[r.mask] for r in rollouts]),
        advantages=np.concatenate([row.advantages for row in members]),
        temperatures=np.repeat(np.array(temperatures, np.float32), counts),
        kept=join_kept(rollouts),
        routes=join_routes(segments.routes, lengths),
        reference_logprobs=join_references(rollouts),
        **join_teachings(rollouts),
        groups=np.repeat(np.arange(len(bundles)), sizes).astype(np.int32) if pairs else None,
        rewards=np.concatenate(rewards).astype(np.float32) if rewards else None,
        last_rows=np.array(last_rows, np.int32) if rewards else None,
    )


class _Segments:
    """The segments of a microbatch while it is laid out; parents were laid before the others."""

    def __init__(self, parents: Sequence[tuple[_Branch, int]]) -> None:
        """`parents`: a branch of each family that shares rows, and how many."""
        self.tokens = [branch.tokens[:shared] for branch, shared in parents]
        self.positions = [np.arange(shared) for _, shared in parents]
        self.routes = [_rows_of(branch.routes, slice(shared)) for branch, shared in parents]
        self.parents = [-1] * len(parents)
        self._ends = np.cumsum([shared for _, shared in parents])
        self._num_rows = sum(shared for _, shared in parents)

    def lay(self, branch: _Branch, *, parent: int, shared: int) -> np.ndarray:
        """Add what follows the first `shared` tokens; returns the row of each token [L]."""
        tokens = branch.tokens
        num_own = len(tokens) - shared
        rows = np.arange(len(tokens)) + (self._num_rows - shared)
        if shared:
            rows[:shared] = np.arange(shared) + (self._ends[parent] - shared)
        if num_own:
            self.tokens.append(tokens[shared:])
            self.positions.append(np.arange(shared, len(tokens)))
            self.routes.append(_rows_of(branch.routes, slice(shared, None)))
            self.parents.append(parent)
            self._num_rows += num_own
        return rows


def _rows_of(routes: np.ndarray | None, rows: slice) -> np.ndarray | None:
    return None if routes is None else routes[rows]
