"""The teacher process: `python -m millrace.scoring.teachers.worker`.

The main thread scores: the requests that have arrived share one forward pass, up to a budget of
tokens. A self-teacher also receives the policy's versions: a staging thread fetches them, keeps
those that its history needs and prepares the due one, which the main thread copies into the model
between two passes. The staging thread also saves the weights to a file, for a restart.

Promise: every call is answered once. A request is scored in one pass, so by one version, which its
reply names. Scoring does not wait for new weights.
"""

import time
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import torch

from millrace.cluster.link import Link, WorkerCall, run_worker, serve, unexpected
from millrace.cluster.messages import ScoreTokens, StartTeacher, Swapped, SwapWeights, TokensScored
from millrace.config import load_config
from millrace.core.errors import ConfigError, RunFailed, WeightError
from millrace.core.records import ScoreRequest, TokenLogprobs
from millrace.core.spans import Timeline
from millrace.inference.embedded.live_weights import PreparedWeights
from millrace.inference.embedded.scoring import ScoringEngine, num_rows
from millrace.inference.model_worker import PROGRESS_S, STAGING_POLL_S, ModelWorker
from millrace.models.attention.self_test import PACKED
from millrace.models.directory import text_config
from millrace.models.loading import load_model, resolve_device, resolve_dtype
from millrace.scoring.teachers.process import LogprobModelSettings
from millrace.scoring.teachers.self_teacher_weights import HistorySettings, SelfTeacherWeights


def main(link: Link, name: str) -> None:
    serve(link, name, message=StartTeacher, start=TeacherWorker)


@dataclass(slots=True, eq=False)
class _PendingCall:
    call: WorkerCall
    requests: list[ScoreRequest]
    scored: list[TokenLogprobs] = field(default_factory=list[TokenLogprobs])


class TeacherWorker(ModelWorker):
    def __init__(self, message: StartTeacher, link: Link, timeline: Timeline) -> None:
        super().__init__(link, timeline=timeline)
        config, settings = load_config(message.config), LogprobModelSettings(**message.settings)
        torch.set_num_threads(settings.threads)
        device = resolve_device(message.device)
        try:
            model = load_model(
                message.model_path,
                dtype=resolve_dtype(settings.dtype, device),
                device=device,
                attention=PACKED,
                trust_remote_code=config.model.trust_remote_code,
            )
        except torch.OutOfMemoryError:
            raise ConfigError(
                f"The weights of {message.model_path!r} do not fit on {device}; set the scorer's"
                " dtype to bfloat16, or use another device."
            ) from None
        policy = text_config(config.model.path, trust_remote_code=config.model.trust_remote_code)
        num_known = policy.vocab_size if message.num_known is None else message.num_known
        self._engine = ScoringEngine(
            model, logprob_chunk=settings.logprob_chunk, num_known=num_known
        )
        self._pass_tokens = settings.pass_tokens
        self._weights: SelfTeacherWeights | None = None  # None = they never change
        if message.history is not None:
            self._weights = SelfTeacherWeights(
                model,
                HistorySettings(**message.history),
                config,
                version=message.version,
                adapter=None if message.adapter_path is None else Path(message.adapter_path),
                saved_path=Path(message.saved_path),
            )
        self._pending: deque[_PendingCall] = deque()  # in the order of their arrival
        self._swaps: deque[WorkerCall] = deque()  # the first is being staged
        self._staged: Future[tuple[PreparedWeights | None, float]] | None = None
        self._stager = ThreadPoolExecutor(max_workers=1, thread_name_prefix="stage")
        self._saving: Future[None] | None = None
        self._counters = {"scored_tokens": 0.0, "swaps": 0.0}

    def _wait_s(self) -> float:
        if self._pending:
            return 0.0
        return PROGRESS_S if self._staged is None else STAGING_POLL_S

    def _handle(self, call: WorkerCall) -> None:
        match call.message:
            case ScoreTokens(requests=requests):
                self._pending.append(_PendingCall(call, requests))
            case SwapWeights() if self._weights is not None:
                self._swaps.append(call)
                self._stage_next()
            case _:
                call.fail(unexpected(call))

    def _compute(self) -> None:
        self._commit_weights()
        if self._pending:
            self._timeline.enter("score", busy=True)
            self._score()

    def _close(self) -> None:
        self._stager.shutdown(wait=True, cancel_futures=True)
        if self._weights is not None:
            self._weights.close()

    def _stage_next(self) -> None:
        """Stage every update, one at a time: each becomes part of the history."""
        if self._swaps and self._staged is None:
            swap = self._swaps[0].message
            assert self._weights is not None
            assert isinstance(swap, SwapWeights)
            self._staged = self._stager.submit(self._weights.stage, swap.update)

    def _commit_weights(self) -> None:
        """Make staged weights visible; called between two passes."""
        if self._staged is None or not self._staged.done():
            return
        assert self._weights is not None
        if self._saving is not None:
            self._saving.result()  # it is done, because one thread does both
        call, outcome = self._swaps.popleft(), self._staged
        self._staged = None
        started_s = time.perf_counter()
        self._timeline.enter("swap", busy=True)
        try:
            prepared, stage_ms = outcome.result()
            if prepared is not None:
                self._weights.commit(prepared)
                self._counters["swaps"] += 1
                self._saving = self._stager.submit(self._weights.save)
        except WeightError as error:
            call.fail(error)
        else:
            assert self._weights.version is not None
            gap_ms = (time.perf_counter() - started_s) * 1000
            call.reply(Swapped(version=self._weights.version, stage_ms=stage_ms, gap_ms=gap_ms))
        self._stage_next()

    def _score(self) -> None:
        """Run one forward pass over the requests that wait longest; a request is never split."""
        taken = self._next_pass()
        groups = [requests for _, requests in taken]
        num_tokens = sum(num_rows(group) for group in groups)
        version = None if self._weights is None else self._weights.version
        try:
            scored = self._engine.score(groups, version=version)
        except torch.OutOfMemoryError:
            error = RunFailed(
                f"A forward pass of {num_tokens} tokens does not fit into the memory of the"
                f" teacher; lower the scorer's pass_tokens (now {self._pass_tokens})."
            )
            for pending, _ in taken:
                self._pending.remove(pending)
                pending.call.fail(error)
            return
        self._counters["scored_tokens"] += num_tokens
        for (pending, _), logprobs in zip(taken, scored, strict=True):
            pending.scored += logprobs
            if len(pending.scored) == len(pending.requests):
                self._pending.remove(pending)
                pending.call.reply(TokensScored(logprobs=pending.scored))

    def _next_pass(self) -> list[tuple[_PendingCall, list[ScoreRequest]]]:
        taken: list[tuple[_PendingCall, list[ScoreRequest]]] = []
        room = self._pass_tokens
        for pending in self._pending:
            group: list[ScoreRequest] = []
            for request in pending.requests[len(pending.scored) :]:
                if num_rows([*group, request]) > room and (group or taken):
                    break
                group.append(request)
            if not group:
                break
            taken.append((pending, group))
            room -= num_rows(group)
            if len(pending.scored) + len(group) < len(pending.requests):
                break
        return taken


if __name__ == "__main__":
    run_worker(main)
