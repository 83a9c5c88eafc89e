"""What a judge is asked: a template with the prompt, the completion and the task's columns.

{prompt} {completion} {answer}      each replaced once, so that a completion cannot name others
{{answer}}                          stands for {answer} itself

How a judge's reply is read: by a key of the JSON in it, or by a pattern.

A pattern is the user's and may backtrack for ever, so it is matched in the scorer processes.
"""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

from millrace.cluster.messages import ScoreGroup
from millrace.core.errors import ConfigError, WorkerError
from millrace.core.records import Episode, Message, Prompt, Task
from millrace.scoring.functions.workers import ScorerWorkers

PLACE = re.compile(r"\{\{(\w+)\}\}|\{(\w+)\}")
OWN = ("prompt", "completion")


def check_template(template: str, tasks: Sequence[Task], *, scorer: str) -> None:
    names = {name for _, name in PLACE.findall(template) if name}
    if "completion" not in names:
        raise ConfigError(
            f"Scorer {scorer!r} has a prompt without {{completion}}, so it judges nothing; add it."
        )
    for index, task in enumerate(tasks):
        for name in sorted(names.difference(OWN, task.columns)):
            raise ConfigError(
                f"Scorer {scorer!r} has {{{name}}} in its prompt, which task {index} has no column"
                f" for; add it to the task, or write {{{{{name}}}}} to mean the text."
            )


def fill_template(template: str, *, task: Task, episode: Episode) -> str:
    values = {
        **task.columns,
        "prompt": _told(task.prompt),
        "completion": episode.turns[-1].completion,
    }

    def value(found: re.Match[str]) -> str:
        kept, name = found.groups()
        return f"{{{kept}}}" if kept else _text(values[name])

    return PLACE.sub(value, template)


def _told(prompt: Prompt) -> str:
    """A chat as text."""
    return prompt if isinstance(prompt, str) else "\n\n".join(map(_message, prompt))


def _message(message: Message) -> str:
    return f"{message['role']}: {_text(message.get('content', ''))}"


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


MAX_CHARACTERS = 20_000  # the end of a reply, where the score is
MAX_OBJECTS = 100  # in which a key is looked for; a reply may be nothing but braces
MATCH_S = 5.0


def read_key(reply: str, key: str) -> Any:
    """What the last JSON object of the reply that has this key holds there; None if none has."""
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
    """A reward function over replies: the number that the last match holds in its first group."""

    pattern: str

    def __call__(self, completions: Sequence[str]) -> list[float | None]:
        return [self._read(reply) for reply in completions]

    def _read(self, reply: str) -> float | None:
        matches = list(re.finditer(self.pattern, reply[-MAX_CHARACTERS:]))
        try:
            return float(matches[-1][1]) if matches else None
        except (TypeError, ValueError):  # a group that took no part, or holds no number
            return None


async def read_pattern(
    reply: str, *, function: str, workers: ScorerWorkers, priority: int
) -> float | None:
    """None also if it takes too long."""
    message = ScoreGroup(
        function=function, prompts=[""], completions=[reply], completion_ids=[[]], columns={}
    )
    try:
        scored = await workers.call(message, exclusive=True, timeout_s=MATCH_S, priority=priority)
    except (TimeoutError, WorkerError):
        return None
    return scored.rewards[0]
