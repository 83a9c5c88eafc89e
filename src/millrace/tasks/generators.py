"""Task generators: plug-ins behind [tasks.generator], built in or user-defined.

A generator is called without arguments and returns rows. Its fields are the keys of the table.
"""

from collections.abc import Mapping
from dataclasses import field
from typing import Any

from millrace.config.section import NonEmptyStr, PositiveInt
from millrace.core.plugins import build_plugin, plugin
from millrace.core.records import Prompt, Task
from millrace.scoring.verifiers.reasoning_gym import COLUMN, make_dataset, puzzle_of, reasoning_gym


@plugin
class Puzzles:
    """Tasks of a reasoning_gym dataset; the scorer "reasoning_gym" verifies their answers."""

    __name__ = "reasoning_gym"

    dataset: NonEmptyStr
    """Name of the dataset in reasoning_gym, such as "leg_counting"."""
    size: PositiveInt = 500
    """Number of tasks."""
    seed: int = 0
    """Seed of the dataset."""
    config: dict[str, Any] = field(default_factory=dict[str, Any])
    """Settings of the dataset, such as {max_animals = 4}."""
    system: str = "default"
    """System message that asks for the answer in tags: a name of reasoning_gym, or a text; "" for
    none."""
    chat: bool = True
    """Whether the prompt is a list of messages; if false, a text that begins with `system`."""

    def __call__(self) -> list[Task]:
        config = {**self.config, "size": self.size, "seed": self.seed}
        dataset = make_dataset(self.dataset, config)
        return [
            Task(
                prompt=self._prompt(entry["question"]),
                columns={"answer": entry["answer"], COLUMN: puzzle_of(self.dataset, config, entry)},
            )
            for entry in (dataset[index] for index in range(self.size))
        ]

    def _prompt(self, question: str) -> Prompt:
        system = reasoning_gym("utils").SYSTEM_PROMPTS.get(self.system, self.system)
        if not self.chat:
            return f"{system}\n{question}" if system else question
        first = [{"role": "system", "content": system}] if system else []
        return [*first, {"role": "user", "content": question}]


GENERATORS: dict[str, type] = {"reasoning_gym": Puzzles}


def build_generator(table: Mapping[str, Any], *, section: str) -> Any:
    """Build the generator; a user's factory may also return the rows themselves."""
    return build_plugin(table, builtins=GENERATORS, default="", section=section)
