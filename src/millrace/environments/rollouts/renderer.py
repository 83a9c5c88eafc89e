"""Renders prompts to tokens, and tokens to text, with a model's tokenizer and chat template.

An episode has several models: the policy, and the frozen models of environment.models. Promise:
each is rendered with its own tokenizer, chat template and tool-call format, and its settings are
checked before any engine starts. Used on the controller's loop and that of the environments;
torch-free. P = prompt tokens.
"""

import json
import secrets
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from hashlib import blake2b
from itertools import accumulate
from typing import Any, Literal

import numpy as np

from millrace.config import RoleModelConfig
from millrace.core.chat_template import ChatTemplate
from millrace.core.errors import ConfigError, TaskError
from millrace.core.files import check_file_name
from millrace.core.records import Message, Prompt, Task
from millrace.environments.replay.schema import ModelRow
from millrace.environments.token_record import Exchange
from millrace.environments.tools.calls import (
    FORMATS,
    Schemas,
    ToolFormat,
    ToolFormatName,
    format_of,
)
from millrace.models.directory import check_directory, context_length, load_tokenizer

_NO_TEMPLATE = (
    "its prompt is a list of messages, but the model's tokenizer has no chat template; write the"
    " prompt as text, or use a model with a chat template."
)


class Renderer:
    def __init__(
        self, tokenizer: Any, *, template_settings: Mapping[str, Any] | None = None
    ) -> None:
        """`template_settings`: further arguments of the tokenizer's chat template."""
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


History = Literal["template", "sampled"]

RERENDERED = "rerendered"
# Placeholder that locates where the template puts a reply; no message can contain it.
_SENTINEL = f"reply{secrets.randbelow(10**24):024d}"


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class EncodedPrompt:
    """The tokens of a prompt: those of the recorded exchange that it continues, and new ones."""

    given: np.ndarray  # [G] int32; new prompt tokens
    parent: Exchange | None = None  # exchange that the prompt continues
    at: int | None = None  # tokens of the parent's branch to keep; None = all

    @property
    def start(self) -> int:
        """Number of recorded tokens before the new ones."""
        if self.parent is None:
            return 0
        return self.parent.end if self.at is None else self.at

    @property
    def tokens(self) -> np.ndarray:
        """All prompt tokens for the engine."""
        before = [] if self.parent is None else [self.parent.tokens(self.at)]
        return np.concatenate([*before, self.given])


@dataclass(eq=False)
class Conversation:
    """The prompts and replies of one agent so far, turned into prompt tokens incrementally. Used
    from one event loop.

    A prompt that begins with an earlier prompt and its reply continues from the tokens of that
    exchange: only the new part, the difference between two renderings, is tokenised. If the
    environment dropped or changed a turn, it continues from the longest known prefix, or from
    nothing, and the record branches. If the template renders earlier turns differently (some drop
    their thinking), the whole conversation becomes a separate branch, and is counted.

    Promise: if the template renders earlier turns unchanged, and the model writes tokens as the
    tokenizer would, then the tokens of a branch equal the rendering of the whole conversation. The
    end-of-turn token that the model sampled takes the place of the template's.
    """

    renderer: Renderer
    _: KW_ONLY
    history: History = "template"
    """If the template renders earlier turns differently, "template" starts a new branch, and
    "sampled" continues after the sampled tokens anyway."""
    counts: Counter[str] = field(default_factory=Counter[str])

    def __post_init__(self) -> None:
        self._chats: dict[bytes, Exchange] = {}  # by digest of all messages including the reply
        self._texts: dict[str, tuple[Exchange, int]] = {}  # with the end of the text in tokens

    def of_messages(self, messages: Sequence[Message], *, tools: Schemas = ()) -> EncodedPrompt:
        digests = list(_digests(messages, tools))
        for count in range(len(messages), 0, -1):
            exchange = self._chats.get(digests[count])
            if exchange is None:
                continue
            ids = self._continuation(messages, count, exchange=exchange, tools=tools)
            if ids is not None:
                return EncodedPrompt(given=ids, parent=exchange)
            self.counts[RERENDERED] += 1
            break
        text = self.renderer.chat_text(messages, tools=tools)
        return EncodedPrompt(given=self.renderer.encode(text))

    def of_text(self, text: str) -> EncodedPrompt:
        known = max((t for t in self._texts if text.startswith(t)), key=len, default=None)
        if known is None or known == text:
            return EncodedPrompt(given=self.renderer.render(text))
        exchange, end = self._texts[known]
        new = self.renderer.encode(text[len(known) :])
        return EncodedPrompt(given=new, parent=exchange, at=end)

    def replied_to_messages(
        self, messages: Sequence[Message], exchange: Exchange, *, tools: Schemas = ()
    ) -> None:
        """Register an exchange; the last of `messages` is its reply."""
        *_, digest = _digests(messages, tools)
        self._chats[digest] = exchange

    def replied_to_text(self, text: str, exchange: Exchange) -> None:
        """Register an exchange of complete(). Later text replaces an end-of-text token."""
        sampled = exchange.completion.tokens
        num_text = len(sampled) - _is_ended(exchange, self.renderer)
        known = text + self.renderer.decode(sampled[:num_text])
        self._texts[known] = exchange, exchange.end - len(sampled) + num_text

    def within(self, exchange: Exchange, num_sampled: int) -> tuple[EncodedPrompt, str]:
        """The prompt that ends with the first `num_sampled` tokens of an exchange, and the text of
        these tokens."""
        at = exchange.start + len(exchange.given) + num_sampled
        text = self.renderer.decode(exchange.completion.tokens[:num_sampled])
        return EncodedPrompt(given=np.empty(0, np.int32), parent=exchange, at=at), text

    def _continuation(
        self, messages: Sequence[Message], count: int, *, exchange: Exchange, tools: Schemas
    ) -> np.ndarray | None:
        """Return the tokens that follow the first `count` messages, the last of which is the reply
        of `exchange`; None if the template changes its rendering of earlier messages."""
        *before, reply = messages[:count]
        new = messages[count:]

        def text(*rows: Message, prompts: bool) -> str:
            return self.renderer.chat_text(rows, tools=tools, add_generation_prompt=prompts)

        placeholder = {"role": "assistant", "content": _SENTINEL}
        tail = text(*before, placeholder, prompts=False).rpartition(_SENTINEL)[2]
        replied = text(*before, reply, prompts=False)
        whole = text(*before, reply, *new, prompts=True)
        is_kept = replied.startswith(text(*before, prompts=True)) and whole.startswith(replied)
        if is_kept and replied.endswith(tail):
            rest = tail + whole[len(replied) :]
        elif self.history == "sampled":
            rest = text(*before, placeholder, *new, prompts=True).rpartition(_SENTINEL)[2]
        else:
            return None
        ids = self.renderer.encode(rest)
        has_end = bool(tail.strip()) and int(ids[0]) in self.renderer.special_ids
        # Keep the end-of-turn token that the model sampled, even if the template uses another.
        return ids[1:] if has_end and _is_ended(exchange, self.renderer) else ids


def _is_ended(exchange: Exchange, renderer: Renderer) -> bool:
    """True if the model ended its reply with a special token."""
    completion = exchange.completion
    is_whole = completion.finish == "stop" and len(completion.tokens) > 0
    return is_whole and int(completion.tokens[-1]) in renderer.special_ids


def _digests(messages: Sequence[Message], tools: Schemas) -> Iterator[bytes]:
    """Yield running digests: of the tools alone, then after each further message."""
    rows = [tools, *messages]
    encoded = (json.dumps(row, sort_keys=True, default=repr).encode() for row in rows)
    return accumulate(encoded, lambda digest, row: blake2b(digest + row).digest())
