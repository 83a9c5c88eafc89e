"""The embedded engine: continuous batching over a transformers model.

Promise: weights change only in commit(), which runs between two steps, so no forward pass sees two
versions. An engine whose commit failed half-way computes nothing until it holds a complete version.
Every sampled token comes with its logprob, its version and, where they apply, its kept ids and its
expert routes.

Synchronous. One thread calls all methods except prepare(), which a staging thread may call.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from millrace.core.errors import RunFailed, TaskError
from millrace.core.records import (
    Completion,
    CompletionChunk,
    Finish,
    Request,
    Sampling,
    ScoreRequest,
    TokenLogprobs,
)
from millrace.inference.backend import EngineStats, FinishedRequest
from millrace.inference.embedded.decode.loop import DecodeLoop
from millrace.inference.embedded.decode.sampling import sample_batch
from millrace.inference.embedded.decode.state import NO_TOKEN
from millrace.inference.embedded.live_weights import LiveWeights, PreparedWeights
from millrace.inference.embedded.lora.bank import AdapterMerger
from millrace.inference.embedded.parts import EngineSizes, make_parts
from millrace.inference.embedded.sampler import sample
from millrace.inference.embedded.scheduling.batch_slots import guided
from millrace.inference.embedded.scheduling.outputs import ChunkStreams, OutputProcessor
from millrace.inference.embedded.scheduling.sequence import (
    BatchPlan,
    adapter_slot,
    check_request,
    sequences_of,
)
from millrace.inference.embedded.scheduling.stopping import StopChecker, StopRules
from millrace.inference.embedded.scoring import ScoringEngine, num_rows
from millrace.models.grammars import GrammarCompiler
from millrace.models.logprobs import final_logits
from millrace.models.lora.factors import Adapter
from millrace.models.routing import Routing


class EmbeddedEngine:
    """An EngineCore over a transformers model. See EngineCore for who calls what."""

    def __init__(
        self,
        model: PreTrainedModel,  # loaded with PAGED_ATTENTION
        tokenizer: PreTrainedTokenizerBase,
        *,
        sizes: EngineSizes,
        version: int,  # of the weights that the model holds
        eos_ids: Sequence[int],
        merger: AdapterMerger | None = None,
        adapters: Mapping[str | None, Adapter] | None = None,
        routing: Routing | None = None,
    ) -> None:
        """Updates bring adapters if there is a `merger`, or an adapter under the name None.
        `adapters`: applied without merging, by their name in requests. `routing`: of this model, if
        routes are recorded."""
        self._max_context = sizes.usable_context
        self._model = model.requires_grad_(False)
        self._vocab_size = model.config.get_text_config().vocab_size
        self._kv = sizes.kv
        parts = make_parts(
            model, sizes, version=version, adapters=adapters, routing=routing, eos_ids=eos_ids
        )
        self._pool, self._slots, self._scheduler = parts.pool, parts.slots, parts.scheduler
        self._bank, self._runner, self._decode_loop = parts.bank, parts.runner, parts.decode_loop
        self._routes = parts.routes
        self._scorer = ScoringEngine(model)
        self._weights = LiveWeights(model, version=version, merger=merger, bank=self._bank)
        self._needs_single_step = False  # the decode loop had no room for some kept ids
        self._has_new = False  # requests arrived since the last launch of the decode loop
        self._grammars = GrammarCompiler(tokenizer, vocab_size=self._vocab_size, eos_ids=eos_ids)
        rules = StopRules(tokenizer, eos_ids=eos_ids)
        self._stop_checker = StopChecker(self._slots, rules)
        self._outputs = OutputProcessor(rules, block_tokens=sizes.block_tokens)
        self._streams = ChunkStreams(self._slots)
        self._num_arrived = 0
        self._num_generated = 0
        self._num_prefilled = 0

    @property
    def version(self) -> int | None:
        """The served version; None after a commit that failed half-way."""
        return self._weights.version

    @property
    def has_work(self) -> bool:
        """True if step() would make progress."""
        can_compute = self.version is not None and self._scheduler.has_work
        return can_compute or self._outputs.has_pending

    @property
    def has_held(self) -> bool:
        """True if sequences wait only because hold_new() was called."""
        return self._scheduler.num_held_back > 0

    @property
    def has_room(self) -> bool:
        """True if another sequence would get a slot now."""
        return self._slots.num_free > 0

    def stats(self) -> EngineStats:
        return EngineStats(
            running=int(self._slots.occupied.sum()),
            waiting=self._scheduler.num_waiting + self._scheduler.num_held_back,
            free_blocks=self._pool.num_free,
            generated_tokens=self._num_generated,
            prefill_tokens=self._num_prefilled,
            cached_tokens=self._scheduler.num_cached_tokens,
            preemptions=self._scheduler.num_preemptions,
        )

    def parameter_shapes(self) -> dict[str, tuple[int, ...]]:
        """Names and shapes of the tensors that an update must bring."""
        return self._weights.shapes

    def add_request(
        self, request: Request, *, stream: bool = False, per_completion: bool = False
    ) -> None:
        """See EngineCore.add_request()."""
        if request.id in self._outputs:
            raise TaskError(f"Request {request.id!r} is already here; give each its own id.")
        check_request(request, max_context=self._max_context, vocab_size=self._vocab_size)
        slot = adapter_slot(request, self._bank)
        sequences = sequences_of(
            request,
            first_arrival=self._num_arrived,
            adapter_slot=slot,
            guide=self._grammars.matcher(request.sampling.grammar),
            records_routes=self._routes is not None,
        )
        self._num_arrived += request.n
        self._outputs.add(request, per_completion=per_completion)
        if stream:
            self._streams.open(sequences)
        if request.partial is not None:
            finish = self._stop_checker.finish_on_arrival(sequences[0])
            if finish is not None:
                self._outputs.end(sequences[0], finish=finish)
                return
        self._scheduler.add(sequences)
        self._has_new = True

    @torch.inference_mode()
    def warm_up(self) -> None:
        """Capture and compile what would delay the first tokens."""
        if self._decode_loop is None:
            return
        self._decode_loop.warm_up()
        # Two lengths, so that prefill is compiled for any length. Two tokens, so that the prefix
        # cache does not serve the second prompt.
        for token, length in enumerate((24, 16)):
            prompt = np.full(min(length, self._max_context - 1), token, dtype=np.int32)
            sampling = Sampling(max_new_tokens=1)
            self.add_request(Request(id="warm-up", prompt=prompt, sampling=sampling))
            while self.has_work:
                self.step()
        self._num_generated = self._num_prefilled = 0

    @torch.inference_mode()
    def step(self, *, should_stop: Callable[[], bool] = lambda: False) -> list[FinishedRequest]:
        """Run one forward pass, or one launch of the decode loop; returns finished requests.

        Sequences that the decode loop finishes are returned by the next step, which builds their
        records while the device works. The loop ends early once should_stop() returns True.
        """
        if self.version is not None:
            if self._decode_loop is None or self._needs_single_step or self._slots.any_guided:
                self._needs_single_step = False
                self._forward(self._scheduler.plan())
            else:
                self._forward(self._scheduler.plan_prefill())
                if not self._slots.any_guided:  # the host masks the logits of each of their tokens
                    self._decode(self._decode_loop, should_stop=should_stop)
        if not self._scheduler.has_work:
            self._record_ended()
        return self._outputs.take()

    @torch.inference_mode()
    def score(self, requests: Sequence[ScoreRequest]) -> list[TokenLogprobs]:
        """Score given tokens with the served version, in one forward pass between two steps."""
        if self._bank is not None:
            rows = torch.full((num_rows(requests),), self._bank.slot_of(None))
            self._bank.choose(rows.to(self._model.device))
        if self._routes is not None:
            self._routes.discard_next(num_rows(requests))
        (logprobs,) = self._scorer.score([requests], version=self.version)
        return logprobs

    def take_chunks(self) -> dict[str, list[CompletionChunk]]:
        """See EngineCore.take_chunks()."""
        return self._streams.take()

    def take_coalesced_chunks(self) -> dict[str, list[CompletionChunk]]:
        """See EngineCore.take_coalesced_chunks()."""
        return self._streams.take_coalesced()

    def take_completions(self) -> dict[str, dict[int, Completion]]:
        """See EngineCore.take_completions()."""
        return self._outputs.take_completions()

    def abort(self, ids: Iterable[str], *, finish: Finish = "abort") -> list[FinishedRequest]:
        """End these requests with the tokens they have; unknown ids are ignored."""
        aborted = []
        self._record_ended()
        for id in ids:
            for sequence in self._scheduler.remove(id):
                self._outputs.end(sequence, finish=finish)
            aborted += self._outputs.take_one(id)
        return aborted

    def interrupt(self) -> list[FinishedRequest]:
        """End all requests that have a slot, to be resumed here or elsewhere. Drop all KV."""
        running = dict.fromkeys(sequence.request.id for sequence in self._slots.running())
        interrupted = self.abort(running, finish="interrupt")
        self._scheduler.forget_kv()
        return interrupted

    def expire(self, before: int) -> list[FinishedRequest]:
        """End requests with `expires` set that hold a token older than version `before`, now and
        when they arrive later."""
        self._stop_checker.expire(before)
        self._record_ended()
        versions: dict[str, list[np.ndarray]] = {}
        for sequence in self._scheduler.sequences():
            if sequence.request.expires:
                _, _, own = self._slots.sampled_by(sequence)
                versions.setdefault(sequence.request.id, []).append(own)
        for id, known in versions.items():
            known += self._outputs.versions_of(id)
        old = [id for id, known in versions.items() if (np.concatenate(known) < before).any()]
        return self.abort(old, finish="expire")

    def preempt_all(self) -> list[FinishedRequest]:
        """Move all sequences to the wait queue, with their KV if swaps keep it; returns requests
        that are finished."""
        self._record_ended()
        if self._kv == "keep":
            self._scheduler.preempt_all()
        else:
            self._scheduler.forget_kv()
        return self._outputs.take()

    def hold_new(self) -> None:
        """Begin no sequence until seat_new(); go on with the others."""
        self._scheduler.hold_new()

    def release_new(self) -> None:
        self._scheduler.release_new()

    @torch.inference_mode()
    def prepare(self, tensors: Mapping[str, Tensor], *, version: int) -> PreparedWeights:
        """Make new weights ready for commit() while decoding continues; WeightError if they do not
        fit. The tensors are complete and stay unchanged until the commit."""
        return self._weights.prepare(tensors, version=version)

    @torch.inference_mode()
    def commit(self, prepared: PreparedWeights) -> None:
        """Replace the weights. Decoding waits for this."""
        self._weights.commit(prepared)
        if self._kv == "recompute":
            self._scheduler.forget_kv()
        self._scheduler.begin(prepared.version)

    def swap(self, tensors: Mapping[str, Tensor], *, version: int) -> None:
        """prepare() and commit() in one call, for callers without a staging thread."""
        if self._model.device.type == "cuda":
            # Work that this thread queued may still write the tensors.
            torch.cuda.current_stream(self._model.device).synchronize()
        self.commit(self.prepare(tensors, version=version))

    def _forward(self, plan: BatchPlan | None) -> None:
        if plan is None:
            return
        try:
            hidden = self._runner.forward(plan)
        except torch.OutOfMemoryError:
            # The pass changed no bookkeeping, so it is planned again with a smaller prefill.
            self._make_room(plan)
            return
        self._num_prefilled += int(plan.counts[plan.num_single :].sum())
        slots, rows = self._scheduler.complete(plan)
        if len(slots):
            self._sample(slots, hidden=hidden, rows=rows)
            self._end_sequences(slots)

    def _make_room(self, plan: BatchPlan) -> None:
        if not self._scheduler.shrink_prefill():
            raise RunFailed(
                f"A forward pass over {int(plan.counts.sum())} tokens does not fit into the memory"
                f" of {self._model.device}; lower engine.kv_bytes or engine.max_sequences."
            ) from None
        if self._model.device.type == "cuda":
            torch.cuda.empty_cache()

    def _decode(self, decode_loop: DecodeLoop, *, should_stop: Callable[[], bool]) -> None:
        plan = self._scheduler.plan_decode(max_steps=self._num_steps(decode_loop))
        if plan is None:
            return
        result = decode_loop.run(plan, should_stop=should_stop, while_running=self._record_ended)
        self._check_finite(result.logprobs[result.tokens != NO_TOKEN])
        counts = self._stop_checker.counts_until_stop(plan.slots, result)
        assert self.version is not None
        self._slots.append_steps(
            plan.slots,
            tokens=result.tokens,
            logprobs=result.logprobs,
            counts=counts,
            version=self.version,
        )
        self._num_generated += int(counts.sum())
        if result.kept is not None:
            assert result.num_kept is not None
            self._slots.keep_steps(
                plan.slots, ids=result.kept, num_kept=result.num_kept, counts=counts
            )
        self._end_sequences(plan.slots[counts > 0], later=True)
        idle = counts < len(result.tokens)
        self._needs_single_step = bool(self._slots.occupied[plan.slots[idle]].any())

    def _num_steps(self, decode_loop: DecodeLoop) -> int:
        """Fewer steps while requests arrive, fewer still while sequences wait for a slot: a slot
        that is freed within a launch stays empty until the launch ends."""
        share = 4 if self._scheduler.num_waiting else 2 if self._has_new else 1
        self._has_new = False
        return max(1, decode_loop.max_steps // share)

    def _record_ended(self) -> None:
        self._outputs.record()
        self._scheduler.settle()

    def _check_finite(self, logprobs: np.ndarray) -> None:
        if not np.isfinite(logprobs).all():
            raise RunFailed(
                f"Version {self.version} of the weights gives logits that are not finite;"
                " lower optimizer.learning_rate."
            )

    def _sample(self, slots: np.ndarray, *, hidden: Tensor, rows: np.ndarray) -> None:
        """Sample and record one token for each of `slots`, from its row of `hidden`."""
        if len(rows) != len(hidden) or (rows[1:] != rows[:-1] + 1).any():
            hidden = hidden[torch.from_numpy(rows).to(hidden.device)]
        logits = final_logits(self._model, hidden.to(self._model.dtype))
        how = self._slots.sampling_batch(slots, vocab_size=logits.shape[1], device=logits.device)
        if self._slots.is_guided[slots].any():
            drawn = sample(guided(logits, self._slots, slots), how)
        else:
            drawn = sample_batch(logits, how)
        logprobs = drawn.logprobs.cpu().numpy()
        self._check_finite(logprobs)
        assert self.version is not None
        tokens = drawn.tokens.cpu().numpy()
        self._slots.append(slots, tokens=tokens, logprobs=logprobs, version=self.version)
        self._num_generated += len(slots)
        if drawn.kept is not None:
            ids = drawn.kept.ids.to(torch.int32).cpu().numpy()
            self._slots.keep(slots, ids=ids, offsets=drawn.kept.offsets.tolist())

    def _end_sequences(self, slots: np.ndarray, *, later: bool = False) -> None:
        """End the sequences in these slots whose newest token was their last. Their slots are
        freed now; their records are built now or `later`."""
        for sequence, finish in self._stop_checker.finished_in(slots):
            self._scheduler.finish(sequence)
            self._outputs.mark_ended(sequence, finish=finish)
        if not later:
            self._record_ended()
