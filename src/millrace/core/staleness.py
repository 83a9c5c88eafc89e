"""How stale tokens may be when they are trained: one rule for admission, for running groups and for
take().

A token's staleness is the trainer's version minus the version that sampled it. It only grows, so a
group that is too stale for its earliest take stays too stale. Of several policies, each has a
version counter of its own; PolicyVersions translates between versions and steps.
"""

from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Literal, Self

import numpy as np

from millrace.core.records import DEFAULT_POLICY, Group, Rollout

Measure = Literal["oldest", "mean", "share"]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class TokenVersions:
    """The versions that sampled some tokens: of a completion, a rollout or a group."""

    counts: dict[int, int]  # tokens by version, ascending; none is 0
    # Those of policies with versions of their own, by name, until PolicyVersions.aligned().
    others: Mapping[str, dict[int, int]] = field(default_factory=dict[str, dict[int, int]])

    @classmethod
    def of(cls, versions: np.ndarray, *, policy: str | None = None) -> Self:
        """`versions` [N]: one per token. `policy`: None = the only or first one."""
        # By runs of equal versions: a completion has few of them, so this is fastest.
        changes = np.flatnonzero(versions[1:] != versions[:-1]) + 1
        bounds = [0, *changes.tolist(), len(versions)] if len(versions) else []
        counts: dict[int, int] = {}
        for begin, end in pairwise(bounds):
            version = int(versions[begin])
            counts[version] = counts.get(version, 0) + end - begin
        counts = dict(sorted(counts.items()))
        if policy in (None, DEFAULT_POLICY):
            return cls(counts=counts)
        return cls(counts={}, others={policy: counts})

    @classmethod
    def of_rollout(cls, rollout: Rollout) -> Self:
        """Counts its trained tokens."""
        return cls.of(rollout.versions[rollout.mask], policy=rollout.policy)

    @classmethod
    def of_group(cls, group: Group) -> Self:
        return cls.joined(cls.of_rollout(rollout) for rollout in group.rollouts)

    @classmethod
    def joined(cls, parts: Iterable["TokenVersions"]) -> Self:
        counts: Counter[int] = Counter()
        others: dict[str, Counter[int]] = {}
        for part in parts:
            counts.update(part.counts)
            for policy, own in part.others.items():
                others.setdefault(policy, Counter()).update(own)
        return cls(counts=dict(sorted(counts.items())), others=others)

    @property
    def num_tokens(self) -> int:
        return sum(self.counts.values())

    @property
    def oldest(self) -> int | None:
        """None without tokens."""
        return next(iter(self.counts), None)

    @property
    def spread(self) -> int:
        """Versions between the oldest token and the newest."""
        return 0 if not self.counts else max(self.counts) - min(self.counts)

    def num_before(self, version: int) -> int:
        return sum(count for sampled_by, count in self.counts.items() if sampled_by < version)

    def total_staleness(self, version: int) -> int:
        return sum((version - sampled_by) * count for sampled_by, count in self.counts.items())


@dataclass(frozen=True, kw_only=True, slots=True)
class StalenessLimit:
    """Which groups may be trained. Measure "oldest": no token is staler than max_staleness; "mean":
    the mean staleness is at most max_staleness; "share": at most max_stale_share of the tokens are
    staler."""

    max_staleness: int
    measure: Measure = "oldest"
    max_stale_share: float = 0.0  # for "share" only
    only_at_take: bool = False  # the limit neither paces admission nor cancels running groups
    waits: bool = False  # a batch waits for groups that would be too stale for the next ones

    def allows(self, tokens: TokenVersions, *, version: int) -> bool:
        """True if a group of these tokens may be trained at `version`."""
        if self.measure == "mean":
            return tokens.total_staleness(version) <= self.max_staleness * tokens.num_tokens
        num_stale = tokens.num_before(self.oldest_at(version))
        if self.measure == "share" and num_stale:
            return num_stale / tokens.num_tokens <= self.max_stale_share
        return num_stale == 0

    def oldest_at(self, version: int) -> int:
        """The oldest version whose tokens are within max_staleness."""
        return version - self.max_staleness

    @property
    def one_token_decides(self) -> bool:
        """True if one token that is too stale rules its group out for certain, at once. Otherwise
        fresh tokens may still outweigh it until the group is complete."""
        if self.only_at_take:
            return False
        if self.measure == "mean":
            return self.max_staleness == 0
        return self.measure == "oldest" or self.max_stale_share == 0.0


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class BufferedGroup:
    """A scored group that waits in the buffer or the replay buffer."""

    group: Group
    token_versions: TokenVersions  # of its trained tokens
    admitted_s: float = 0.0  # by the buffer's clock
    # With several policies: as sampled, while `token_versions` are aligned with a step.
    unaligned: TokenVersions | None = None


class PolicyVersions:
    """The versions of several policies: a step makes one of each policy that it trains. Without
    names there is one policy, and its version is the step. Used on the controller's event loop."""

    def __init__(self, versions: Mapping[str, int] | None = None, *, step: int = 0) -> None:
        """`versions`: of each policy after `step`, the first policy first."""
        self._begin = dict(versions or {})
        self._made: dict[str, list[int]] = {policy: [] for policy in self._begin}  # by which steps
        self.step = step  # the newest that is recorded
        self.on_record: Callable[[], None] = lambda: None

    def record(self, step: int, *, trained: Collection[str]) -> None:
        """The next step trains these policies."""
        self.step = step
        for policy in trained:
            self._made[policy].append(step)
        self.on_record()

    def at(self, step: int, *, policy: str | None = None) -> int:
        """The version of a policy after a step; None = the first. A step that is not recorded yet
        counts as one that does not train it."""
        if not self._begin:
            return step
        policy = policy or next(iter(self._begin))
        return self._begin[policy] + bisect_right(self._made[policy], step)

    def through(self, version: int, *, policy: str | None = None) -> int:
        """The last recorded step after which this is the newest version of a policy."""
        if not self._begin:
            return version
        policy = policy or next(iter(self._begin))
        later = self._made[policy][version - self._begin[policy] :]
        return later[0] - 1 if later else self.step

    def aligned(self, tokens: TokenVersions, step: int) -> TokenVersions:
        """The same tokens, with versions that are as far behind `step` as each token's own is
        behind its policy then."""
        if not self._begin:
            return tokens
        parts = [(None, tokens.counts), *tokens.others.items()]
        behind = {policy: step - self.at(step, policy=policy) for policy, _ in parts}
        return TokenVersions.joined(
            TokenVersions(counts={version + behind[policy]: n for version, n in counts.items()})
            for policy, counts in parts
        )

    def realigned(self, one: BufferedGroup, step: int) -> BufferedGroup:
        """A buffered group whose token versions are aligned with `step`."""
        if not self._begin:
            return one
        unaligned = one.unaligned or one.token_versions
        return replace(one, token_versions=self.aligned(unaligned, step), unaligned=unaligned)
