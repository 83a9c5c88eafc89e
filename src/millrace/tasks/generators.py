"""What makes tasks: [tasks.generator], a table of a built-in generator or of the user's own.

A generator is called without arguments and gives rows, as a function does. Its fields are the keys
of the table.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from millrace.core.plugins import build_plugin
from millrace.core.records import Prompt, Task
from millrace.scoring.verifiers.answers import check_positive, check_switch, check_text
from millrace.scoring.verifiers.reasoning_gym import COLUMN, make_dataset, reasoning_gym, told_of


@dataclass(frozen=True, kw_only=True, slots=True)
class Puzzles:
    """Tasks of a dataset of reasoning_gym; the scorer "reasoning_gym" judges them."""

    __name__ = "reasoning_gym"

    dataset: str
    """Its name there, as "leg_counting"."""
    size: int = 500
    seed: int = 0
    config: dict[str, Any] = field(default_factory=dict[str, Any])
    """Of the dataset, as {max_animals = 4}."""
    system: str = "default"
    """A system message that asks for the answer in tags: one of reasoning_gym's by its name, or a
    text; "" = none."""
    chat: bool = True
    """The prompt is messages; otherwise a text, with what `system` says above it."""

    def __post_init__(self) -> None:
        check_text("dataset", self.dataset)
        check_positive("size", self.size, whole=True)
        check_switch("chat", self.chat)

    def __call__(self) -> list[Task]:
        config = {**self.config, "size": self.size, "seed": self.seed}
        dataset = make_dataset(self.dataset, config)
        return [
            Task(
                prompt=self._prompt(entry["question"]),
                columns={"answer": entry["answer"], COLUMN: told_of(self.dataset, config, entry)},
            )
            for entry in (dataset[index] for index in range(self.size))
        ]

    def _prompt(self, question: str) -> Prompt:
        system = reasoning_gym("utils").SYSTEM_PROMPTS.get(self.system, self.system)
        if not self.chat:
            return f"{system}\n{question}" if system else question
        told = [{"role": "system", "content": system}] if system else []
        return [*told, {"role": "user", "content": question}]


GENERATORS: dict[str, type] = {"reasoning_gym": Puzzles}


def build_generator(table: Mapping[str, Any], *, section: str) -> Any:
    """A function that gives rows, or the rows, if a function of the user's made them at once."""
    return build_plugin(table, builtins=GENERATORS, default="", section=section)
