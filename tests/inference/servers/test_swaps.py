"""New weights at a server with requests in progress, in each mode of weights.interrupt."""

import dataclasses
import time
from pathlib import Path

import pytest
from architectures import tiny_model
from engine_rig import Collected, finish_all, make_request, plain_logits
from fake_sglang import FakeSglang
from fake_vllm import FakeVllm, serving
from probed import update_of
from transformers import PreTrainedModel

from millrace.config import EngineConfig, Interrupt
from millrace.core.records import Completion, Request
from millrace.inference.backend import EngineSpec, SglangBackend, VllmBackend
from millrace.inference.interrupt import WeightInterrupt
from millrace.inference.servers.engine import ServerEngine
from millrace.weights.probe import ProbeReference, check_probe, probe_request


@pytest.fixture(scope="module")
def models() -> list[PreTrainedModel]:
    """Of both versions. Made before a server samples in its thread, which shares the random
    numbers."""
    return [tiny_model("qwen3", seed=seed) for seed in (0, 1)]


def attached(url: str, model_path: Path, *, kv: str, is_vllm: bool = True) -> ServerEngine:
    config = EngineConfig(type="vllm" if is_vllm else "sglang", kv=kv)
    spec = EngineSpec(config=config, device="cpu", model_path=str(model_path), version=0)
    engine = (VllmBackend if is_vllm else SglangBackend)(attach=[url]).load(spec)
    assert isinstance(engine, ServerEngine)
    return engine


class Swap:
    """An update of a server engine to version 1, as its worker does it."""

    def __init__(self, engine: ServerEngine, mode: Interrupt, models: list[PreTrainedModel]):
        self.collected = Collected()
        self.interrupted: dict[str, Completion] = {}
        self._engine = engine
        self._interrupt = WeightInterrupt(mode, engine)
        self._weights = {name: p.detach() for name, p in models[1].named_parameters()}
        self._update = update_of(ProbeReference(models[1]), self._weights)
        self._models = models

    def until(self, num_generated: int) -> None:
        while self._engine.stats().generated_tokens < num_generated:
            self.collected.add(self._engine.step())

    def announce(self) -> None:
        self.collected.add(self._interrupt.announce())

    def land(self) -> None:
        prepared = self._engine.prepare(self._weights, version=1)
        while not self._interrupt.may_land:
            self.collected.add(self._engine.step())
        for ended in self._interrupt.land():
            if ended.completions[0].finish == "interrupt":
                self.interrupted[ended.id] = ended.completions[0]
            else:
                self.collected.add([ended])
        self._engine.commit(prepared)
        assert self._update.probe is not None
        (scored,) = self._engine.score([probe_request(self._update.probe)])
        check_probe(self._update, scored.logprobs)
        self._interrupt.settle()

    def finish(self) -> dict[str, list[Completion]]:
        return finish_all(self._engine, collected=self.collected)

    def check(self, request: Request, completion: Completion) -> list[int]:
        """Each logprob is that of the token's version; returns the versions."""
        rows = [plain_logits(each, request.prompt, completion) for each in self._models]
        for position, version in enumerate(completion.versions):
            logprobs = rows[version][position].log_softmax(-1)
            expected = float(logprobs[completion.tokens[position]])
            assert abs(completion.logprobs[position] - expected) < 1e-4, position
        return completion.versions.tolist()


@pytest.mark.parametrize("was_paused", [False, True])
def test_request_without_a_token_reads_no_prompt_that_old_weights_have_cached(
    model_path, models, was_paused
):
    """All have the same prompt, and two are sent before the swap and not prefilled."""
    requests = [make_request(id, max_new_tokens=20, temperature=0.0) for id in "abc"]
    with serving(model_path, max_running=1) as (url, _):
        engine = attached(url, model_path, kv="keep")
        swap = Swap(engine, "swap", models)
        for request in requests[:2]:
            engine.add_request(request)
        swap.until(3)
        if was_paused:
            engine.pause()
        engine.add_request(requests[2])
        swap.land()
        completions = swap.finish()
        engine.close()
    versions = [swap.check(request, completions[request.id][0]) for request in requests]
    assert sorted(each[0] for each in versions) == [0, 1, 1]


SERVERS = pytest.mark.parametrize(("kind", "kv"), [(FakeVllm, "keep"), (FakeSglang, "recompute")])


@SERVERS
@pytest.mark.parametrize("mode", ["swap", "abort", "save", "drain"])
def test_each_token_has_the_logprob_of_its_version(model_path, models, mode, kind, kv):
    requests = {id: make_request(id, max_new_tokens=20, temperature=0.0) for id in "abcde"}
    with serving(model_path, kind=kind, max_running=3) as (url, fake):
        engine = attached(url, model_path, kv=kv, is_vllm=kind is FakeVllm)
        swap = Swap(engine, mode, models)
        for id in "abcd":  # three run, and one waits at the server
            engine.add_request(requests[id])
        swap.until(12)
        swap.announce()
        engine.add_request(requests["e"])
        num_sampled = fake.num_sampled
        time.sleep(0.03)
        assert (fake.num_sampled == num_sampled) == (mode == "save")
        swap.land()
        for id, partial in swap.interrupted.items():
            started = partial if len(partial.tokens) else None
            engine.add_request(dataclasses.replace(requests[id], partial=started))
        completions = swap.finish()
        engine.close()
    versions = {id: {*swap.check(requests[id], completions[id][0])} for id in requests}
    if mode == "drain":
        assert versions == {"a": {0}, "b": {0}, "c": {0}, "d": {0}, "e": {1}}
    else:
        assert {0, 1} in versions.values()
    assert bool(swap.interrupted) == (mode == "abort")


def test_paused_server_is_not_paused_again_to_prefill_running_requests(model_path, models):
    with serving(model_path) as (url, fake):
        engine = attached(url, model_path, kv="recompute")
        swap = Swap(engine, "save", models)
        engine.add_request(make_request(max_new_tokens=20, temperature=0.0))
        swap.until(3)
        del fake.cleared[:]
        swap.announce()
        swap.land()
        assert fake.cleared == [True, False]  # the second: after the probe
        swap.finish()
        engine.close()
