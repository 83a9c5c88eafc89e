"""Prompts -> tokens, and sampled tokens -> Rollouts.

Promise: never retokenises. A prompt is encoded once; after that only ids are joined, so that the
trainer sees exactly what the engine saw and sampled. Used on the controller's loop; torch-free.

P = prompt tokens, N = sampled tokens, L = P + N.
"""

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np

from millrace.core.completions import padded
from millrace.core.errors import ConfigError, TaskError
from millrace.core.records import Completion, Kept, Message, Prompt, Rollout, Sampling, Task


class Renderer:
    """Knows the model's tokenizer and chat template (any Hugging Face tokenizer object)."""

    def __init__(
        self, tokenizer: Any, *, template_settings: Mapping[str, Any] | None = None
    ) -> None:
        """`template_settings`: what the chat template is told besides the messages."""
        self._tokenizer = tokenizer
        self.template_settings = dict(template_settings or {})

    @property
    def chat_template(self) -> str:
        """Its source, "" if there is none."""
        template = self._tokenizer.chat_template
        return template if isinstance(template, str) else str(template or "")

    @cached_property
    def special_ids(self) -> frozenset[int]:
        """Tokens that stand for themselves, never for text."""
        added = self._tokenizer.added_tokens_decoder.items()
        return frozenset([*self._tokenizer.all_special_ids, *(i for i, t in added if t.special)])

    def check(self, tasks: Sequence[Task]) -> None:
        """Raise ConfigError if some task is a chat and the tokenizer has no chat template."""
        if self._tokenizer.chat_template:
            return
        for index, task in enumerate(tasks):
            if not isinstance(task.prompt, str):
                raise ConfigError(f"Task {index}: {_NO_TEMPLATE}")

    def render(self, prompt: Prompt) -> np.ndarray:  # [P] int32
        """Text with the tokenizer's own special tokens, or messages through the chat template."""
        if isinstance(prompt, str):
            ids = self._text_ids(prompt)
        else:
            ids = self.ids(self.chat_text(prompt))
        if not ids:
            raise TaskError(f"Prompt {prompt!r} has no tokens; give the task a non-empty prompt.")
        return np.asarray(ids, dtype=np.int32)

    def _text_ids(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        try:
            return self._tokenizer.encode(text, add_special_tokens=add_special_tokens)
        except Exception as error:
            # Tokenizers without an unknown token raise a bare Exception at what they do not know.
            raise TaskError(f"The tokenizer refused the prompt {text[:80]!r}: {error}.") from error

    def ids(self, text: str) -> list[int]:
        """Of text in which all special tokens are written out."""
        return self._text_ids(text, add_special_tokens=False)

    def decode(self, tokens: np.ndarray) -> str:
        """Special tokens are written out."""
        return self._tokenizer.decode(
            tokens.tolist(), skip_special_tokens=False, clean_up_tokenization_spaces=False
        )

    def chat_text(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[dict[str, Any]] | None = None,  # schemas
        answers: bool = True,  # it ends where the model is to go on
    ) -> str:
        """Messages through the chat template."""
        if not self._tokenizer.chat_template:
            raise TaskError(f"Messages {_shown(messages)}: {_NO_TEMPLATE}")
        try:
            return self._tokenizer.apply_chat_template(
                list(messages),
                tools=list(tools) if tools else None,
                add_generation_prompt=answers,
                tokenize=False,
                **self.template_settings,
            )
        except Exception as error:
            # A template is a program that comes with the model and may refuse in any way it likes.
            raise TaskError(
                f"The chat template refused the messages {_shown(messages)}:"
                f" {type(error).__name__}: {error}; check their roles and order."
            ) from error

    def rollout(
        self, prompt_tokens: np.ndarray, completion: Completion, sampling: Sampling
    ) -> Rollout:
        """The token record of a prompt and what was sampled after it."""
        num_prompt, num_sampled = len(prompt_tokens), len(completion.tokens)
        assert completion.kept is not None or not sampling.truncates, "truncated without kept ids"
        return Rollout(
            tokens=np.concatenate([prompt_tokens, completion.tokens]).astype(np.int32, copy=False),
            mask=np.repeat([False, True], [num_prompt, num_sampled]),
            engine_logprobs=np.concatenate(
                [np.zeros(num_prompt, np.float32), completion.logprobs]
            ).astype(np.float32, copy=False),
            versions=np.concatenate(
                [np.full(num_prompt, -1, np.int32), completion.versions]
            ).astype(np.int32, copy=False),
            sampling=sampling,
            kept=None if completion.kept is None else _after_prompt(completion.kept, num_prompt),
            routes=None
            if completion.routes is None
            else padded(completion.routes, num_prompt + num_sampled),
        )


def _after_prompt(kept: Kept, num_prompt: int) -> Kept:
    """N rows -> L rows: an empty row per prompt token comes first; the ids stay where they are."""
    empty = np.zeros(num_prompt, dtype=np.int64)
    return Kept(ids=kept.ids, offsets=np.concatenate([empty, kept.offsets]))


def _shown(messages: Sequence[Message]) -> str:
    text = repr(list(messages))
    return text if len(text) <= 200 else f"{text[:197]}..."


_NO_TEMPLATE = (
    "its prompt is a list of messages, but the model's tokenizer has no chat template; write the"
    " prompt as text, or use a model with a chat template."
)
