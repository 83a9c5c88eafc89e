"""Packs the rollouts of a batch into microbatches under a token budget.

Promise: every rollout lands in exactly one microbatch, without padding. A prefix that rollouts of a
group share is stored once per microbatch. The budget counts rows, which is what is computed, and no
microbatch exceeds it unless a single rollout does. All ranks get equally many microbatches.
Pure numpy, so the controller can run it in a thread. T = rows of a microbatch.
"""

import bisect
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, pairwise
from statistics import fmean

import numpy as np

from millrace.core.completions import unknown_routes
from millrace.core.microbatch import MIN_SHARED_TOKENS, Batch, Microbatch, Segments, common_prefix
from millrace.core.records import Group, Kept, Rollout
from millrace.scoring.advantages import sampled_rewards
from millrace.training.packing.splitting import placeholder

# Cost of one query-key pair, in rows. Per layer a row takes about 24 D^2 FLOPs in matrix products
# and a pair 4 D in attention: 1 / 6 D, with D = 4096.
PAIR_COST = 1 / 24_576


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Sample:
    """A rollout and the advantages and rewards of its n trained tokens."""

    rollout: Rollout
    advantages: np.ndarray  # [n] float32
    rewards: np.ndarray | None = None  # [n] float64; for a critic
    was_cut: bool = False  # a critic values the state after the last trained token


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Branch:
    """Rollouts of a group that need exactly the same rows."""

    tokens: np.ndarray  # [rows] int32; up to the last row that is needed
    members: tuple[_Sample, ...]

    def routes(self, begin: int, end: int) -> np.ndarray | None:  # [rows, layers, top_k]
        """Routes of the first rollout: shared rows are computed once, with one set of routes."""
        routes = self.members[0].rollout.routes
        return None if routes is None else routes[begin:end]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Family:
    """Branches whose first `shared` rows are the same and are stored once."""

    shared: int  # 0 for a single branch
    branches: tuple[_Branch, ...]

    @property
    def num_rows(self) -> int:
        return self.shared + sum(len(branch.tokens) - self.shared for branch in self.branches)

    @property
    def num_trained(self) -> int:
        return sum(len(sample.advantages) for b in self.branches for sample in b.members)

    @property
    def cost(self) -> float:
        """Cost of a forward pass in rows; a row attends to all rows before it."""
        pairs = sum(len(b.tokens) ** 2 - self.shared**2 for b in self.branches) + self.shared**2
        return self.num_rows + PAIR_COST * pairs / 2


_Bundle = Sequence[_Family]  # families that stay in one microbatch
_Numbers = Mapping[Rollout, int]
_Shares = Sequence[Sequence[Sequence[_Bundle]]]  # by rank and microbatch


def pack(
    groups: Sequence[Group],
    *,
    microbatch_tokens: int,
    pairs: bool = False,
    whole_groups: bool = False,
    critic: bool = False,
    num_ranks: int = 1,
    reported: _Numbers | None = None,
) -> Batch:
    """The microbatches of one optimizer update, from scored groups. With `pairs`, only rollouts
    with an advantage are packed, and those of a group together, because the loss compares them.
    With `whole_groups`, all rollouts of a group are together. With `critic`, rewards and end states
    are included. `reported`: see Microbatch."""
    samples = [_samples(group, critic=critic) for group in groups]
    samples = _compared(samples) if pairs else samples
    families = [_families(_branches(of_group)) for of_group in samples]
    together = pairs or whole_groups
    if together:
        bundles = [_alike(of_group) for of_group in families]
    else:
        every = [family for of_group in families for family in of_group]
        limit = microbatch_tokens
        if num_ranks > 1:  # balance needs parts of at most half a rank's rows
            limit = min(limit, sum(family.num_rows for family in every) // (2 * num_ranks))
        bundles = [
            [part]
            for family in every
            # Parts of less than twice the shared rows would mostly repeat these.
            for part in _split(family, budget=min(microbatch_tokens, max(limit, 2 * family.shared)))
        ]
    ranks = _fill_ranks(bundles, budget=microbatch_tokens, num_ranks=num_ranks)
    costs = [sum(f.cost for bin_ in rank for bundle in bin_ for f in bundle) for rank in ranks]
    numbers = reported or {}
    filled = [_lay_out(b, pairs=together, reported=numbers) if b else None for b in chain(*ranks)]
    idle = placeholder(next(filter(None, filled)))
    return Batch(
        microbatches=tuple(part or idle for part in filled),
        num_sequences=sum(len(of_group) for of_group in samples),
        num_trained_tokens=sum(len(one.advantages) for of_group in samples for one in of_group),
        num_groups=len(samples),
        num_ranks=num_ranks,
        balance=fmean(costs) / max(costs),
    )


def minibatches_of(groups: Sequence[Group], *, num_minibatches: int) -> list[Sequence[Group]]:
    """The groups in order, split into minibatches of about as many whole groups each."""
    assert num_minibatches <= len(groups), "a minibatch holds at least one group"
    bounds = [len(groups) * i // num_minibatches for i in range(num_minibatches + 1)]
    return [groups[begin:end] for begin, end in pairwise(bounds)]


def _fill_ranks(bundles: Sequence[_Bundle], *, budget: int, num_ranks: int) -> _Shares:
    """The bundles of each microbatch of each rank; a bundle is never split."""
    sizes = [sum(family.num_rows for family in bundle) for bundle in bundles]
    if num_ranks == 1:
        ranks = [fill_bins(sizes, budget=budget)]
    else:
        costs = [sum(family.cost for family in bundle) for bundle in bundles]
        ranks = fill_rank_bins(sizes, costs, budget=budget, num_ranks=num_ranks)
    return [[[bundles[i] for i in bin_] for bin_ in rank] for rank in ranks]


def _samples(group: Group, *, critic: bool) -> list[_Sample]:
    if critic:  # it estimates the advantages; each rollout ends with the episode's score
        return [
            _Sample(
                rollout=rollout,
                advantages=np.zeros(rollout.num_sampled, np.float32),
                rewards=sampled_rewards(rollout, score=score.of_agent(rollout.agent)),
                was_cut=episode.was_cut,
            )
            for episode, score in zip(group.episodes, group.scores, strict=True)
            for rollout in episode.rollouts
        ]
    assert group.advantages is not None, "a group is scored before it is packed"
    if group.token_advantages is not None:
        by_token = zip(group.rollouts, group.token_advantages, strict=True)
        return [_Sample(rollout=r, advantages=advantages[r.mask]) for r, advantages in by_token]
    return [
        _Sample(rollout=rollout, advantages=np.full(rollout.num_sampled, advantage, np.float32))
        for episode, advantage in zip(group.episodes, group.advantages, strict=True)
        for rollout in episode.rollouts
    ]


def _compared(samples: Sequence[list[_Sample]]) -> list[list[_Sample]]:
    """Rollouts with an advantage, by group; if none has one, the first, so that there is a step."""
    found = [[one for one in of_group if one.advantages.any()] for of_group in samples]
    return [of_group for of_group in found if of_group] or [samples[0][:1]]


def _branches(samples: Sequence[_Sample]) -> list[_Branch]:
    """The branches of a group, sorted so that common prefixes are neighbours."""
    members: dict[bytes, list[_Sample]] = {}
    for sample in samples:
        trained = np.flatnonzero(sample.rollout.mask)
        if len(trained):
            needed = sample.rollout.tokens[: trained[-1] + sample.was_cut].astype(np.int32)
            members.setdefault(needed.tobytes(), []).append(sample)
    return [
        _Branch(tokens=np.frombuffer(needed, np.int32), members=tuple(members[needed]))
        for needed in sorted(members)
    ]


def _families(branches: Sequence[_Branch]) -> list[_Family]:
    """Neighbouring branches joined so that the most rows are saved (dynamic programming)."""
    common = [common_prefix(earlier.tokens, later.tokens) for earlier, later in pairwise(branches)]
    # For the branches before each end: rows saved, begin of the last family, its shared rows.
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


def _split(family: _Family, *, budget: int) -> Iterator[_Family]:
    """Parts within the budget, each with its own copy of the shared rows."""
    if family.num_rows <= budget or len(family.branches) == 1:
        yield family
        return
    own = [len(branch.tokens) - family.shared for branch in family.branches]
    # If the shared rows leave no room, a budget of 0 puts every branch into its own bin.
    for bin_ in fill_bins(own, budget=max(0, budget - family.shared)):
        branches = tuple(family.branches[i] for i in sorted(bin_))
        yield _Family(shared=family.shared if len(branches) > 1 else 0, branches=branches)


def _alike(families: list[_Family]) -> list[_Family]:
    """The families of a group, all with shared rows or all without: the layout stores the two kinds
    apart, and a group must stay contiguous."""
    if len({family.shared == 0 for family in families}) == 1:
        return families
    return [_Family(shared=0, branches=(b,)) for family in families for b in family.branches]


def _lay_out(bundles: Sequence[_Bundle], *, pairs: bool, reported: _Numbers) -> Microbatch:
    """One microbatch: shared rows first, then their continuations, then single branches."""
    bundles = sorted(bundles, key=lambda bundle: bundle[0].shared == 0)
    families = [family for bundle in bundles for family in bundle]
    parents = [(f.branches[0], f.shared) for f in families if f.shared]
    segments = Segments([branch.tokens[:shared] for branch, shared in parents])
    routes = [branch.routes(0, shared) for branch, shared in parents]  # by segment
    predictors: list[np.ndarray] = []
    last_rows: list[int] = []
    members: list[_Sample] = []
    for number, family in enumerate(families):
        parent = number if family.shared else -1
        for branch in family.branches:
            rows = segments.add(branch.tokens, parent=parent, shared=family.shared)
            if len(branch.tokens) > family.shared:
                routes.append(branch.routes(family.shared, len(branch.tokens)))
            for sample in branch.members:
                trained = np.flatnonzero(sample.rollout.mask)
                predictors.append(rows[trained - 1])
                last_rows.append(int(rows[trained[-1]]) if sample.was_cut else -1)
            members += branch.members
    lengths = np.array([len(tokens) for tokens in segments.tokens], np.int32)
    rollouts = [sample.rollout for sample in members]
    rewards = [sample.rewards for sample in members if sample.rewards is not None]
    counts = [rollout.num_sampled for rollout in rollouts]
    sizes = [sum(family.num_trained for family in bundle) for bundle in bundles]
    temperatures = np.array([r.sampling.temperature for r in rollouts], np.float32)
    numbers = np.array([reported.get(rollout, -1) for rollout in rollouts], np.int32)
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
        advantages=np.concatenate([sample.advantages for sample in members]),
        temperatures=np.repeat(temperatures, counts),
        kept=_join_kept(rollouts),
        routes=_join_routes(routes, lengths),
        reference_logprobs=_join_references(rollouts),
        **_join_teachers(rollouts),
        groups=np.repeat(np.arange(len(bundles)), sizes).astype(np.int32) if pairs else None,
        reported=np.repeat(numbers, counts) if max(numbers) >= 0 else None,
        rewards=np.concatenate(rewards).astype(np.float32) if rewards else None,
        last_rows=np.array(last_rows, np.int32) if rewards else None,
    )


def _join_routes(
    by_segment: Sequence[np.ndarray | None], lengths: np.ndarray
) -> np.ndarray | None:  # [T, layers, top_k]
    """Rows of segments without routes are marked unknown; None if no segment has any."""
    like = next((routes for routes in by_segment if routes is not None), None)
    if like is None:
        return None
    return np.concatenate(
        [
            unknown_routes(int(length), like=like) if routes is None else routes
            for routes, length in zip(by_segment, lengths, strict=True)
        ]
    )


def _join_kept(rollouts: Sequence[Rollout]) -> Kept | None:
    if all(rollout.kept is None for rollout in rollouts):
        return None
    # Rows of untrained tokens are empty.
    ids = [rollout.kept.ids for rollout in rollouts if rollout.kept is not None]
    sizes = [
        np.zeros(r.num_sampled, np.int64) if r.kept is None else np.diff(r.kept.offsets)[r.mask]
        for r in rollouts
    ]
    offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(np.concatenate(sizes))])
    return Kept(ids=np.concatenate(ids), offsets=offsets)


def _join_references(rollouts: Sequence[Rollout]) -> np.ndarray | None:
    found = [r.reference_logprobs[r.mask] for r in rollouts if r.reference_logprobs is not None]
    if not found:
        return None
    assert len(found) == len(rollouts), "either all rollouts of a run have a reference, or none"
    return np.concatenate(found)


def _join_teachers(rollouts: Sequence[Rollout]) -> dict[str, np.ndarray]:
    """Teacher logprobs of the trained tokens; NaN where a token has no teacher."""
    if all(rollout.teacher is None for rollout in rollouts):
        return {}
    widths = {t.top_ids.shape[1] for r in rollouts if (t := r.teacher) and t.top_ids is not None}
    assert len(widths) <= 1, "all teachers of a run give the same number of ids per token"
    num_topk = widths.pop() if widths else 0
    logprobs: list[np.ndarray] = []
    ids: list[np.ndarray] = []
    topk: list[np.ndarray] = []
    for rollout in rollouts:
        teacher, mask, count = rollout.teacher, rollout.mask, rollout.num_sampled
        if teacher is None:
            logprobs.append(np.full(count, np.nan, np.float32))
            ids.append(np.tile(np.arange(num_topk, dtype=np.int32), (count, 1)))
            topk.append(np.full((count, num_topk), np.nan, np.float32))
            continue
        logprobs.append(teacher.logprobs[mask])
        if teacher.top_ids is not None and teacher.top_logprobs is not None:
            ids.append(teacher.top_ids[mask])
            topk.append(teacher.top_logprobs[mask])
    joined = {"teacher_logprobs": np.concatenate(logprobs)}
    if num_topk:
        joined |= {"topk_ids": np.concatenate(ids), "topk_logprobs": np.concatenate(topk)}
    return joined


def fill_bins(sizes: Sequence[int], *, budget: int) -> list[list[int]]:
    """Indices of `sizes` in bins, by best fit decreasing; an oversized item has its own bin."""
    bins: list[list[int]] = []
    by_room: list[tuple[int, int]] = []  # (room left, bin), ascending: the first fit is the best
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


def fill_rank_bins(
    sizes: Sequence[int], costs: Sequence[float], *, budget: int, num_ranks: int
) -> list[list[list[int]]]:
    """For each rank a list of bins of indices; all ranks have equally many, and some may be empty.
    Ranks run in lockstep: in a sharded model they meet in every layer of every microbatch. So bins
    of similar cost have the same position in all ranks, and the sums of the ranks are close."""
    per_rank = math.ceil(len(fill_bins(sizes, budget=budget)) / num_ranks)
    while (bins := _spread(sizes, costs, budget=budget, num_bins=per_rank * num_ranks)) is None:
        per_rank += 1
    bins.sort(key=lambda bin_: -sum(costs[i] for i in bin_))
    ranks: list[list[list[int]]] = [[] for _ in range(num_ranks)]
    for position in range(per_rank):
        together = bins[position * num_ranks : (position + 1) * num_ranks]
        # The costliest bin of a position goes to the rank that has the least so far.
        load = [sum(costs[i] for bin_ in rank for i in bin_) for rank in ranks]
        order = sorted(range(num_ranks), key=load.__getitem__)
        for rank, bin_ in zip(order, together, strict=True):
            ranks[rank].append(bin_)
    return ranks


def _spread(
    sizes: Sequence[int], costs: Sequence[float], *, budget: int, num_bins: int
) -> list[list[int]] | None:
    """Each item, the costliest first, in the cheapest bin that has room; None if one has none."""
    bins: list[list[int]] = [[] for _ in range(num_bins)]
    bin_sizes, bin_costs = [0] * num_bins, [0.0] * num_bins
    for index in sorted(range(len(sizes)), key=lambda i: -costs[i]):
        fitting = [
            n for n in range(num_bins) if not bins[n] or bin_sizes[n] + sizes[index] <= budget
        ]
        if not fitting:
            return None
        chosen = min(fitting, key=bin_costs.__getitem__)
        bins[chosen].append(index)
        bin_sizes[chosen] += sizes[index]
        bin_costs[chosen] += costs[index]
    return bins
