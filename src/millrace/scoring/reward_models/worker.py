"""The process of a reward model: `python -m millrace.scoring.reward_models.worker`.

The main thread computes. It takes the calls that have arrived between two forward passes, and waits
for calls only when it has no sequence left. A pass holds sequences of similar length, within
batch_tokens including padding, and always the one that has waited longest. While all sequences are
partial, their values are not urgent, and they wait a moment for others to share a pass.

Promise: every call is answered once. The values of a sequence do not depend on the other sequences
of its batch.
"""

import time
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch

from millrace.cluster.link import Link, WorkerCall, run_worker, serve, unexpected
from millrace.cluster.messages import (
    ReadSteps,
    StartRewardModel,
    StepReading,
    StepValues,
    Stop,
    WorkerProgress,
)
from millrace.core.errors import ScoreError
from millrace.core.spans import Timeline
from millrace.models.classifier import Classifier, ClassifierInput, load_classifier
from millrace.models.directory import load_tokenizer
from millrace.models.incremental import SequenceKvCache
from millrace.models.loading import resolve_device, resolve_dtype
from millrace.scoring.reward_models.reading_encoder import ReadingEncoder
from millrace.scoring.reward_models.settings import ModelSettings

PROGRESS_S = 0.25
GATHER_TOKENS = 512  # of partial sequences; a larger pass is not more efficient
GATHER_S = 0.05  # longest wait of a partial sequence


@dataclass(slots=True, eq=False)
class _OpenSequence:
    """A call and the values computed so far."""

    call: WorkerCall
    values: list[list[float]]
    num_unread: int = 0


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Unread:
    """One sequence to compute for a call."""

    open: _OpenSequence
    index: int  # of the reading within the call
    passage: ClassifierInput
    since_s: float  # monotonic time of its arrival


def main(link: Link, name: str) -> None:
    serve(link, name, message=StartRewardModel, start=_start)


def _start(message: StartRewardModel, link: Link, timeline: Timeline) -> "RewardModelWorker":
    settings = ModelSettings(**message.settings)
    torch.set_num_threads(settings.threads)
    device = resolve_device(message.device)
    classifier = load_classifier(
        settings.model,
        head="token" if message.head == "token" else "sequence",
        label=settings.label,
        dtype=resolve_dtype(settings.dtype, device),
        device=device,
        trust_remote_code=settings.trust_remote_code,
    )
    needs_tokenizer = settings.template != "ids" or message.separator is not None
    texts = ReadingEncoder(
        load_tokenizer(settings.model, trust_remote_code=settings.trust_remote_code)
        if needs_tokenizer
        else None,
        template=settings.template,
        is_whole=message.is_whole,
        separator=message.separator,
    )
    return RewardModelWorker(
        link,
        classifier=classifier,
        texts=texts,
        batch_tokens=settings.batch_tokens,
        kept_tokens=message.kept_tokens,
        max_length=settings.max_length,
        timeline=timeline,
    )


class RewardModelWorker:
    """All methods run in the main thread."""

    def __init__(
        self,
        link: Link,
        *,
        classifier: Classifier,
        texts: ReadingEncoder,
        batch_tokens: int,
        kept_tokens: int,
        max_length: int | None,
        timeline: Timeline,
    ) -> None:
        self._link = link
        self._classifier = classifier
        self._texts = texts
        self._batch_tokens = batch_tokens
        self._max_length = max_length
        self._kv_cache = SequenceKvCache(max_tokens=kept_tokens)
        self._timeline = timeline
        self._unread: list[_Unread] = []  # in the order of arrival
        self._counters = {"tokens_read": 0.0, "sequences_read": 0.0, "passes": 0.0}
        self._reported_s = 0.0

    def serve(self) -> None:
        while self._take_calls():
            if self._is_worth_a_pass():
                self._timeline.enter("read", busy=True)
                self._read(self._next_batch())
            else:
                self._timeline.enter("no work", busy=False)
            self._report()
        self._report(now=True)

    def _take_calls(self) -> bool:
        """Take all calls that have arrived; False after Stop."""
        wait_s = GATHER_S / 4 if self._unread else PROGRESS_S
        call = self._link.receive(0 if self._is_worth_a_pass() else wait_s)
        while call is not None:
            match call.message:
                case ReadSteps() as message:
                    self._take(call, message)
                case Stop():
                    call.reply()
                    return False
                case _:
                    call.fail(unexpected(call))
            call = self._link.receive(0)
        return True

    def _take(self, call: WorkerCall, message: ReadSteps) -> None:
        opened = _OpenSequence(call, [[] for _ in message.readings])
        try:
            unread = [
                _Unread(open=opened, index=index, passage=passage, since_s=time.monotonic())
                for index, reading in enumerate(message.readings)
                for passage in self._passages(*self._texts.encode(reading), reading)
            ]
        except ScoreError as error:
            call.fail(error)
            return
        opened.num_unread = len(unread)
        self._unread += unread
        if not unread:
            call.reply(StepValues(values=opened.values))

    def _passages(
        self, tokens: np.ndarray, ends: list[int], reading: StepReading
    ) -> Iterator[ClassifierInput]:
        if self._max_length is not None and len(tokens) > self._max_length:
            raise ScoreError(
                f"A sequence has {len(tokens)} tokens, but the reward model reads"
                f" {self._max_length}; lower sampling.max_new_tokens, or raise its max_length if"
                " the model can take more."
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
        if not self._unread:
            return False
        return (
            any(not one.passage.keep for one in self._unread)
            or sum(one.passage.num_new for one in self._unread) >= GATHER_TOKENS
            or time.monotonic() - self._unread[0].since_s >= GATHER_S
        )

    def _next_batch(self) -> list[_Unread]:
        """The sequence that waits longest, and those nearest to it in length."""
        first = self._unread[0].passage.num_new
        order = sorted(
            range(len(self._unread)),
            key=lambda at: abs(self._unread[at].passage.num_new - first),
        )
        chosen: list[int] = []
        longest = 0
        for at in order:
            longest = max(longest, self._unread[at].passage.num_new)
            if chosen and longest * (len(chosen) + 1) > self._batch_tokens:
                break
            chosen.append(at)
        batch = [self._unread[at] for at in chosen]
        taken = set(chosen)
        self._unread = [one for at, one in enumerate(self._unread) if at not in taken]
        return batch

    def _read(self, batch: list[_Unread]) -> None:
        found = self._classifier.values([one.passage for one in batch])
        for one, (values, kv) in zip(batch, found, strict=True):
            if kv is not None:
                self._kv_cache.put(one.passage.tokens, kv)
            one.open.values[one.index] += values
            one.open.num_unread -= 1
            if one.open.num_unread == 0:
                one.open.call.reply(StepValues(values=one.open.values))
        self._counters["tokens_read"] += sum(one.passage.num_new for one in batch)
        self._counters["sequences_read"] += len(batch)
        self._counters["passes"] += 1

    def _report(self, *, now: bool = False) -> None:
        if now or time.monotonic() - self._reported_s > PROGRESS_S:
            self._reported_s = time.monotonic()
            spans = self._timeline.drain()
            self._link.emit(WorkerProgress(spans=spans, counters=dict(self._counters)))


if __name__ == "__main__":
    run_worker(main)
