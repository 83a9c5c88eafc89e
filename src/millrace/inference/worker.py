"""The engine process: `python -m millrace.inference.worker`.

The main thread decodes (model_worker.py). A staging thread fetches, verifies and lays out new
weights meanwhile; the main thread only copies them into the model, between two passes.

Promise: every call is answered once. After a failed update the engine serves its last version.
"""

import time
from collections import deque
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from millrace.cluster import messages
from millrace.cluster.link import Link, WorkerCall, run_module, unexpected
from millrace.config import Interrupt, RunConfig, load_config
from millrace.core.errors import MillraceError, TaskError, WeightError
from millrace.core.protocols import Capability
from millrace.core.records import DEFAULT_POLICY, CompletionChunk, WeightUpdate
from millrace.core.spans import Timeline
from millrace.inference.backend import (
    EngineCore,
    EngineSpec,
    FinishedCompletions,
    HasAdapters,
    HasPolicies,
    UsesIdleTime,
    load_backend,
)
from millrace.inference.capabilities import check_request
from millrace.inference.interrupt import WeightInterrupt
from millrace.inference.model_worker import PROGRESS_S, STAGING_POLL_S, ModelWorker
from millrace.models.devices import kept_bytes, resolve_device, resolve_dtype, use_threads
from millrace.weights.backends import StagingReceiver
from millrace.weights.probe import EngineProbe
from millrace.weights.transport import make_receiver, staging_device

# Interval of the coalesced token reports. If an engine dies, its sequences resume elsewhere from
# the last report. A run that saves tokens more often than this gets reports as often.
REPORT_S, MIN_REPORT_S = 2.0, 0.05


def _start(message: messages.StartEngine, link: Link, timeline: Timeline) -> "EngineWorker":
    config = load_config(message.config)
    use_threads(config.cluster.threads)
    device = resolve_device(config.placement.engine(0))
    if device.index and not config.engine.has_servers:  # streams and kernels use the current device
        torch.cuda.set_device(device)

    def on_warm_up() -> None:
        timeline.enter("compile", busy=True)
        link.emit(messages.WorkerProgress(spans=timeline.drain(), counters={}))

    spec = EngineSpec(
        config=config.engine,
        device=config.placement.engine(0),
        devices=config.placement.engines,
        model_path=message.model_path,
        version=message.version,
        trust_remote_code=config.model.trust_remote_code,
        lora=config.lora,
        adapter_path=None if message.adapter_path is None else Path(message.adapter_path),
        policies=message.policies,
        records_routes=message.records_routes,
        sleeps=config.cluster.share_gpu == "sleep",
        trainer_bytes=kept_bytes(config),
        exact=config.is_exact,
        reproducible=config.weights.interrupt == "barrier",
        on_warm_up=on_warm_up,
    )
    engine = load_backend(config.engine).load(spec)
    return wire(engine, config, link=link, timeline=timeline, role=message.role)


def wire(
    engine: EngineCore, config: RunConfig, *, link: Link, timeline: Timeline, role: str = "engine"
) -> "EngineWorker":
    """Connect a built engine to the link and to the weight transport."""
    device = resolve_device(config.placement.engine(0))
    receiver = partial(
        make_receiver,
        config.weights.transport,
        expected=engine.parameter_shapes(),
        dtype=resolve_dtype(config.transfer_dtype, device),
        device=staging_device(config, device),
        payload=config.weights.payload,
        timeout_s=config.supervision.transfer_timeout_s,
        role=role,
    )
    return EngineWorker(
        link,
        engine=engine,
        receiver=receiver(),
        receivers={policy: receiver() for policy in config.further_adapters},
        timeline=timeline,
        interrupt=config.weights.interrupt,
        capabilities=load_backend(config.engine).capabilities,
        report_s=min(REPORT_S, max(MIN_REPORT_S, config.journal.partial_every_s or REPORT_S)),
    )


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Staging:
    """An update that is being staged, and the calls that it answers."""

    update: WeightUpdate
    staged: Future[tuple[Any, float]]  # prepared weights, and the milliseconds that staging took
    calls: list[WorkerCall]


class EngineWorker(ModelWorker):
    """Connects an engine to a link. Methods run in the main thread unless they say otherwise."""

    def __init__(
        self,
        link: Link,
        *,
        engine: EngineCore,
        receiver: StagingReceiver,
        receivers: Mapping[str, StagingReceiver] | None = None,
        timeline: Timeline,
        interrupt: Interrupt = "swap",
        capabilities: frozenset[Capability] = frozenset(Capability),
        report_s: float = REPORT_S,
    ) -> None:
        """`receivers`: of further policies. `report_s`: interval of coalesced reports, in s."""
        super().__init__(link, timeline=timeline)
        self._arrived: deque[WorkerCall] = deque()  # during a step, not yet handled
        self._engine = engine
        self._policies: HasPolicies | None = engine if isinstance(engine, HasPolicies) else None
        self._capabilities = capabilities
        self._interrupt = WeightInterrupt(interrupt, engine)
        self._receivers = {DEFAULT_POLICY: receiver, **(receivers or {})}
        self._checksums: dict[str, int] = {}  # of the newest update of each policy
        self._calls: dict[str, WorkerCall] = {}  # Generate calls by request id
        self._score_calls: deque[WorkerCall] = deque()
        self._num_scored = self._num_swaps = 0  # tokens, and versions
        self._probe = EngineProbe(engine.score, name=timeline.worker)
        self._owed_s = 0.0  # time to generate before the next tokens are scored
        self._staging: _Staging | None = None
        self._stager = ThreadPoolExecutor(max_workers=1, thread_name_prefix="stage")
        self._is_paused = self._is_asleep = False
        # Arrived while the engine was asleep, or while an update of another policy was staged.
        self._early_swaps: list[WorkerCall] = []
        self._report_s, self._coalesced_s = report_s, time.monotonic()  # of the last one

    def _compute(self) -> None:
        self._commit_weights()
        start_s = time.perf_counter()
        # Scoring takes at most half of the time while sequences are generated.
        if self._may_score and (self._owed_s <= 0 or not self._may_generate):
            self._timeline.enter("score", busy=True)
            self._score(self._score_calls.popleft())
            self._owed_s, start_s = time.perf_counter() - start_s, time.perf_counter()
        if self._may_generate:
            self._timeline.enter("drain" if self._engine.has_held else "generate", busy=True)
            self._answer(self._engine.step(should_stop=self._is_awaited))
            self._owed_s -= time.perf_counter() - start_s
        elif isinstance(self._engine, UsesIdleTime) and not (self._is_held or self._staging):
            self._engine.use_idle_time()
        if time.monotonic() - self._coalesced_s >= self._report_s:
            self._coalesced_s = time.monotonic()
            self._send_chunks(self._engine.take_chunks(coalesced=True))

    def _close(self) -> None:
        self._stager.shutdown(wait=True, cancel_futures=True)
        for receiver in self._receivers.values():
            receiver.close()
        self._engine.close()

    def _is_awaited(self) -> bool:
        """Whether a launch of the decode loop should end early: weights are staged, or a call other
        than Generate waits. Staging of new weights starts here, while the launch continues."""
        while (call := self._link.receive(0)) is not None:
            message, may_stage = call.message, not self._interrupt.needs_announcement
            if may_stage and isinstance(message, messages.SwapWeights):
                self._stage(message.update, call)
            else:
                self._arrived.append(call)
        has_urgent = any(not isinstance(call.message, messages.Generate) for call in self._arrived)
        return has_urgent or self._has_staged_weights

    @property
    def _has_staged_weights(self) -> bool:
        if self._staging is None or self._is_asleep:
            return False
        staged = self._staging.staged
        return staged.done() and (self._interrupt.may_land or staged.exception() is not None)

    def _wait_s(self) -> float:
        if self._may_generate or self._may_score or self._arrived:
            return 0.0
        return PROGRESS_S if self._staging is None else STAGING_POLL_S

    def _receive(self, timeout_s: float) -> WorkerCall | None:
        return self._arrived.popleft() if self._arrived else self._link.receive(timeout_s)

    @property
    def _may_generate(self) -> bool:
        return self._engine.has_work and not self._is_held

    @property
    def _may_score(self) -> bool:
        return bool(self._score_calls) and self._engine.version is not None and not self._is_held

    @property
    def _is_held(self) -> bool:
        """Whether generation is blocked. An idle engine is not held: if a caller expects progress
        of it, a message was lost."""
        return self._is_paused or not self._interrupt.may_generate

    def _idle_reason(self) -> str:
        if self._is_paused:
            return "paused"
        if self._engine.has_held:
            return "drained"
        if self._engine.has_work and not self._interrupt.may_generate:
            return "waiting for weights"
        return "no weights" if self._engine.version is None else "no work"

    def _handle(self, call: WorkerCall) -> None:
        match call.message:
            case messages.Generate(request=request, stream=stream):
                try:
                    check_request(request, self._capabilities)
                    self._engine.add_request(request, stream=stream)
                    self._calls[request.id] = call
                except TaskError as error:
                    call.fail(error)
            case messages.SwapWeights(update=update):
                self._stage(update, call)
            case messages.ScoreTokens():
                self._score_calls.append(call)
            case messages.AbortRequests(ids=ids):
                self._answer(self._engine.abort(ids))
                call.reply()
            case messages.LoadAdapter(name=name, folder=folder):
                try:
                    bank = self._engine.bank if isinstance(self._engine, HasAdapters) else None
                    if bank is None:
                        raise MillraceError("This engine was started without replaceable adapters.")
                    bank.load(name, Path(folder))
                    call.reply()
                except MillraceError as error:
                    call.fail(error)
            case messages.Expire(before=before, adapters=adapters):
                self._answer(self._engine.expire(before, adapters))
                call.reply()
            case messages.Pause(sleep=sleep):
                # Calls are handled between two passes, so no pass runs when this is answered.
                self._is_paused = True
                self._engine.pause()
                if sleep and not self._is_asleep:
                    self._sleep()
                # Entered before the reply, after which the trainer may start.
                self._timeline.enter("paused", busy=False)
                call.reply()
            case messages.Resume():
                self._is_paused = False
                if self._is_asleep:
                    self._wake()
                call.reply()
            case _:
                call.fail(unexpected(call))

    def _sleep(self) -> None:
        while (staging := self._staging) is not None:  # it reads live weights
            wait([staging.staged])
            self._commit_weights()
            if self._staging is staging:  # sequences have to finish first
                break
        if self._staging is None:  # else its tensors are still needed
            for receiver in self._receivers.values():
                receiver.forget()
        self._timeline.enter("sleep", busy=True)
        self._engine.sleep()
        self._is_asleep = True

    def _wake(self) -> None:
        self._timeline.enter("wake", busy=True)
        self._engine.wake()
        self._is_asleep = False
        self._stage_early()

    def _stage_early(self) -> None:
        early, self._early_swaps = self._early_swaps, []
        for call in early:
            self._handle(call)

    def _score(self, call: WorkerCall) -> None:
        assert isinstance(call.message, messages.ScoreTokens)
        requests = call.message.requests
        self._num_scored += sum(len(request.inputs) for request in requests)
        try:
            call.reply(messages.TokensScored(logprobs=self._engine.score(requests)))
        except torch.OutOfMemoryError:
            longest = max(len(request.inputs) for request in requests)
            why = f"A request to score {longest} tokens does not fit into the memory that the KV"
            call.fail(TaskError(f"{why} cache leaves; lower engine.options.kv_bytes."))

    def _answer(self, finished: list[FinishedCompletions]) -> None:
        self._send_chunks(self._engine.take_chunks())
        for ended in finished:
            if ended.is_last:
                reply = messages.GenerateDone(completions=ended.completions)
                self._calls.pop(ended.id).reply(reply)
            else:
                self._calls[ended.id].send_part(messages.Completed(completions=ended.completions))

    def _send_chunks(self, chunks: Mapping[str, list[CompletionChunk]]) -> None:
        for id, pieces in chunks.items():
            self._calls[id].send_part(messages.TokensSampled(pieces=pieces))

    def _stage(self, update: WeightUpdate, call: WorkerCall) -> None:
        """Start to stage an update. Of several of a policy only the newest is applied, and of one
        version the last: a trainer that replaces a dead one publishes its version again. Policies
        take turns: staged weights are for the next commit."""
        under_way, policies = self._staging, self._policies
        if self._is_asleep or (under_way is not None and under_way.update.policy != update.policy):
            self._early_swaps.append(call)
            return
        if under_way is not None and under_way.update.version > update.version:
            under_way.calls.append(call)
            return
        visible = self._engine.version if policies is None else policies.version_of(update.policy)
        if visible is not None and visible >= update.version:
            error = self._probe.check_start(update) if visible == update.version else None
            done = messages.Swapped(version=visible, stage_ms=0.0, gap_ms=0.0)
            call.reply(done) if error is None else call.fail(error)
            return
        superseded = [] if under_way is None else under_way.calls
        if under_way is not None:
            under_way.staged.cancel()  # if it has started, its result is dropped
        staged = self._stager.submit(self._timed_stage, update)
        self._staging = _Staging(update=update, staged=staged, calls=[*superseded, call])
        self._answer(self._interrupt.announce())

    def _timed_stage(self, update: WeightUpdate) -> tuple[Any, float]:
        """Runs in the staging thread."""
        started_s, policy, policies = time.perf_counter(), update.policy, self._policies
        is_held, prepare = self._checksums.get(policy) == update.checksum, self._engine.prepare
        if policies is not None:
            if is_held and update.transport != "collective":  # all engines receive a broadcast
                return policies.unchanged(version=update.version, policy=policy), 0.0
            prepare = partial(policies.prepare, policy=policy)
        prepared = prepare(self._receivers[policy].stage(update), version=update.version)
        return prepared, (time.perf_counter() - started_s) * 1000

    def _commit_weights(self) -> None:
        """Make staged weights visible. serve() calls this between two forward passes."""
        if not self._has_staged_weights:
            return
        staging, self._staging = self._staging, None
        assert staging is not None
        self._timeline.enter("swap", busy=True)
        self._commit(staging)
        self._stage_early()

    def _commit(self, staging: _Staging) -> None:
        self._checksums.pop(staging.update.policy, None)  # until all of it is applied
        try:
            prepared, stage_ms = staging.staged.result()
            started_s = time.perf_counter()
            self._answer(self._interrupt.land())
            self._engine.commit(prepared)
            self._probe.check_swap(staging.update)  # ends this process if the weights are wrong
        except WeightError as error:
            for call in staging.calls:
                call.fail(error)
            return
        finally:
            self._interrupt.settle()
        self._num_swaps += 1
        self._checksums[staging.update.policy] = staging.update.checksum
        times = {"stage_ms": stage_ms, "gap_ms": (time.perf_counter() - started_s) * 1000}
        for call in staging.calls:
            call.reply(messages.Swapped(version=staging.update.version, **times))

    def _progress(self) -> messages.WorkerProgress:
        stats = self._engine.stats()
        counters = {name: value for name, value in asdict(stats).items() if value is not None}
        counters["swaps"] = self._num_swaps
        work = stats.generated_tokens + stats.prefill_tokens + self._num_scored + self._num_swaps
        return messages.WorkerProgress(
            spans=self._timeline.drain(), counters=counters, work=work, waits=self._is_held
        )


if __name__ == "__main__":
    run_module(messages.StartEngine, _start)
