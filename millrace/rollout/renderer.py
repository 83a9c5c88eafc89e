"""Prompts -> tokens, and sampled tokens -> Rollouts.

Promise: never retokenises. A prompt is encoded once; after that only ids are joined, so that the
trainer sees exactly what the engine saw and sampled. Used on the controller's loop; torch-free.

P = prompt tokens, N = sampled tokens, L = P + N.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from millrace.core.errors import ConfigError, TaskError
from millrace.core.records import Completion, Kept, Prompt, Rollout, Sampling, Task


class Renderer:
    """Knows the model's tokenizer and chat template (any Hugging Face tokenizer object)."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

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
            ids = self._chat_ids(prompt)
        if not ids:
            raise TaskError(f"Prompt {prompt!r} has no tokens; give the task a non-empty prompt.")
        return np.asarray(ids, dtype=np.int32)

    def _text_ids(self, text: str) -> list[int]:
        try:
            return self._tokenizer.encode(text)
        except Exception as error:
            # Tokenizers without an unknown token raise a bare Exception at what they do not know.
            raise TaskError(f"The tokenizer refused the prompt {text[:80]!r}: {error}.") from error

    def _chat_ids(self, messages: list[dict[str, Any]]) -> list[int]:
        if not self._tokenizer.chat_template:
            raise TaskError(f"Messages {_shown(messages)}: {_NO_TEMPLATE}")
        try:
            return self._tokenizer.apply_chat_template(
                messages, add_generation_prompt=True, tokenize=True, return_dict=False
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
        )


def _after_prompt(kept: Kept, num_prompt: int) -> Kept:
    """N rows -> L rows: an empty row per prompt token comes first; the ids stay where they are."""
    empty = np.zeros(num_prompt, dtype=np.int64)
    return Kept(ids=kept.ids, offsets=np.concatenate([empty, kept.offsets]))


def _shown(messages: list[dict[str, Any]]) -> str:
    text = repr(messages)
    return text if len(text) <= 200 else f"{text[:197]}..."


_NO_TEMPLATE = (
    "its prompt is a list of messages, but the model's tokenizer has no chat template; write the"
    " prompt as text, or use a model with a chat template."
)
