"""The teacher process: `python -m millrace.scoring.teachers.worker`.

The main thread scores: the requests that have arrived share one forward pass, up to a budget of
tokens. A self-teacher also receives the policy's versions: a staging thread fetches them, keeps
those that its history needs and prepares the due one, which the main thread copies into the model
between two passes. The staging thread also saves the weights to a file, for a restart.

Promise: every call is answered once. A request is scored in one pass, so by one version, which its
reply names. Scoring does not wait for new weights.
"""

import sys
import time
from collections import deque
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor
from transformers import PreTrainedModel

from millrace.cluster.link import Link, WorkerCall, run_module, unexpected
from millrace.cluster.messages import ScoreTokens, StartTeacher, Swapped, SwapWeights, TokensScored
from millrace.config import RunConfig, load_config
from millrace.core.errors import ConfigError, RunFailed, WeightError
from millrace.core.files import reason
from millrace.core.records import ScoreRequest, TokenLogprobs, WeightUpdate
from millrace.core.spans import Timeline
from millrace.inference.embedded.adapters import AdapterMerger
from millrace.inference.embedded.live_weights import LiveWeights, PreparedWeights
from millrace.inference.embedded.scoring import ScoringEngine, num_rows
from millrace.inference.model_worker import PROGRESS_S, STAGING_POLL_S, ModelWorker
from millrace.models.attention.packed import PACKED
from millrace.models.devices import resolve_device, resolve_dtype, use_threads
from millrace.models.directory import text_config
from millrace.models.loading import load_model, read_weights, write_weights
from millrace.models.lora.factors import adapter_of
from millrace.models.lora.folders import read_checkpoint
from millrace.models.lora.quantized import round_base
from millrace.models.routing import policy_tensors
from millrace.scoring.teachers.process import LogprobModelSettings
from millrace.weights.transport import make_receiver

SAVE_EVERY_S = 60.0  # writing a copy of all weights is expensive


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class VersionedTensors:
    version: int  # the newest version in it
    tensors: Mapping[str, Tensor]


class AveragedWeights:
    def __init__(
        self, start: Mapping[str, Tensor] | None, *, decay: float, every: int, version: int
    ) -> None:
        """Without `start`, the average starts with the first version that arrives."""
        self._decay = decay
        self._every = every
        self._version = self._refreshed_at = version  # the newest version in the average
        self._average = None if start is None else _copies(start, dtype=torch.float32)

    def take(self, version: int, tensors: Mapping[str, Tensor]) -> VersionedTensors | None:
        """Add a newer version. Returns the weights to serve from now on, or None to keep them."""
        if self._average is None:
            self._average = _copies(tensors, dtype=torch.float32)
        else:
            share = 1 - self._decay ** (version - self._version)
            for name, average in self._average.items():
                average.lerp_(tensors[name].to(average.device, torch.float32), share)
        self._version = version
        if not _is_due(version, since=self._refreshed_at, every=self._every):
            return None
        self._refreshed_at = version
        return VersionedTensors(version=version, tensors=self._average)


class LaggedWeights:
    def __init__(self, *, lag: int, every: int, version: int) -> None:
        self._lag = lag
        self._every = every
        self._served = self._refreshed_at = version
        self.kept: list[VersionedTensors] = []  # ascending; all but the first are too young

    def take(self, version: int, tensors: Mapping[str, Tensor]) -> VersionedTensors | None:
        """Take a version; returns the newest one that is old enough, if it is a new one."""
        copies = _copies(tensors, dtype=None, device=torch.device("cpu"))
        self.kept.append(VersionedTensors(version=version, tensors=copies))
        old_enough = [kept for kept in self.kept if kept.version <= version - self._lag]
        if not old_enough:
            return None
        newest = old_enough[-1]
        self.kept = [kept for kept in self.kept if kept.version >= newest.version]
        is_due = _is_due(version, since=self._refreshed_at, every=self._every)
        if not is_due or newest.version <= self._served:
            return None
        self._served, self._refreshed_at = newest.version, version
        return newest


def _copies(
    tensors: Mapping[str, Tensor], *, dtype: torch.dtype | None, device: torch.device | None = None
) -> dict[str, Tensor]:
    """Copy tensors whose memory the receiver will reuse."""
    return {
        name: tensor.detach().to(device or tensor.device, dtype or tensor.dtype, copy=True)
        for name, tensor in tensors.items()
    }


def _is_due(version: int, *, since: int, every: int) -> bool:
    """True if a multiple of `every` was reached since then, even if that version was skipped."""
    return version // every > since // every


class SelfTeacherWeights:
    """Receives the policy's versions, applies them, and saves them. stage() and save() run in the
    staging thread, everything else in the main thread.

    A teacher is a moving average of the versions, or lags some versions behind. Some versions may
    be skipped on their way here. An average then gives the next version the weight of all it
    replaces; a lag serves the newest version that is old enough. In a LoRA run the adapter's
    tensors are kept or averaged. A restarted process continues from the saved file instead of the
    run's starting weights.

    Promise: the served tensors are complete, belong to one version, and stay unchanged until the
    next stage(). An average is one float32 copy of the weights on the teacher's device. A lag of k
    is at most k + 1 copies in host memory, in the dtype they arrive in.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        history: Mapping[str, Any],
        config: RunConfig,
        *,
        version: int,
        adapter: Path | None,
        saved_path: Path,
    ) -> None:
        """`model` holds `version` of the policy, without its `adapter`. If the file at `saved_path`
        exists, its weights are newer and replace both."""
        lora = config.lora
        merger = None if lora is None else AdapterMerger(model, adapter_of(model, lora))
        self._live = LiveWeights(model, version=version, merger=merger, bank=None)
        start: Mapping[str, Tensor] | None = policy_tensors(model)
        if saved_path.exists():
            version, tensors = read_weights(saved_path)
            start = {name: tensor.to(model.device) for name, tensor in tensors.items()}
        elif lora is not None:
            start = None if adapter is None else read_checkpoint(adapter)
        if start is not None and (adapter is not None or version != self._live.version):
            with torch.no_grad():
                self._live.commit(self._live.prepare(start, version=version))
        every, decay = history.get("every", 1), history.get("ema")
        if decay is not None:
            self._history = AveragedWeights(start, decay=decay, every=every, version=version)
        else:
            self._history = LaggedWeights(lag=history["lag"], every=every, version=version)
        self._receiver = make_receiver(
            config.weights.transport,
            expected=self._live.shapes,
            dtype=resolve_dtype(config.transfer_dtype, model.device),
            device=model.device,
            payload=config.weights.payload,
            timeout_s=config.supervision.transfer_timeout_s,
            role=saved_path.stem,  # its scorer's name: it shares its versions with no other process
        )
        self._saved_path = saved_path
        self._unsaved: VersionedTensors | None = None
        self._saved_s = -SAVE_EVERY_S  # monotonic

    @property
    def version(self) -> int | None:
        return self._live.version

    def stage(self, update: WeightUpdate) -> tuple[PreparedWeights | None, float]:
        """Receive a version. Returns the weights that become visible, or None to keep those in use,
        and the milliseconds it took. The caller commits or drops them before the next call."""
        started_s = time.perf_counter()
        due = self._history.take(update.version, self._receiver.stage(update))
        prepared = None
        if due is not None:
            self._unsaved = due
            prepared = self._live.prepare(due.tensors, version=due.version)
        return prepared, (time.perf_counter() - started_s) * 1000

    @torch.no_grad()
    def commit(self, prepared: PreparedWeights) -> None:
        self._live.commit(prepared)

    def save(self) -> None:
        """Write the latest weights, at most every SAVE_EVERY_S. Runs before the next stage(), so
        the tensors do not change."""
        if self._unsaved is None or time.monotonic() - self._saved_s < SAVE_EVERY_S:
            return
        try:
            write_weights(self._saved_path, self._unsaved.tensors, version=self._unsaved.version)
        except (OSError, SafetensorError) as error:
            # This is not fatal: a restarted teacher would only start from older weights.
            message = f"{self._saved_path} cannot be written: {reason(error)}."
            print(message, file=sys.stderr, flush=True)
        self._unsaved, self._saved_s = None, time.monotonic()

    def close(self) -> None:
        self._receiver.close()


@dataclass(slots=True, eq=False)
class _PendingCall:
    call: WorkerCall
    requests: list[ScoreRequest]
    scored: list[TokenLogprobs] = field(default_factory=list[TokenLogprobs])


class TeacherWorker(ModelWorker):
    def __init__(self, message: StartTeacher, link: Link, timeline: Timeline) -> None:
        super().__init__(link, timeline=timeline)
        config, settings = load_config(message.config), LogprobModelSettings(**message.settings)
        use_threads(settings.threads)
        device = resolve_device(message.device)
        path = message.model_path
        if message.history is not None and Path(message.saved_path).exists():
            path = config.model.path  # saved weights replace its own; a checkpoint may be gone
        try:
            model = load_model(
                path,
                dtype=resolve_dtype(settings.dtype, device),
                device=device,
                attention=PACKED,
                trust_remote_code=config.model.trust_remote_code,
            )
        except torch.OutOfMemoryError:
            raise ConfigError(
                f"The weights of {path!r} do not fit on {device}; set the scorer's"
                " dtype to bfloat16, or use another device."
            ) from None
        if message.history is not None and config.in_nf4:
            round_base(model)  # versions are adapters of these values
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
                message.history,
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
        if self._staged is not None:
            self._staged.cancel()
        self._stager.shutdown(wait=True)  # after a save, which a new process needs
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
    run_module(StartTeacher, TeacherWorker)
