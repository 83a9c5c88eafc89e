"""What a judge is asked: a template with the prompt, the completion and the task's columns.

{prompt} {completion} {answer}      each replaced once, so that a completion cannot name others
{{answer}}                          stands for {answer} itself
"""

import json
import re
from collections.abc import Sequence
from typing import Any

from millrace.core.errors import ConfigError
from millrace.core.records import Episode, Message, Prompt, Task

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
