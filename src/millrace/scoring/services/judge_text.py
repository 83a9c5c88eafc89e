"""The text of an LLM judge: its prompt template, and the score in its reply.

{prompt} {completion} {answer}   are replaced once, so a completion cannot insert other columns
{{answer}}                       stands for the text {answer}

A score is found by a key of the JSON in the reply, or by a pattern. The user's pattern may take
forever to backtrack, so it is matched in the scorer processes.
"""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

from millrace.core.errors import ConfigError
from millrace.core.records import Episode, Prompt, Task

PLACEHOLDER = re.compile(r"\{\{(\w+)\}\}|\{(\w+)\}")
BUILTIN_NAMES = ("prompt", "completion")
MAX_CHARACTERS = 20_000  # read from the end of a reply, where the score is
MAX_OBJECTS = 100  # JSON objects that are searched for a key; a reply may be nothing but braces


def check_template(template: str, tasks: Sequence[Task], *, scorer: str) -> None:
    names = {name for _, name in PLACEHOLDER.findall(template) if name}
    if "completion" not in names:
        raise ConfigError(
            f"Scorer {scorer!r} has a prompt without {{completion}}, so the judge would not see"
            " what it scores; add it."
        )
    for index, task in enumerate(tasks):
        for name in sorted(names.difference(BUILTIN_NAMES, task.columns)):
            raise ConfigError(
                f"Scorer {scorer!r} has {{{name}}} in its prompt, but task {index} has no such"
                f" column; add it to the task, or write {{{{{name}}}}} to mean the text."
            )


def fill_template(template: str, *, task: Task, episode: Episode) -> str:
    values = {
        **task.columns,
        "prompt": _chat_as_text(task.prompt),
        "completion": episode.turns[-1].completion,
    }

    def value(found: re.Match[str]) -> str:
        escaped, name = found.groups()
        return f"{{{escaped}}}" if escaped else _as_text(values[name])

    return PLACEHOLDER.sub(value, template)


def _chat_as_text(prompt: Prompt) -> str:
    if isinstance(prompt, str):
        return prompt
    return "\n\n".join(f"{m['role']}: {_as_text(m.get('content', ''))}" for m in prompt)


def _as_text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def read_key(reply: str, key: str) -> Any:
    """Return the value of `key` in the last JSON object of the reply that has it, or None."""
    reply = reply[-MAX_CHARACTERS:]
    decoder = json.JSONDecoder()
    start = len(reply)
    for _ in range(MAX_OBJECTS):
        start = reply.rfind("{", 0, start)
        if start < 0:
            break
        try:
            found, _ = decoder.raw_decode(reply, start)
        except (ValueError, RecursionError):
            continue
        if key in found:
            return cast(dict[str, Any], found)[key]
    return None


@dataclass(frozen=True)
class PatternReader:
    """A reward function over replies: the number in the first group of the last match."""

    pattern: str

    def __call__(self, completions: Sequence[str]) -> list[float | None]:
        return [self._read(reply) for reply in completions]

    def _read(self, reply: str) -> float | None:
        matches = list(re.finditer(self.pattern, reply[-MAX_CHARACTERS:]))
        try:
            return float(matches[-1][1]) if matches else None
        except (TypeError, ValueError):  # the group did not match, or is not a number
            return None
