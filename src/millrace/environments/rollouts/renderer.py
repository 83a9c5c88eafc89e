"""Renders prompts to tokens, and tokens to text, with a model's tokenizer and chat template.

An episode has several models: the policy, and the frozen models of environment.models. Promise:
each is rendered with its own tokenizer, chat template and tool-call format, and its settings are
checked before any engine starts. Used on the controller's loop and that of the environments;
torch-free. P = prompt tokens.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from millrace.config import RoleModelConfig
from millrace.core.errors import ConfigError, TaskError
from millrace.core.files import check_file_name
from millrace.core.records import Message, Prompt, Task
from millrace.environments.replay.schema import ModelRow
from millrace.environments.tools.calls import FORMATS, ToolFormat, ToolFormatName, format_of
from millrace.models.chat_template import ChatTemplate
from millrace.models.directory import check_directory, context_length, load_tokenizer

_NO_TEMPLATE = (
    "its prompt is a list of messages, but the model's tokenizer has no chat template; write the"
    " prompt as text, or use a model with a chat template."
)


class Renderer:
    def __init__(
        self, tokenizer: Any, *, template_settings: Mapping[str, Any] | None = None
    ) -> None:
        """`tokenizer`: any Hugging Face tokenizer. `template_settings`: further arguments of the
        chat template."""
        self._tokenizer = tokenizer
        self._template = ChatTemplate(tokenizer)
        self.template_settings = dict(template_settings or {})

    @property
    def chat_template(self) -> str:
        """The source of the chat template, "" if there is none."""
        template = self._tokenizer.chat_template
        return template if isinstance(template, str) else str(template or "")

    @property
    def special_ids(self) -> frozenset[int]:
        """Tokens that never result from encoding plain text."""
        return self._template.special_ids

    def check(self, tasks: Sequence[Task]) -> None:
        """Raise ConfigError if a task has messages and the tokenizer has no chat template."""
        if self._tokenizer.chat_template:
            return
        for index, task in enumerate(tasks):
            if not isinstance(task.prompt, str):
                raise ConfigError(f"Task {index}: {_NO_TEMPLATE}")

    def render(self, prompt: Prompt) -> np.ndarray:  # [P] int32
        """Encode text with the tokenizer's special tokens, or messages with the chat template."""
        if isinstance(prompt, str):
            tokens = self.encode(prompt, add_special_tokens=True)
        else:
            tokens = self.encode(self.chat_text(prompt))
        if not len(tokens):
            raise TaskError(f"Prompt {prompt!r} has no tokens; give the task a non-empty prompt.")
        return tokens

    def encode(self, text: str, *, add_special_tokens: bool = False) -> np.ndarray:  # [P] int32
        """Encode a text, which by default contains all its special tokens."""
        try:
            ids = self._template.encode(text, add_special_tokens=add_special_tokens)
        except Exception as error:
            # Tokenizers without an unknown token raise a bare Exception for unknown characters.
            raise TaskError(
                f"The tokenizer refused the prompt {text[:80]!r}: {error}; change the prompt."
            ) from error
        return np.asarray(ids, np.int32)

    def decode(self, tokens: np.ndarray) -> str:
        """Decode tokens, with special tokens as text."""
        return self._tokenizer.decode(
            tokens.tolist(), skip_special_tokens=False, clean_up_tokenization_spaces=False
        )

    def chat_text(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] = (),  # schemas
        add_generation_prompt: bool = True,
        **settings: Any,
    ) -> str:
        """Render messages to a text for encode(). `settings`: further template settings."""
        if not self._tokenizer.chat_template:
            raise TaskError(f"Messages {list(messages)!r:.200}: {_NO_TEMPLATE}")
        try:
            return self._template.text(
                messages,
                tools=tools,
                add_generation_prompt=add_generation_prompt,
                **{**self.template_settings, **settings},
            )
        except Exception as error:
            # The template is a program of the model's authors; it can raise anything.
            raise TaskError(
                f"The chat template refused the messages {list(messages)!r:.200}:"
                f" {type(error).__name__}: {error}; check their roles and order."
            ) from error


@dataclass(frozen=True, slots=True, eq=False)
class RoleModel:
    row: ModelRow
    renderer: Renderer

    @property
    def tool_format(self) -> ToolFormat:
        return FORMATS[self.row.tool_format]


def role_model(
    renderer: Renderer, *, path: str = "", max_context: int, tool_format: ToolFormatName = "auto"
) -> RoleModel:
    row = ModelRow(
        path=path,
        max_context=max_context,
        tool_format=format_of(tool_format, template=renderer.chat_template).name,
        template=renderer.template_settings,
    )
    return RoleModel(row, renderer)


def load_role_model(name: str, settings: RoleModelConfig) -> RoleModel:
    """Load tokenizer and configuration, without weights; raise ConfigError if one is wrong."""
    section, path = f"environment.models.{name}", settings.path
    trust_remote_code = settings.trust_remote_code
    check_file_name(name, of="One of environment.models")
    check_directory(path, setting=f"{section}.path")
    tokenizer = load_tokenizer(path, trust_remote_code=trust_remote_code)
    max_context = context_length(
        path,
        wanted=settings.engine.max_context,
        setting=f"{section}.max_context",
        trust_remote_code=trust_remote_code,
    )
    renderer = Renderer(tokenizer, template_settings=settings.template)
    return role_model(renderer, path=path, max_context=max_context)
