"""Packs the rollouts of a batch into microbatches under a token budget.

Promise: every rollout lands in exactly one microbatch, without padding. Rows that rollouts of a
group share are stored once per microbatch. The budget counts rows, which are what is computed, and
no microbatch exceeds it unless a single rollout does. All ranks get equally many microbatches.
Pure numpy, so the controller can run it in a thread. T = rows of a microbatch.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import chain, pairwise
from statistics import fmean

import numpy as np

from millrace.core.completions import unknown_routes
from millrace.core.microbatch import Batch, Microbatch
from millrace.core.records import Group, Rollout
from millrace.scoring.advantages import sampled_rewards
from millrace.training.packing.bins import fill_bins, fill_rank_bins
from millrace.training.packing.prefix_trees import PrefixTree, Sample, grow_trees, lay_out
from millrace.training.packing.splitting import join_kept, kept_rows, placeholder

_Bundle = Sequence[PrefixTree]  # that stay in one microbatch
_Numbers = Mapping[Rollout, int]
_Shares = Sequence[Sequence[Sequence[_Bundle]]]  # by rank and microbatch


def pack(
    groups: Sequence[Group],
    *,
    microbatch_tokens: int,
    pairs: bool = False,
    whole_groups: bool = False,
    critic: bool = False,
    scores: bool = False,
    num_ranks: int = 1,
    reported: _Numbers | None = None,
) -> Batch:
    """The microbatches of one optimizer update, from scored groups. With `pairs`, only rollouts
    with an advantage are packed, and those of a group together, because the loss compares them.
    With `whole_groups`, all rollouts of a group are together. With `critic`, rewards and end states
    are included, with `scores` the scores of the episodes. `reported`: see Microbatch."""
    samples = [_samples(group, critic=critic) for group in groups]
    samples = [*map(_with_scores, samples, groups)] if scores else samples
    samples = _compared(samples) if pairs else samples
    bundles: list[_Bundle] = [grow_trees(of_group) for of_group in samples]
    together = pairs or whole_groups
    if together:
        ranks = _fill_ranks(bundles, budget=microbatch_tokens, num_ranks=num_ranks)
    else:
        ranks = _divide([*chain(*bundles)], budget=microbatch_tokens, num_ranks=num_ranks)
    costs = _costs(ranks)
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


def _divide(trees: Sequence[PrefixTree], *, budget: int, num_ranks: int) -> _Shares:
    """Trees that only the budget splits, or parts of at most half a rank's rows. These balance
    better, but repeat shared rows; the division is better if its costliest rank is cheaper."""
    half = sum(tree.num_rows for tree in trees) // (2 * num_ranks)
    tried: list[_Shares] = []
    for limit in [budget] if num_ranks == 1 else [budget, half]:
        # Parts of less than twice the shared rows would mostly repeat these.
        limits = [min(budget, max(limit, 2 * tree.num_shared)) for tree in trees]
        parts = [[p] for t, most in zip(trees, limits, strict=True) for p in t.parts(budget=most)]
        tried.append(_fill_ranks(parts, budget=budget, num_ranks=num_ranks))
    return min(tried, key=lambda ranks: max(_costs(ranks)))


def _costs(ranks: _Shares) -> list[float]:
    return [sum(tree.cost for bin_ in rank for bundle in bin_ for tree in bundle) for rank in ranks]


def _fill_ranks(bundles: Sequence[_Bundle], *, budget: int, num_ranks: int) -> _Shares:
    """The bundles of each microbatch of each rank; a bundle is never split."""
    sizes = [sum(tree.num_rows for tree in bundle) for bundle in bundles]
    if num_ranks == 1:
        ranks = [fill_bins(sizes, budget=budget)]
    else:
        costs = [sum(tree.cost for tree in bundle) for bundle in bundles]
        ranks = fill_rank_bins(sizes, costs, budget=budget, num_ranks=num_ranks)
    return [[[bundles[i] for i in bin_] for bin_ in rank] for rank in ranks]


def _samples(group: Group, *, critic: bool) -> list[Sample]:
    if critic:  # it estimates the advantages; each rollout ends with the episode's score
        return [
            Sample(
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
        return [Sample(rollout=r, advantages=advantages[r.mask]) for r, advantages in by_token]
    return [
        Sample(rollout=rollout, advantages=np.full(rollout.num_sampled, advantage, np.float32))
        for episode, advantage in zip(group.episodes, group.advantages, strict=True)
        for rollout in episode.rollouts
    ]


def _with_scores(samples: Sequence[Sample], group: Group) -> list[Sample]:
    by_episode = zip(group.episodes, group.scores, strict=True)
    scores = [score.of_agent(r.agent) for episode, score in by_episode for r in episode.rollouts]
    return [replace(sample, score=score) for sample, score in zip(samples, scores, strict=True)]


def _compared(samples: Sequence[list[Sample]]) -> list[list[Sample]]:
    """Rollouts with an advantage, by group; if none has one, the first, so that there is a step."""
    found = [[one for one in of_group if one.advantages.any()] for of_group in samples]
    return [of_group for of_group in found if of_group] or [samples[0][:1]]


def _lay_out(bundles: Sequence[_Bundle], *, pairs: bool, reported: _Numbers) -> Microbatch:
    segments, owners, rows_of = lay_out([tree for bundle in bundles for tree in bundle])
    paths = [
        (number, path)
        for number, bundle in enumerate(bundles)
        for tree in bundle
        for path in tree.paths()
    ]
    predictors: list[np.ndarray] = []
    last_rows: list[int] = []
    members: list[Sample] = []
    groups: list[int] = []  # of each member
    for number, path in paths:
        rows = rows_of[path]
        for sample in path.members:
            trained = np.flatnonzero(sample.rollout.mask)
            predictors.append(rows[trained - 1])
            last_rows.append(int(rows[trained[-1]]) if sample.was_cut else -1)
            members.append(sample)
            groups.append(number)
    lengths = np.array([len(tokens) for tokens in segments.tokens], np.int32)
    rollouts = [sample.rollout for sample in members]
    rewards = [sample.rewards for sample in members if sample.rewards is not None]
    scores = [sample.score for sample in members if sample.score is not None]
    counts = [rollout.num_sampled for rollout in rollouts]
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
        kept=join_kept([(r.kept and kept_rows(r.kept, r.mask), r.num_sampled) for r in rollouts]),
        routes=_join_routes([tree.routes for tree in owners], lengths),
        scores=np.repeat(np.array(scores, np.float32), counts) if scores else None,
        reference_logprobs=_join_references(rollouts),
        **_join_teachers(rollouts),
        groups=np.repeat(np.array(groups, np.int32), counts) if pairs else None,
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
