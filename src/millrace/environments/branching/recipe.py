"""What a recipe is: a plug-in whose fields are the keys of [environment.recipe]."""

from typing import Protocol

from millrace.core.records import Episode
from millrace.environments.episode_runner import EpisodeRunner


class Recipe(Protocol):
    def check(self, n: int) -> None:
        """Raise ConfigError if a group of n episodes has no room for what it does."""
        ...

    async def play(self, stage: EpisodeRunner, n: int) -> list[Episode]:
        """n episodes for training. Called on the controller's event loop."""
        ...
