"""Advantage estimators: how much better each episode, or token, was than expected.

An estimator is a plug-in: a frozen dataclass whose fields are the keys of [scoring.advantages], or
a user's function (see the protocols Advantages and AdvantagesOverBatch). If the agents of an
episode are rewarded separately, each is compared with itself in the other episodes of its group.

Promise: whatever an estimator returns, a group gets finite advantages or one ScoreError.

N = sampled tokens of a rollout, in order.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import Field

from millrace.config.section import NonNegativeFloat
from millrace.core.errors import ScoreError
from millrace.core.plugins import build_callable, plugin
from millrace.core.protocols import Advantages, AdvantagesOverBatch
from millrace.core.records import Branching, Group, Rollout, Score

SECTION = "scoring.advantages"
Segment = tuple[int, int]  # number of the episode that sampled it, index within that episode


@plugin
class GroupAdvantages:
    """Each total minus the group's mean, over the group's standard deviation. The deviation is
    unbiased (n - 1), as in common GRPO implementations. If all totals are equal, the advantages are
    exactly 0, free of rounding errors."""

    normalize_std: bool = True
    """Divide by the standard deviation; false keeps the scale of the rewards, as in Dr. GRPO."""
    epsilon: NonNegativeFloat = 1e-4  # added to the deviation: a tiny one must not amplify noise

    def __call__(self, group: Group) -> np.ndarray:  # [episodes]
        return _normalized(_totals(group), by_std=self.normalize_std, epsilon=self.epsilon)


@plugin
class LeaveOneOutAdvantages:
    """Each total minus the mean of the other totals (RLOO)."""

    def __call__(self, group: Group) -> np.ndarray:  # [episodes]
        totals = _totals(group)
        if len(totals) == 1:
            return np.zeros(1)
        return _normalized(totals) * (len(totals) / (len(totals) - 1))


@plugin
class BestWorstAdvantages:
    """A preference pair: 1 for the best, -1 for the worst, 0 for others and if all are equal."""

    def __call__(self, group: Group) -> np.ndarray:  # [episodes]
        totals = _totals(group)
        advantages = np.zeros(len(totals))
        if totals.max() > totals.min():
            advantages[totals.argmax()], advantages[totals.argmin()] = 1, -1
        return advantages


@plugin
class BatchAdvantages:
    """Normalised over all episodes that are trained in one step (REINFORCE++)."""

    baseline: Literal["batch", "group"] = "batch"
    """Mean that is subtracted: of the step, or of the group. The deviation is the step's."""
    epsilon: NonNegativeFloat = 1e-4

    def __call__(self, group: Group) -> np.ndarray:  # [episodes]
        """Return the totals, minus the group's mean if that is the baseline."""
        return _normalized(_totals(group), centre=self.baseline == "group")

    def over_batch(self, groups: Sequence[Group]) -> list[np.ndarray]:
        values = np.concatenate([self(group) for group in groups])
        is_centred = self.baseline == "batch"
        values = _normalized(values, centre=is_centred, by_std=True, epsilon=self.epsilon)
        return np.split(values, np.cumsum([len(group.scores) for group in groups])[:-1])


@plugin
class ReturnAdvantages:
    """Per token: the discounted sum of rewards from there on, normalised over all sampled tokens of
    the group. The episode's total belongs to its last token."""

    discount: Annotated[float, Field(gt=0, le=1)] = 1.0
    normalize_std: bool = True
    epsilon: NonNegativeFloat = 1e-4

    def __call__(self, group: Group) -> list[np.ndarray]:  # [L] each
        returns = [
            discounted_returns(sampled_rewards(rollout, score=total), discount=self.discount)
            for episode, total in zip(group.episodes, _totals(group).tolist(), strict=True)
            for rollout in episode.rollouts
        ]
        values = np.concatenate(returns)
        values = _normalized(values, by_std=self.normalize_std, epsilon=self.epsilon)
        ends = np.cumsum([len(part) for part in returns])[:-1]
        found: list[np.ndarray] = []
        for rollout, part in zip(group.rollouts, np.split(values, ends), strict=True):
            by_token = np.zeros(len(rollout.tokens), np.float32)
            by_token[rollout.mask] = part
            found.append(by_token)
        return found


@plugin
class GaeAdvantages:
    """Generalized advantage estimation. The trainer computes it with its critic; until then the
    advantages are the totals."""

    gamma: Annotated[float, Field(gt=0, le=1)] = 1.0  # discount of rewards per token
    gae_lambda: Annotated[float, Field(ge=0, le=1)] = 1.0  # 1 trusts the rewards, 0 the critic
    normalize: bool = True  # to mean 0 and deviation 1 over all trained tokens of a step

    def __call__(self, group: Group) -> np.ndarray:  # [episodes]
        return _totals(group)


@plugin
class TreeAdvantages:
    """Advantages by segment. Without branches: each total minus the group's mean."""

    normalize_std: bool = True  # divide by the standard deviation of the group's scores
    epsilon: NonNegativeFloat = 1e-4
    weigh_shared: bool = True  # multiply by the number of episodes that share the token

    handles_agents = True

    def __call__(self, group: Group) -> list[np.ndarray]:  # [L] for each rollout
        forest = _Forest(group)
        agents = dict.fromkeys(rollout.agent for rollout in group.rollouts)
        by_agent = {name: self._of_agent(forest, group, name) for name in agents}
        return [
            forest.by_token(index, rollout, by_agent[rollout.agent])
            for index, episode in enumerate(group.episodes)
            for rollout in episode.rollouts
        ]

    def _of_agent(self, forest: "_Forest", group: Group, name: str) -> dict[Segment, float]:
        scores = np.array([score.of_agent(name) for score in group.scores], np.float64)
        if scores.max() == scores.min():  # exactly 0, free of rounding errors
            return defaultdict(float)
        scale = scores.std(ddof=1) + self.epsilon if self.normalize_std else 1.0
        return {
            segment: (value * sharers if self.weigh_shared else value) / scale
            for segment, (value, sharers) in forest.advantages(scores.tolist()).items()
        }


class _Forest:
    """The trees of a group, whose episodes branch off one another; some may be missing.

    The tokens of a tree form segments, from one branching point to the next. The value of a segment
    is the mean of what follows it: the segments that start at its end, and the score of an episode
    that ends there. Its advantage is its value minus that of the segment before it, or of a first
    segment, minus the mean over the trees. So tokens after a branching point are compared with
    their siblings alone, and along each episode the advantages add up to its score minus the mean.

    A segment that several episodes share is trained once on behalf of all of them, so its weight is
    their number. The expected gradient is then that of as many episodes that share nothing.
    """

    def __init__(self, group: Group) -> None:
        self._branchings = [
            episode.branching or Branching(number=-1 - index)  # a tree of its own
            for index, episode in enumerate(group.episodes)
        ]
        self._known = {branching.number: branching for branching in self._branchings}
        points: defaultdict[int, set[int]] = defaultdict(set)
        for branching in self._branchings:
            if branching.parent is not None:
                points[branching.parent].add(branching.place)
        self._points = {number: sorted(places) for number, places in points.items()}

    def advantages(self, scores: list[float]) -> dict[Segment, tuple[float, int]]:
        """Return the advantage of each segment, and how many episodes share it."""
        ends = {b.number: score for b, score in zip(self._branchings, scores, strict=True)}
        children: defaultdict[Segment | None, list[Segment]] = defaultdict(list)
        for number in dict.fromkeys([*self._known, *self._points]):
            count = len(self._points.get(number, ()))
            last = count if number in ends else count - 1
            branching = self._known.get(number)
            before = None  # the segment at whose end the episode branches off
            if branching is not None and branching.parent is not None:
                points = self._points[branching.parent]
                before = (branching.parent, points.index(branching.place))
            children[before].append((number, 0))
            for index in range(last):
                children[number, index].append((number, index + 1))
        values_of: dict[Segment, float] = {}
        sharers: dict[Segment, int] = {}

        def value(segment: Segment) -> float:
            number, index = segment
            values = [value(child) for child in children[segment]]
            sharers[segment] = sum(sharers[child] for child in children[segment])
            if number in ends and index == len(self._points.get(number, ())):
                values.append(ends[number])
                sharers[segment] += 1
            values_of[segment] = float(np.mean(values))
            return values_of[segment]

        overall = float(np.mean([value(root) for root in children[None]]))
        baselines: dict[Segment | None, float] = {**values_of, None: overall}
        return {
            child: (values_of[child] - baselines[segment], sharers[child])
            for segment, segments in children.items()
            for child in segments
        }

    def by_token(self, index: int, rollout: Rollout, found: dict[Segment, float]) -> np.ndarray:
        """Return [L] for a rollout of this episode; 0 where the mask is False."""
        number = self._branchings[index].number
        if rollout.places is None:
            return np.full(len(rollout.tokens), found[number, 0], np.float32)
        segments = np.searchsorted(self._points.get(number, []), rollout.places, side="right")
        values = np.array([found[number, i] for i in range(segments.max() + 1)], np.float32)
        return np.where(rollout.mask, values[segments], 0).astype(np.float32)


PAIRS = "best_worst"
CRITIC = "gae"
TREE = "tree"
ADVANTAGES: dict[str, type] = {
    "group": GroupAdvantages,
    "leave_one_out": LeaveOneOutAdvantages,
    PAIRS: BestWorstAdvantages,
    "batch": BatchAdvantages,
    "returns": ReturnAdvantages,
    CRITIC: GaeAdvantages,
    TREE: TreeAdvantages,
}


def build_advantages(table: Mapping[str, Any]) -> Advantages:
    return build_callable(table, builtins=ADVANTAGES, default="group", section=SECTION)


def with_advantages(group: Group, found: Any) -> Group:
    """Return the group with an estimator's output; raises ScoreError if the output is invalid."""
    try:
        parts = list(found)
        of_tokens = bool(parts) and all(np.ndim(part) == 1 for part in parts)
        with np.errstate(over="ignore"):  # overflow to inf is refused below
            found_arrays = parts if of_tokens else [parts]
            arrays = tuple(np.asarray(part, np.float32) for part in found_arrays)
    except (TypeError, ValueError):
        raise _invalid(group, found) from None
    lengths = [len(rollout.tokens) for rollout in group.rollouts]
    expected = lengths if of_tokens else [len(group.episodes)]
    is_finite = all(np.isfinite(array).all() for array in arrays)
    if [array.shape for array in arrays] != [(n,) for n in expected] or not is_finite:
        raise _invalid(group, found)
    if not of_tokens:
        return replace(group, advantages=arrays[0], token_advantages=None)
    sampled = iter([a[rollout.mask] for a, rollout in zip(arrays, group.rollouts, strict=True)])
    means: list[float] = []
    for episode in group.episodes:
        values = np.concatenate([next(sampled) for _ in episode.rollouts])
        means.append(float(values.mean()) if len(values) else 0.0)
    return replace(group, advantages=np.array(means, np.float32), token_advantages=arrays)


def estimate_by_agent(estimator: Advantages, group: Group) -> Any:
    """Call the estimator once, or once per agent if agents are rewarded separately."""
    is_shared = not any(score.by_agent for score in group.scores)
    if is_shared or getattr(estimator, "handles_agents", False):
        return estimator(group)
    if isinstance(estimator, AdvantagesOverBatch):
        raise ScoreError(
            f"Advantages {type(estimator).__name__!r} compare several groups and cannot"
            " distinguish the agents of an episode; choose another type in [scoring.advantages]."
        )
    names = dict.fromkeys(rollout.agent for rollout in group.rollouts)
    by_name = {name: iter(_by_token(estimator, _alone(group, name))) for name in names}
    return [next(by_name[rollout.agent]) for rollout in group.rollouts]


def _alone(group: Group, name: str) -> Group:
    """Return the episodes of one agent, with its own rollouts and scores."""
    members = [
        (
            replace(episode, rollouts=tuple(r for r in episode.rollouts if r.agent == name)),
            Score(total=score.of_agent(name), parts=score.parts),
        )
        for episode, score in zip(group.episodes, group.scores, strict=True)
        if any(rollout.agent == name for rollout in episode.rollouts)
    ]
    episodes, scores = zip(*members, strict=True)
    return replace(group, episodes=episodes, scores=scores)


def _by_token(estimator: Advantages, group: Group) -> list[np.ndarray]:  # [L] for each rollout
    estimated = with_advantages(group, estimator(group))
    if estimated.token_advantages is not None:
        return list(estimated.token_advantages)
    assert estimated.advantages is not None
    return [
        np.full(len(rollout.tokens), advantage, np.float32)
        for episode, advantage in zip(group.episodes, estimated.advantages, strict=True)
        for rollout in episode.rollouts
    ]


def _invalid(group: Group, found: Any) -> ScoreError:
    return ScoreError(
        f"The advantages of group {group.number} are {found!r}; each of its"
        f" {len(group.episodes)} episodes needs one finite number, or each of its rollouts one for"
        " every token."
    )


def _totals(group: Group) -> np.ndarray:  # [episodes] float64
    return np.array([score.total for score in group.scores], dtype=np.float64)


def _normalized(
    values: np.ndarray, *, centre: bool = True, by_std: bool = False, epsilon: float = 0.0
) -> np.ndarray:
    if values.max() == values.min() and (centre or by_std):
        return np.zeros(len(values))
    deviation = values.std(ddof=1) + epsilon if by_std else 1.0
    return (values - values.mean() if centre else values) / deviation


def sampled_rewards(rollout: Rollout, *, score: float) -> np.ndarray:  # [N] float64
    """The rewards of a rollout at its sampled tokens, with `score` added to the last one.

    A reward at a token that was not sampled is credited to the last sampled token before it. One
    before the first sampled token is dropped.
    """
    rewards = np.zeros(rollout.num_sampled)
    if rollout.rewards is not None:
        owners = np.cumsum(rollout.mask) - 1  # [L]
        has_owner = owners >= 0
        np.add.at(rewards, owners[has_owner], rollout.rewards[has_owner])
    rewards[-1:] += score
    return rewards


def discounted_returns(rewards: np.ndarray, *, discount: float) -> np.ndarray:  # [N] float64
    """Returns, for each token, its reward plus the discounted rewards after it."""
    if discount == 1.0:
        return rewards[::-1].cumsum()[::-1]

    backwards: list[float] = rewards[::-1].tolist()
    returns = accumulate(backwards, lambda later, reward: reward + discount * later)
    return np.fromiter(returns, np.float64, len(rewards))[::-1]


def gae(
    rewards: np.ndarray,
    values: np.ndarray,
    *,
    discount: float,
    decay: float,
    last_value: float = 0.0,
) -> np.ndarray:  # [N] float64
    """Generalized advantage estimation (arXiv 1506.02438): the sums, discounted by
    gamma * lambda, of the TD errors reward + gamma * next value - value.

    `discount` is gamma and `decay` is lambda; with lambda = 1 these are returns minus values.
    `values` [N] belong to the states before each token, `last_value` to the state after the last
    one: 0 if the episode ended there. The critic's targets are advantages + values.
    """
    following = np.append(values[1:], last_value)
    td_errors = rewards + discount * following - values
    return discounted_returns(td_errors, discount=discount * decay)
