"""The process of a reward model: `python -m millrace.scoring.reward_models.worker`.

A forward pass holds sequences of similar length, within batch_tokens including padding, and always
the one that has waited longest. While all sequences are partial, their values are not urgent, and
they wait a moment for others to share a pass.

Promise: every call is answered once. The values of a sequence do not depend on the other sequences
of its batch.
"""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from millrace.cluster.link import Link, WorkerCall, run_module, unexpected
from millrace.cluster.messages import ReadSteps, StartRewardModel, StepReading, StepValues
from millrace.core.chat_template import ChatTemplate
from millrace.core.errors import ScoreError
from millrace.core.records import Message, Prompt
from millrace.core.spans import Timeline
from millrace.inference.model_worker import PROGRESS_S, ModelWorker
from millrace.models.classifier import ClassifierInput, SequenceKvCache, load_classifier
from millrace.models.devices import resolve_device, resolve_dtype, use_threads
from millrace.models.directory import load_tokenizer
from millrace.scoring.reward_models.reward_model import RewardModelSettings, Template

GATHER_TOKENS = 512  # of partial sequences; a larger pass is not more efficient
GATHER_S = 0.05  # longest wait of a partial sequence


class ReadingEncoder:
    """Encodes readings with the model's own tokenizer, and finds the end of each step."""

    def __init__(
        self, tokenizer: Any, *, template: Template, is_whole: bool, separator: str | None
    ) -> None:
        """`tokenizer` may be None if only ids are read. `separator` follows each step."""
        self._tokenizer = tokenizer
        self._chat = ChatTemplate(tokenizer)
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
        pieces = [self._encode_completion(piece) for piece in reading.pieces]
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
            if not isinstance(prompt, str):
                prompt = "".join(f"{message.get('content') or ''}\n" for message in prompt)
            if completion is None or not self._chat.has_controls(completion):
                return self._encode(prompt + (completion or ""), add_special_tokens=True)
            ids = self._encode(prompt, add_special_tokens=True)
            return ids + self._encode_completion(completion)
        messages: list[Message] = [{"role": "user", "content": prompt}]
        if not isinstance(prompt, str):
            messages = list(prompt)
        if completion is not None:
            messages.append({"role": "assistant", "content": completion})
        try:
            text = self._chat.text(messages, add_generation_prompt=completion is None)
            return self._chat.encode(text)
        except Exception as error:
            # A chat template is a program that comes with the model; it may raise anything.
            raise ScoreError(
                f"The reward model's chat template refused a conversation:"
                f" {type(error).__name__}: {error}; check its roles, or set template to 'text'."
            ) from error

    def _encode_completion(self, text: str) -> list[int]:
        """Control tokens are ordinary text, or left out if the tokenizer has no tokens for it."""
        try:
            return self._encode(text, split_special_tokens=True)
        except ScoreError:
            return self._encode(self._chat.strip_controls(text))

    def _encode(self, text: str, *, add_special_tokens: bool = False, **how: bool) -> list[int]:
        try:
            return self._tokenizer.encode(text, add_special_tokens=add_special_tokens, **how)
        except Exception as error:
            # A tokenizer without an unknown token raises a bare Exception for unknown text.
            raise ScoreError(
                f"The reward model's tokenizer refused {text[:80]!r}: {error}."
            ) from error


@dataclass(slots=True, eq=False)
class _StepCall:
    call: WorkerCall
    values: list[list[float]]
    num_pending: int = 0  # inputs


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _PendingInput:
    step_call: _StepCall
    index: int  # of the reading within the call
    content: ClassifierInput
    since_s: float  # monotonic time of its arrival


class RewardModelWorker(ModelWorker):
    def __init__(self, message: StartRewardModel, link: Link, timeline: Timeline) -> None:
        super().__init__(link, timeline=timeline)
        self._settings = settings = RewardModelSettings(**message.settings)
        use_threads(settings.threads)
        device = resolve_device(message.device)
        self._classifier = load_classifier(
            settings.model,
            head="token" if message.head == "token" else "sequence",
            label=settings.label,
            dtype=resolve_dtype(settings.dtype, device),
            device=device,
            trust_remote_code=settings.trust_remote_code,
        )
        tokenizer = None
        if settings.template != "ids" or message.separator is not None:
            tokenizer = load_tokenizer(settings.model, trust_remote_code=settings.trust_remote_code)
        self._encoder = ReadingEncoder(
            tokenizer,
            template=settings.template,
            is_whole=message.is_whole,
            separator=message.separator,
        )
        self._kv_cache = SequenceKvCache(max_tokens=message.kept_tokens)
        self._pending: list[_PendingInput] = []  # in the order of arrival
        self._counters = {"tokens_read": 0.0, "sequences_read": 0.0, "passes": 0.0}

    def _wait_s(self) -> float:
        if self._is_worth_a_pass():
            return 0.0
        return GATHER_S / 4 if self._pending else PROGRESS_S

    def _handle(self, call: WorkerCall) -> None:
        if not isinstance(call.message, ReadSteps):
            call.fail(unexpected(call))
            return
        readings = call.message.readings
        step_call = _StepCall(call, [[] for _ in readings])
        try:
            pending = [
                _PendingInput(
                    step_call=step_call, index=index, content=content, since_s=time.monotonic()
                )
                for index, reading in enumerate(readings)
                for content in self._inputs(*self._encoder.encode(reading), reading)
            ]
        except ScoreError as error:
            call.fail(error)
            return
        step_call.num_pending = len(pending)
        self._pending += pending
        if not pending:
            call.reply(StepValues(values=step_call.values))

    def _compute(self) -> None:
        if self._is_worth_a_pass():
            self._timeline.enter("read", busy=True)
            self._read(self._next_batch())

    def _inputs(
        self, tokens: np.ndarray, ends: list[int], reading: StepReading
    ) -> Iterator[ClassifierInput]:
        limit = self._settings.max_length
        if limit is not None and len(tokens) > limit:
            raise ScoreError(
                f"A sequence has {len(tokens)} tokens, but the reward model reads {limit}; lower"
                " sampling.max_new_tokens, or raise its max_length if the model can take more."
            )
        wanted = ends[reading.num_known :]
        if not wanted:
            return
        tokens = tokens[: wanted[-1] + 1]
        if not self._classifier.is_incremental:
            for end in wanted:
                yield ClassifierInput(tokens=tokens, ends=[end])
            return
        known = ends[reading.num_known - 1] + 1 if reading.num_known else 0
        if wanted[0] < known:  # a step without tokens has the value of the step before
            known = 0
        past = self._kv_cache.take(tokens[:known]) if known else None
        yield ClassifierInput(tokens=tokens, ends=wanted, past=past, keep=reading.is_partial)

    def _is_worth_a_pass(self) -> bool:
        if not self._pending:
            return False
        return (
            any(not one.content.keep for one in self._pending)
            or sum(one.content.num_new for one in self._pending) >= GATHER_TOKENS
            or time.monotonic() - self._pending[0].since_s >= GATHER_S
        )

    def _next_batch(self) -> list[_PendingInput]:
        """Remove the sequence that waits longest, and those nearest to it in length."""
        first = self._pending[0].content.num_new
        nearest = sorted(self._pending, key=lambda one: abs(one.content.num_new - first))
        batch: list[_PendingInput] = []
        longest = 0
        for one in nearest:
            longest = max(longest, one.content.num_new)
            if batch and longest * (len(batch) + 1) > self._settings.batch_tokens:
                break
            batch.append(one)
        taken = set(map(id, batch))
        self._pending = [one for one in self._pending if id(one) not in taken]
        return batch

    def _read(self, batch: list[_PendingInput]) -> None:
        try:
            found = self._classifier.values([one.content for one in batch])
        except torch.OutOfMemoryError:
            self._refuse(batch)
            return
        for one, (values, kv) in zip(batch, found, strict=True):
            if kv is not None:
                self._kv_cache.put(one.content.tokens, kv)
            step_call = one.step_call
            step_call.values[one.index] += values
            step_call.num_pending -= 1
            if step_call.num_pending == 0:
                step_call.call.reply(StepValues(values=step_call.values))
        self._counters["tokens_read"] += sum(one.content.num_new for one in batch)
        self._counters["sequences_read"] += len(batch)
        self._counters["passes"] += 1

    def _refuse(self, batch: Sequence[_PendingInput]) -> None:
        """Fail the calls of a batch that does not fit; the process serves the others."""
        longest = max(one.content.num_new for one in batch)
        error = ScoreError(
            f"{len(batch)} sequences of up to {longest} tokens do not fit into the memory of the"
            f" reward model; lower its batch_tokens (now {self._settings.batch_tokens}) or, if it"
            " is one sequence, sampling.max_new_tokens."
        )
        failed = {one.step_call for one in batch}
        self._pending = [one for one in self._pending if one.step_call not in failed]
        for step_call in failed:
            step_call.call.fail(error)


if __name__ == "__main__":
    run_module(StartRewardModel, RewardModelWorker)
