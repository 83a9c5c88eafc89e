"""Tree rollouts: every episode branches at each level, and each leaf is an episode of the group."""

from dataclasses import dataclass

from millrace.core.errors import ConfigError
from millrace.core.records import Episode
from millrace.environments.branching.scheduler import BranchLeaf, BranchScheduler, together
from millrace.environments.episode_runner import EpisodeRunner


@dataclass(frozen=True, kw_only=True, slots=True)
class Tree:
    """Trees of `branches` ** `depth` leaves. Levels lie evenly over the tokens that are sampled:
    with depth = 2, after a third of the first episode, and half-way through what follows."""

    branches: int = 2
    depth: int = 2

    def __post_init__(self) -> None:
        if self.branches < 2 or self.depth < 1:
            raise ValueError("branches must be at least 2 and depth at least 1")

    @property
    def size(self) -> int:
        return self.branches**self.depth

    def check(self, n: int) -> None:
        if n < self.size:
            raise ConfigError(
                f"environment.recipe 'tree' with branches = {self.branches} and depth ="
                f" {self.depth} makes trees of {self.size} episodes, but a group has {n}; raise"
                " rollout.group_size."
            )

    async def play(self, stage: EpisodeRunner, n: int) -> list[Episode]:
        grove = BranchScheduler(stage)
        return await grove.grow(n, size=self.size, tree=lambda: self._tree(grove))

    async def _tree(self, grove: BranchScheduler) -> None:
        root = await grove.plant()
        await self._grow(grove, root, first=0, levels=self.depth)

    async def _grow(
        self, grove: BranchScheduler, leaf: BranchLeaf, *, first: int, levels: int
    ) -> None:
        """Branch a leaf, from its own token number `first` on, so many levels deep."""
        if levels == 0:
            return
        cut = first + (len(leaf.places) - first) // (levels + 1)
        place = int(leaf.places[cut])

        async def beside() -> None:
            other = await grove.branch(leaf, place=place)
            await self._grow(grove, other, first=0, levels=levels - 1)

        await together(
            [
                self._grow(grove, leaf, first=cut, levels=levels - 1),
                *(beside() for _ in range(self.branches - 1)),
            ]
        )
