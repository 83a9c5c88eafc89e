"""The embedded engine: continuous batching over a transformers model.

Promise: weights change only in commit(), which runs between two steps, so no forward pass sees two
versions. An engine whose commit failed half-way computes nothing until it holds a complete version.
Every sampled token comes with its logprob, its version and, where they apply, its kept ids and its
expert routes.
"""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from millrace.core import records
from millrace.core.errors import RunFailed
from millrace.core.records import FinishReason
from millrace.inference.backend import EngineCore, EngineStats, FinishedCompletions
from millrace.inference.embedded.adapters import AdapterMerger
from millrace.inference.embedded.decode.adjustments import adjusted_rows, top_logprobs
from millrace.inference.embedded.decode.loop import DecodeLoop
from millrace.inference.embedded.device_memory import EngineMemory
from millrace.inference.embedded.kv.prefix_cache import PrefixCache
from millrace.inference.embedded.live_weights import LiveWeights, PreparedWeights, name_of
from millrace.inference.embedded.parts import EngineParts, EngineSizes
from millrace.inference.embedded.runner import ModelRunner
from millrace.inference.embedded.sampler import SamplerOutput, mask_logits, sample_batch
from millrace.inference.embedded.scheduling.batch_slots import decode_result, within
from millrace.inference.embedded.scheduling.outputs import OutputProcessor, StopRules
from millrace.inference.embedded.scheduling.scheduler import Scheduler
from millrace.inference.embedded.scheduling.sequence import BatchPlan, DecodeResult, adapter_slot
from millrace.inference.embedded.scheduling.speculation import DraftProposer
from millrace.inference.embedded.scoring import ScoringEngine, num_rows
from millrace.models.grammars import GrammarCompiler
from millrace.models.logprobs import final_logits
from millrace.models.lora.factors import Adapter
from millrace.models.routing import Routing


class EmbeddedEngine(EngineCore):
    """An EngineCore over a transformers model; see EngineCore for its methods and threads."""

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
        memory: EngineMemory | None = None,
    ) -> None:
        """Updates bring adapters if there is a `merger`, or an adapter under the name None.
        `adapters`: applied without merging, by their name in requests. `routing`: of this model, if
        routes are recorded. `memory`: where the weights are, if the engine sleeps on a GPU."""
        self._model = model.requires_grad_(False)
        self._vocab_size = model.config.get_text_config().vocab_size
        self._max_context, self._kv, self._is_exact = sizes.usable_context, sizes.kv, sizes.exact
        parts = EngineParts(model, sizes, adapters=adapters, routing=routing, memory=memory)
        self._memory, self._cache, self._numerics = memory, parts.cache, parts.numerics
        self._saved_kv: tuple[dict[int, Tensor], np.ndarray] | None = None  # and their blocks
        self._slots, self.bank, self._routes = parts.slots, parts.bank, parts.routes
        self._pool, self._has_states = parts.tables.pool, parts.states is not None
        prefixes = PrefixCache(
            self._pool,
            block_tokens=sizes.block_tokens,
            version=version,
            keeps=sizes.kv == "keep" and not sizes.exact,
            is_on=sizes.prefix_cache and (parts.states is None or parts.snapshots is not None),
            policies=[] if parts.bank is None else parts.bank.policies,
            snapshots=parts.snapshots,
        )
        self._scheduler = Scheduler(
            parts.slots,
            parts.tables,
            prefixes=prefixes,
            prefill_tokens=sizes.prefill_tokens,
            routes=parts.routes,
            states=parts.states,
            snapshots=parts.snapshots,
            drafts=parts.drafts,
        )
        has_loop = sizes.decode_steps > 1 and not self._has_states
        self._decode_loop = DecodeLoop(parts, eos_ids=eos_ids) if has_loop else None
        self._runner, self._scorer = ModelRunner(parts), ScoringEngine(model)
        self._weights = LiveWeights(
            model, version=version, merger=merger, bank=self.bank, stages=memory is None
        )
        self._has_new = False  # requests arrived since the last launch of the decode loop
        self._grammars = GrammarCompiler(tokenizer, vocab_size=self._vocab_size, eos_ids=eos_ids)
        self._stop_rules = StopRules(tokenizer, eos_ids=eos_ids)
        self._outputs = OutputProcessor(
            self._stop_rules,
            sampled_by=self._slots.sampled_by,
            max_context=self._max_context,
            vocab_size=self._vocab_size,
            block_tokens=sizes.block_tokens,
        )
        self._num_generated = self._num_prefilled = 0

    @property
    def version(self) -> int | None:
        return self._weights.version

    def version_of(self, policy: str) -> int | None:
        return self._weights.versions[name_of(policy)]

    @property
    def has_work(self) -> bool:
        can_compute = self.version is not None and self._scheduler.has_work
        return can_compute or self._outputs.has_pending

    @property
    def has_held(self) -> bool:
        return self._scheduler.waiting.num_held > 0

    def stats(self) -> EngineStats:
        drafts = self._scheduler.drafts
        drafted = (0, 0) if drafts is None else (drafts.num_drafted, drafts.num_accepted)
        return EngineStats(
            running=int(self._slots.occupied.sum()),
            waiting=self._scheduler.waiting.num_waiting + self._scheduler.waiting.num_held,
            free_blocks=self._pool.num_free,
            generated_tokens=self._num_generated,
            prefill_tokens=self._num_prefilled,
            cached_tokens=self._scheduler.num_cached_tokens,
            preemptions=self._scheduler.num_preemptions,
            drafted_tokens=drafted[0],
            accepted_tokens=drafted[1],
        )

    def parameter_shapes(self) -> dict[str, tuple[int, ...]]:
        return self._weights.shapes

    def add_request(self, request: records.Request, *, stream: bool = False) -> None:
        sequences = self._outputs.open(
            request,
            stream=stream,
            adapter_slot=adapter_slot(request, self.bank),
            grammars=self._grammars,
            records_routes=self._routes is not None,
        )
        if sequences:
            self._scheduler.add(sequences)
            self._has_new = True

    @torch.inference_mode()
    def warm_up(self) -> None:
        """Capture and compile now what would delay the first tokens."""
        if self._decode_loop is None:
            return
        self._decode_loop.warm_up()
        # Two lengths compile prefill for any length; two tokens, so that no prefix is reused.
        for token, length in enumerate((24, 16)):
            prompt = np.full(min(length, self._max_context - 1), token, dtype=np.int32)
            sampling = records.Sampling(max_new_tokens=1)
            self.add_request(records.Request(id="warm-up", prompt=prompt, sampling=sampling))
            while self.has_work:
                self.step()
        self._num_generated = self._num_prefilled = 0

    @torch.inference_mode()
    def use_idle_time(self) -> None:
        if self._decode_loop is not None:
            self._decode_loop.capture_deferred()

    @torch.inference_mode()
    def step(self, *, should_stop: Callable[[], bool] = lambda: False) -> list[FinishedCompletions]:
        """Run one forward pass, or one launch of the decode loop, which ends early once
        should_stop() returns True. The next step returns sequences that the loop finished, and
        builds their records while the device works."""
        if self.version is not None:
            loop, num_steps, start_s = self._decode_loop, 1, time.perf_counter()
            with self._numerics():
                self._forward(self._scheduler.plan(prefill_only=loop is not None))
                if loop is not None:
                    num_steps = self._decode(loop, should_stop=should_stop)
            self._scheduler.shares.end_pass(time.perf_counter() - start_s, num_steps=num_steps)
        if not self._scheduler.has_work:
            self._record_ended()
        return self._outputs.take()

    @torch.inference_mode()
    def score(self, requests: Sequence[records.ScoreRequest]) -> list[records.TokenLogprobs]:
        """Score given tokens with the served version, in one forward pass between two steps."""
        if self.bank is not None:
            rows = torch.full((num_rows(requests),), self.bank.slot_of(None))
            self.bank.choose(rows.to(self._model.device))
        if self._routes is not None:
            self._routes.discard_next(num_rows(requests))
        return self._scorer.score([requests], version=self.version)[0]

    def take_chunks(self, *, coalesced: bool = False) -> dict[str, list[records.CompletionChunk]]:
        return self._outputs.take_chunks(coalesced=coalesced)

    def abort(
        self, ids: Iterable[str], *, finish: FinishReason = "abort"
    ) -> list[FinishedCompletions]:
        self._record_ended()
        for id in ids:
            for sequence in self._scheduler.remove(id):
                self._outputs.end(sequence, finish=finish)
        return self._outputs.take()

    def interrupt(self) -> list[FinishedCompletions]:
        """Drops all KV, too: other weights will serve the resumed requests."""
        running = dict.fromkeys(sequence.request.id for sequence in self._slots.running())
        interrupted = self.abort(running, finish="interrupt")
        self._scheduler.forget_kv()
        return interrupted

    def expire(
        self, before: int, adapters: Mapping[str, int] | None = None
    ) -> list[FinishedCompletions]:
        self._record_ended()
        expired = self._outputs.expired(before, self._scheduler.sequences(), adapters)
        return self.abort(expired, finish="expire")

    def preempt_all(self) -> list[FinishedCompletions]:
        """Sequences keep their KV if swaps keep it."""
        self._record_ended()
        if self._kv == "keep":
            self._scheduler.preempt_all()
        else:
            self._scheduler.forget_kv()
        return self._outputs.take()

    def hold_new(self) -> None:
        self._scheduler.waiting.hold_new()

    def release_new(self) -> None:
        self._scheduler.waiting.release_new()

    @torch.inference_mode()
    def prepare(
        self,
        tensors: Mapping[str, Tensor],
        *,
        version: int,
        policy: str = records.DEFAULT_POLICY,
    ) -> PreparedWeights:
        return self._weights.prepare(tensors, version=version, policy=name_of(policy))

    def unchanged(self, *, version: int, policy: str) -> PreparedWeights:
        return PreparedWeights(version=version, pairs=[], policy=name_of(policy))

    @torch.inference_mode()
    def commit(self, prepared: PreparedWeights) -> None:
        self._weights.commit(prepared)
        if prepared.pairs and (self._kv == "recompute" or self._is_exact):
            self._scheduler.forget_kv(only_inputs=self._kv == "keep")
        self._scheduler.begin(prepared.version, policy=prepared.policy)

    @torch.inference_mode()
    def sleep(self) -> None:
        """Free GPU memory and save the KV of running sequences; on a CPU, do nothing."""
        if self._memory is None:
            return
        self._record_ended()
        self._pool.forget_reusable()
        used = np.flatnonzero(self._pool.references)
        self._saved_kv = self._cache.saved(used), used
        self._memory.weights.release(save=True)
        self._memory.kv.release(save=False)
        torch.cuda.empty_cache()

    @torch.inference_mode()
    def wake(self) -> None:
        if self._memory is None:
            return
        assert self._saved_kv is not None
        self._memory.weights.restore()
        self._memory.kv.restore()
        self._cache.write(*self._saved_kv)
        self._saved_kv = None

    def swap(
        self, tensors: Mapping[str, Tensor], *, version: int, policy: str = records.DEFAULT_POLICY
    ) -> None:
        """prepare() and commit() in one call, for callers without a staging thread."""
        if self._model.device.type == "cuda":
            # Work that this thread queued may still write the tensors.
            torch.cuda.current_stream(self._model.device).synchronize()
        self.commit(self.prepare(tensors, version=version, policy=policy))

    def _forward(self, plan: BatchPlan | None) -> None:
        if plan is None:
            return
        started_s = time.perf_counter()
        try:
            hidden = self._runner.forward(plan)
        except torch.OutOfMemoryError:
            # The pass changed no bookkeeping, so it is planned again, smaller and without drafts.
            self._scheduler.drafts = None
            if self._has_states:  # it advanced some of them
                self._scheduler.forget_kv()
            if not self._scheduler.shrink_prefill():
                raise RunFailed(
                    f"A forward pass over {int(plan.counts.sum())} tokens does not fit into the"
                    f" memory of {self._model.device}; lower engine.options.kv_bytes or"
                    " engine.max_sequences."
                ) from None
            if self._model.device.type == "cuda":
                torch.cuda.empty_cache()
            return
        slots, rows = self._scheduler.complete(plan)
        drafts = self._scheduler.drafts
        if plan.drafts is not None and drafts is not None:
            self._verify(plan, drafts, hidden=hidden)
        elif len(slots):
            drawn = self._sample(slots, hidden=hidden, rows=rows)
            self._append(slots, decode_result(drawn, np.ones(len(slots), dtype=np.int64)))
            self._record_ended()
        if plan.drafts is None:
            self._num_prefilled += int(plan.counts[plan.num_single :].sum())
        if drafts is not None:
            drafts.observe(plan, seconds=time.perf_counter() - started_s)

    def _decode(self, decode_loop: DecodeLoop, *, should_stop: Callable[[], bool]) -> int:
        """Returns the number of steps, at least 1."""
        # Fewer steps while requests arrive, fewer still while sequences wait for a slot: a slot
        # freed within a launch stays empty until its end. A grammar reads each token first.
        share = 4 if self._scheduler.waiting.num_waiting else 2 if self._has_new else 1
        self._has_new = False
        any_guided = (self._slots.occupied & self._slots.is_guided).any()
        max_steps = 1 if any_guided else max(1, decode_loop.max_steps // share)
        plan = self._scheduler.plan_decode(max_steps=max_steps)
        if plan is None:
            return 1
        result = decode_loop.run(
            plan,
            should_stop=should_stop,
            while_running=self._record_ended,
            masks=lambda out: self._slots.grammar_masks(plan.slots, self._grammars, out=out),
        )
        return max(1, int(self._append(plan.slots, result).max()))

    def _record_ended(self) -> None:
        self._outputs.record()
        self._scheduler.prefixes.settle()

    def _sample(
        self, slots: np.ndarray, *, hidden: Tensor, rows: np.ndarray, ahead: np.ndarray | int = 0
    ) -> SamplerOutput:
        """Sample a token for each of `slots`, from its row of `hidden`. `ahead`: of its place."""
        if len(rows) != len(hidden) or (rows[1:] != rows[:-1] + 1).any():
            hidden = hidden[torch.from_numpy(rows).to(hidden.device)]
        logits = final_logits(self._model, hidden.to(self._model.dtype))
        how = self._slots.sampling_batch(
            slots, vocab_size=logits.shape[1], device=logits.device, ahead=ahead
        )
        if len(adjusting := np.flatnonzero(self._slots.adjusts_logits[slots])):
            own, vocab_size = slots[adjusting], logits.shape[1]
            changes = self._slots.logit_changes(own, vocab_size=vocab_size)
            logits = adjusted_rows(logits, adjusting, changes)
        if self._slots.is_guided[slots].any():
            masks = torch.from_numpy(self._slots.grammar_masks(slots, self._grammars))
            logits = mask_logits(logits, masks.to(logits.device))
        drawn = sample_batch(logits, how, exact=self._is_exact)
        if num_top := int(self._slots.num_top[slots].max()):
            allowed = None if drawn.kept is None else drawn.kept.allowed(logits.shape[1])
            own = {"drawn": (drawn.tokens, drawn.logprobs), "allowed": allowed}
            top = top_logprobs(logits, how.temperatures, **own, num_top=num_top)
            return replace(drawn, top=top)
        return drawn

    def _verify(self, plan: BatchPlan, drafts: DraftProposer, *, hidden: Tensor) -> None:
        """Sample a token at each row of the pass, and record those that follow right drafts."""
        slots, ahead = np.repeat(plan.slots, plan.counts), within(plan.counts)
        drawn = self._sample(slots, hidden=hidden, rows=np.arange(len(slots)), ahead=ahead)
        self._append(plan.slots, drafts.accept(plan, decode_result(drawn, plan.counts)))
        self._record_ended()

    def _append(self, slots: np.ndarray, result: DecodeResult) -> np.ndarray:
        """Append the tokens of each slot up to its end, and free the slots of sequences that end:
        _record_ended() builds their records. Returns the number of new tokens of each slot [R]."""
        if not np.isfinite(result.logprobs[result.tokens >= 0]).all():
            raise RunFailed(
                f"Version {self.version} of the weights gives logits that are not finite;"
                " lower optimizer.learning_rate."
            )
        counts, has_stop = self._stop_rules.counts_until_stop(self._slots, slots, result)
        version = self._weights.slot_versions[self._slots.adapters[slots]]
        self._slots.append(slots, result._replace(counts=counts), version=version)
        self._num_generated += int(counts.sum())
        is_new = counts > 0
        ended = self._stop_rules.finished_in(self._slots, slots[is_new], has_stop=has_stop[is_new])
        for sequence, finish in ended:
            self._scheduler.leave(sequence, ends=True)
            self._outputs.mark_ended(sequence, finish=finish)
        return counts
