"""Trees of the rollouts of a group: rows that several of them need are stored and computed once.

Promise: the path from a root to a leaf has all rows that a rollout needs, with its tokens. Prefixes
are shared at any depth: the prompt of a group, the turns before a branch of an episode, and what
attempts at the same turn begin with. Parts of a tree have copies of what they share.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from millrace.core.microbatch import MIN_SHARED_TOKENS, Segments, common_prefix
from millrace.core.records import Rollout
from millrace.training.packing.bins import fill_bins

# Cost of one query-key pair, in rows. Per layer a row takes about 24 D^2 FLOPs in matrix products
# and a pair 4 D in attention: 1 / 6 D, with D = 4096.
_PAIR_COST = 1 / 24_576
# Cost of attending to shared rows in a call of its own, in rows, for each row below them. It is
# memory traffic: the output is read and written again.
_CALL_COST = 1 / 32


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Sample:
    """A rollout and the advantages and rewards of its n trained tokens."""

    rollout: Rollout
    advantages: np.ndarray  # [n] float32
    score: float | None = None  # of its episode; for a loss that needs it
    rewards: np.ndarray | None = None  # [n] float64; for a critic
    was_cut: bool = False  # a critic values the state after the last trained token


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class TreePath:
    """Rows that no others continue, and the rollouts that need them. The first one needs all."""

    tokens: np.ndarray  # [rows] int32
    members: tuple[Sample, ...]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class PrefixTree:
    """The rows from `begin` to `end` of all paths below."""

    begin: int
    end: int
    path: TreePath  # the first one below
    children: tuple["PrefixTree", ...] = ()  # none, or at least two

    @property
    def tokens(self) -> np.ndarray:
        return self.path.tokens[self.begin : self.end]

    @property
    def routes(self) -> np.ndarray | None:  # [rows, layers, top_k]
        """Shared rows are computed once, with the routes of one rollout."""
        routes = self.path.members[0].rollout.routes
        return None if routes is None else routes[self.begin : self.end]

    @property
    def num_rows(self) -> int:
        return self.end - self.begin + sum(child.num_rows for child in self.children)

    @property
    def num_shared(self) -> int:
        """Rows that all paths share."""
        return self.end - self.begin if self.children else 0

    @property
    def cost(self) -> float:
        """Cost of a forward pass in rows; a row attends to all rows before it."""
        pairs = (self.end**2 - self.begin**2) / 2
        own = self.end - self.begin + _PAIR_COST * pairs
        return own + sum(child.cost for child in self.children)

    def paths(self) -> Iterator[TreePath]:
        if not self.children:
            yield self.path
        for child in self.children:
            yield from child.paths()

    def parts(self, *, budget: int) -> Iterator["PrefixTree"]:
        """Trees of at most `budget` rows, unless a single path has more."""
        if self.num_rows <= budget or not self.children:
            yield self
            return
        # If the shared rows leave no room, a budget of 0 puts every path into its own bin.
        room = max(0, budget - self.num_shared)
        below = [part for child in self.children for part in child.parts(budget=room)]
        for bin_ in fill_bins([part.num_rows for part in below], budget=room):
            children = tuple(below[i] for i in sorted(bin_))
            if len(children) == 1:
                yield replace(children[0], begin=self.begin)
            else:
                yield replace(self, path=children[0].path, children=children)


def grow_trees(samples: Sequence[Sample]) -> list[PrefixTree]:
    """The trees of a group's rollouts; those without trained tokens need no rows."""
    paths = _paths(samples)
    common = [common_prefix(earlier.tokens, later.tokens) for earlier, later in pairwise(paths)]
    return [*_grow(paths, common, begin=0, agreed=0)]


def _paths(samples: Sequence[Sample]) -> list[TreePath]:
    """Paths in an order in which common prefixes are neighbours."""
    members: dict[bytes, list[Sample]] = {}
    for sample in samples:
        trained = np.flatnonzero(sample.rollout.mask)
        if len(trained):
            needed = sample.rollout.tokens[: trained[-1] + sample.was_cut].astype(np.int32)
            members.setdefault(needed.tobytes(), []).append(sample)
    longest: list[bytes] = []
    for needed in sorted(members, reverse=True):  # what continues a rollout comes before it
        if longest and longest[-1].startswith(needed):
            members[longest[-1]] += members[needed]
        else:
            longest.append(needed)
    return [
        TreePath(tokens=np.frombuffer(needed, np.int32), members=tuple(members[needed]))
        for needed in reversed(longest)
    ]


def _grow(
    paths: Sequence[TreePath], common: Sequence[int], *, begin: int, agreed: int
) -> Iterator[PrefixTree]:
    """Trees from row `begin` on, of paths whose first `agreed` tokens are the same. `common`:
    equal leading tokens of each path and the next one."""
    ends = [i + 1 for i, shared in enumerate(common) if shared < agreed + MIN_SHARED_TOKENS]
    for first, last in pairwise([0, *ends, len(paths)]):
        alike, shared = paths[first:last], common[first : last - 1]
        if len(alike) == 1:
            yield PrefixTree(begin=begin, end=len(alike[0].tokens), path=alike[0])
            continue
        end = min(shared)
        num_below = sum(len(path.tokens) - end for path in alike)
        if (end - begin) * (len(alike) - 1) < _CALL_COST * num_below:
            yield from _grow(alike, shared, begin=begin, agreed=end)
            continue
        children = tuple(_grow(alike, shared, begin=end, agreed=end))
        yield PrefixTree(begin=begin, end=end, path=children[0].path, children=children)


def lay_out(
    trees: Sequence[PrefixTree],
) -> tuple[Segments, list[PrefixTree], dict[TreePath, np.ndarray]]:
    """The segments of trees in the order of a microbatch, the tree whose rows each of them holds,
    and the rows of each path."""
    segments, owners = Segments(), list[PrefixTree]()
    rows: dict[TreePath, np.ndarray] = {}

    def add(tree: PrefixTree, parent: int = -1) -> int:
        number = segments.add(tree.tokens, parent=parent)
        owners.append(tree)
        if not tree.children:
            rows[tree.path] = segments.paths[number]
        return number

    def add_below(tree: PrefixTree, number: int) -> None:
        for child in tree.children:
            add_below(child, add(child, number))

    shared = [tree for tree in trees if tree.children]
    roots = [add(tree) for tree in shared]
    for tree, root in zip(shared, roots, strict=True):
        add_below(tree, root)
    for tree in trees:
        if not tree.children:
            add(tree)
    return segments, owners, rows
