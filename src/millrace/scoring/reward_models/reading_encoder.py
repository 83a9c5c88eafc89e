"""Encodes readings with the reward model's own tokenizer, and finds the end of each step.

Runs in the reward model's process.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from millrace.cluster.messages import StepReading
from millrace.core.errors import ScoreError
from millrace.core.records import Message, Prompt
from millrace.scoring.reward_models.process import Template


class ReadingEncoder:
    def __init__(
        self, tokenizer: Any, *, template: Template, is_whole: bool, separator: str | None
    ) -> None:
        """`tokenizer` may be None if only ids are read. `separator` follows each step."""
        self._tokenizer = tokenizer
        self._template = template
        self._is_whole = is_whole
        self._separator = self._encode(separator) if separator else []

    def encode(self, reading: StepReading) -> tuple[np.ndarray, list[int]]:
        """Return tokens [L] int64, and the last token of each step."""
        if reading.tokens is not None:
            bounds = np.array(reading.ends[:-1], np.int64) + 1
            pieces = [
                part.tolist() for part in np.split(reading.tokens[: reading.ends[-1] + 1], bounds)
            ]
            return self._join([], pieces)
        if self._is_whole:
            ids = self._encode_prompt(reading.prompt, completion="".join(reading.pieces))
            return np.array(ids, np.int64), [len(ids) - 1]
        pieces = [self._encode(piece) for piece in reading.pieces]
        return self._join(self._encode_prompt(reading.prompt), pieces)

    def _join(self, prompt: list[int], pieces: Sequence[list[int]]) -> tuple[np.ndarray, list[int]]:
        ids, ends = list(prompt), []
        for piece in pieces:
            ids += [*piece, *self._separator]
            ends.append(len(ids) - 1)
        return np.array(ids, np.int64), ends

    def _encode_prompt(self, prompt: Prompt, *, completion: str | None = None) -> list[int]:
        """Encode the prompt, or with `completion` the whole conversation."""
        is_chat = self._template == "chat"
        if self._template == "auto":
            is_chat = not isinstance(prompt, str) and bool(self._tokenizer.chat_template)
        if not is_chat:
            return self._encode(_as_text(prompt) + (completion or ""), add_special_tokens=True)
        messages: list[Message] = [{"role": "user", "content": prompt}]
        if not isinstance(prompt, str):
            messages = list(prompt)
        if completion is not None:
            messages.append({"role": "assistant", "content": completion})
        try:
            return self._tokenizer.apply_chat_template(
                messages,
                add_generation_prompt=completion is None,
                tokenize=True,
                return_dict=False,
            )
        except Exception as error:
            # A chat template is a program that comes with the model; it may raise anything.
            raise ScoreError(
                f"The reward model's chat template refused a conversation:"
                f" {type(error).__name__}: {error}; check its roles, or set template to 'text'."
            ) from error

    def _encode(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        try:
            return self._tokenizer.encode(text, add_special_tokens=add_special_tokens)
        except Exception as error:
            # A tokenizer without an unknown token raises a bare Exception for unknown text.
            raise ScoreError(
                f"The reward model's tokenizer refused {text[:80]!r}: {error}."
            ) from error


def _as_text(prompt: Prompt) -> str:
    if isinstance(prompt, str):
        return prompt
    return "".join(f"{message.get('content') or ''}\n" for message in prompt)
