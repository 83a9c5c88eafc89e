"""Effect of new weights on sequences, token by token, for each interrupt mode."""

import dataclasses
from collections.abc import Sequence
from typing import Any, get_args

import numpy as np
import pytest
import torch
from architectures import tiny_model
from engine_rig import (
    Collected,
    assert_same,
    assert_sampled_from,
    finish_all,
    make_engine,
    make_request,
    plain_logits,
    prompt_of,
    weights,
)

from millrace.config import Interrupt
from millrace.core.records import Completion, Request
from millrace.inference.backend import FinishedCompletions
from millrace.inference.embedded.engine import EmbeddedEngine
from millrace.inference.interrupt import WeightInterrupt

SEQUENCES = [{}, {"temperature": 1.4}, {"top_p": 0.8}, {"top_k": 7, "min_p": 0.01}]
MOMENTS = {1: (4, 7), 4: (1, 2)}  # by tokens per step: announced and staged before which step


def mixed_requests(*, n: int = 2) -> list[Request]:
    return [
        make_request(str(i), prompt=prompt_of(3 + 6 * i, seed=i), n=n, seed=i, **each)
        for i, each in enumerate(SEQUENCES)
    ]


class SwapScenario:
    """An engine through one update, as its worker would take it; interrupted ones are resumed."""

    def __init__(self, engine: EmbeddedEngine, model: str) -> None:
        self.engine = engine
        self.done: dict[str, list[Completion]] = {}
        self.interrupted: list[Completion] = []
        self.tokens_announced = self.tokens_landed = -1
        self._model = WeightInterrupt(model, engine)  # pyright: ignore[reportArgumentType]
        self._requests: dict[str, Request] = {}

    def run(
        self, requests: Sequence[Request], *, moments: tuple[int, int], seed: int, refuse: bool
    ) -> None:
        """`seed`: of the weights that arrive as version 1."""
        announced_at, staged_at = moments
        for request in requests:
            self._submit(request)
        is_expected = False
        for step in range(2000):
            if step == announced_at:
                is_expected = True
                self.tokens_announced = self.engine.stats().generated_tokens
                self._collect(self._model.announce())
            if is_expected and step >= staged_at and self._model.may_land:
                is_expected = False
                self.tokens_landed = self.engine.stats().generated_tokens
                self._collect(self._model.land())
                if not refuse:
                    self.engine.swap(weights(seed=seed), version=1)
                self._model.settle()
            if self.engine.has_work and self._model.may_generate:
                self._collect(self.engine.step())
            elif not self.engine.has_work and not is_expected:
                return
        raise AssertionError(f"no end: {self.engine.stats()}")

    def _submit(self, request: Request) -> None:
        self._requests[request.id] = request
        self.engine.add_request(request)

    def _collect(self, finished: list[FinishedCompletions]) -> None:
        for each in finished:
            request = self._requests[each.id]
            for member, completion in each.completions.items():
                root, index = each.id.partition(":")[0], request.index + member
                if completion.finish != "interrupt":
                    self.done.setdefault(root, [completion] * 2)[index] = completion
                    continue
                self.interrupted.append(completion)
                partial = completion if len(completion.tokens) else None
                self._submit(
                    dataclasses.replace(
                        request, id=f"{root}:{index}", n=1, index=index, partial=partial
                    )
                )


def run_scenario(
    model: str,
    *,
    seed: int = 1,
    refuse: bool = False,
    moments: tuple[int, int] | None = None,
    decode_steps: int = 1,
    **settings: Any,
) -> SwapScenario:
    scenario = SwapScenario(make_engine(eos_ids=(), decode_steps=decode_steps, **settings), model)
    moments = moments or MOMENTS[decode_steps]
    scenario.run(mixed_requests(), moments=moments, seed=seed, refuse=refuse)
    assert scenario.engine.stats().free_blocks == settings.get("num_blocks", 256)
    return scenario


def versions_of(scenario: SwapScenario) -> list[list[int]]:
    return [each.versions.tolist() for group in scenario.done.values() for each in group]


PATHS = pytest.mark.parametrize("decode_steps", [1, 4], ids=["steps", "loop"])
KV = pytest.mark.parametrize("kv", ["keep", "recompute"])
ROOMY = {"max_sequences": 8}
TIGHT = {"max_sequences": 3, "num_blocks": 30}  # sequences wait, share prefixes, are preempted


@PATHS
@KV
@pytest.mark.parametrize("room", [ROOMY, TIGHT], ids=["roomy", "tight"])
@pytest.mark.parametrize("model", get_args(Interrupt))
def test_update_with_equal_weights_changes_no_completion(model, room, kv, decode_steps):
    scenario = run_scenario(model, seed=0, kv=kv, decode_steps=decode_steps, **room)
    expected = finish_all(make_engine(eos_ids=()), mixed_requests())
    assert scenario.done.keys() == expected.keys()
    for id, completions in expected.items():
        for ours, theirs in zip(scenario.done[id], completions, strict=True):
            assert_same(ours, theirs)
            assert (ours.finish, ours.text) == (theirs.finish, theirs.text)
            assert (np.diff(ours.versions) >= 0).all()
    assert any(1 in versions for versions in versions_of(scenario)) == (
        model not in ("drain", "barrier") or room is TIGHT
    )


@PATHS
@KV
@pytest.mark.parametrize("model", get_args(Interrupt))
def test_refused_update_changes_no_completion(model, kv, decode_steps):
    scenario = run_scenario(model, refuse=True, kv=kv, decode_steps=decode_steps, **TIGHT)
    expected = finish_all(make_engine(eos_ids=()), mixed_requests())
    for id, completions in expected.items():
        for ours, theirs in zip(scenario.done[id], completions, strict=True):
            assert_same(ours, theirs)
    assert {version for versions in versions_of(scenario) for version in versions} == {0}


@pytest.mark.parametrize("model", ["swap", "abort"])
def test_swap_and_abort_generate_until_weights_land(model):
    scenario = run_scenario(model, moments=(4, 7))
    assert versions_of(scenario) == [[0] * 7 + [1] * 9] * 8


def test_save_samples_no_token_between_announcement_and_landing():
    scenario = run_scenario("save", moments=(4, 7))
    assert scenario.tokens_landed == scenario.tokens_announced == 4 * 8
    assert versions_of(scenario) == [[0] * 4 + [1] * 12] * 8


@PATHS
@pytest.mark.parametrize("model", ["drain", "barrier"])
def test_drain_finishes_running_sequences_and_starts_none(model, decode_steps):
    scenario = run_scenario(model, decode_steps=decode_steps, **TIGHT)
    versions = versions_of(scenario)
    assert all(len(set(each)) == 1 for each in versions)
    assert {each[0] for each in versions} == {0, 1}
    assert scenario.tokens_landed == 16 * sum(each[0] == 0 for each in versions)
    reference = [tiny_model("qwen3", seed=seed) for seed in (0, 1)]
    for request in mixed_requests():
        for completion in scenario.done[request.id]:
            logits = plain_logits(reference[completion.versions[0]], request.prompt, completion)
            assert_sampled_from(logits, completion, request.sampling)


@PATHS
@pytest.mark.parametrize("room", [ROOMY, TIGHT], ids=["roomy", "tight"])
def test_abort_and_resume_equals_swap_with_recomputed_kv(room, decode_steps):
    aborted = run_scenario("abort", kv="keep", decode_steps=decode_steps, **room)
    swapped = run_scenario("swap", kv="recompute", decode_steps=decode_steps, **room)
    assert aborted.interrupted
    for id, completions in swapped.done.items():
        for ours, theirs in zip(aborted.done[id], completions, strict=True):
            assert_same(ours, theirs)
            assert ours.versions.tolist() == theirs.versions.tolist()


def test_interrupted_completions_carry_all_tokens():
    scenario = run_scenario("abort")
    assert len(scenario.interrupted) == 8
    for completion in scenario.interrupted:
        count = len(completion.tokens)
        assert completion.versions.tolist() == [0] * count
        assert completion.logprobs.shape == (count,)
        assert completion.kept is None or len(completion.kept.offsets) == count + 1


@PATHS
@KV
def test_saved_sequences_continue_like_swapped_ones(kv, decode_steps):
    announced_at, _ = MOMENTS[decode_steps]
    saved = run_scenario("save", kv=kv, decode_steps=decode_steps)
    swapped = run_scenario(
        "swap", kv=kv, decode_steps=decode_steps, moments=(announced_at, announced_at)
    )
    assert versions_of(saved) == versions_of(swapped)
    for id, completions in swapped.done.items():
        for ours, theirs in zip(saved.done[id], completions, strict=True):
            assert_same(ours, theirs)


def test_preempt_all_keeps_kv_and_order_of_arrival():
    engine = make_engine(eos_ids=(), kv="keep", max_sequences=2)
    for id in "abc":
        engine.add_request(make_request(id, max_new_tokens=10))
    for _ in range(3):
        engine.step()
    prefilled, free = engine.stats().prefill_tokens, engine.stats().free_blocks
    engine.preempt_all()
    assert (engine.stats().running, engine.stats().waiting) == (0, 3)
    assert engine.stats().free_blocks == free
    engine.step()
    assert engine.stats().prefill_tokens == prefilled
    order = [finished.id for _ in range(40) for finished in engine.step()]
    assert (set(order[:2]), order[2:]) == ({"a", "b"}, ["c"])


def test_preempt_all_without_kept_kv_frees_blocks():
    engine = make_engine(eos_ids=(), kv="recompute")
    finish_all(engine, [make_request("before")])
    engine.add_request(make_request("r", n=3))
    engine.step()
    engine.preempt_all()
    assert engine.stats().free_blocks == 256


@KV
def test_sequences_waiting_after_preempt_all_can_be_aborted(kv):
    engine = make_engine(eos_ids=(), kv=kv)
    engine.add_request(make_request("r", n=2, top_k=5))
    for _ in range(3):
        engine.step()
    engine.preempt_all()
    ((first, second),) = (aborted.completions.values() for aborted in engine.abort(["r"]))
    assert len(first.tokens) == len(second.tokens) == 3
    assert not engine.has_work
    assert engine.stats().free_blocks == 256


def test_held_sequences_can_be_aborted():
    engine = make_engine(eos_ids=())
    engine.hold_new()
    engine.add_request(make_request("r", n=2))
    assert engine.has_held
    assert not engine.has_work
    ((first, second),) = (aborted.completions.values() for aborted in engine.abort(["r"]))
    assert len(first.tokens) == len(second.tokens) == 0
    assert not engine.has_held


@PATHS
def test_expire_ends_old_requests_and_others_continue(decode_steps):
    engine = make_engine(eos_ids=(), decode_steps=decode_steps, max_sequences=6)
    old = dataclasses.replace(make_request("old", n=2, seed=1), expires=True)
    kept = make_request("evaluation", n=2)
    engine.add_request(old)
    engine.add_request(kept)
    for _ in range(2):
        engine.step()
    engine.swap(weights(seed=1), version=1)
    young = dataclasses.replace(make_request("young", seed=2), expires=True)
    engine.add_request(young)
    engine.step()
    assert engine.expire(0) == []
    (expired,) = engine.expire(1)
    assert expired.id == "old"
    assert [completion.finish for completion in expired.completions.values()] == ["expire"] * 2
    assert all(0 in completion.versions for completion in expired.completions.values())
    assert finish_all(engine).keys() == {"evaluation", "young"}
    assert engine.stats().free_blocks == 256


def test_old_finished_member_expires_its_request():
    engine = make_engine(max_sequences=1, eos_ids=())
    engine.add_request(dataclasses.replace(make_request("r", n=2, max_new_tokens=4), expires=True))
    collected = Collected()
    for _ in range(4):
        collected.add(engine.step())
    engine.swap(weights(seed=1), version=1)
    collected.add(engine.expire(1))
    completions = collected.by_request()["r"]
    assert [completion.finish for completion in completions] == ["length", "expire"]
    assert [len(completion.tokens) for completion in completions] == [4, 0]


def test_old_partial_completion_expires_on_arrival():
    engine = make_engine(eos_ids=())
    request = dataclasses.replace(make_request("r"), expires=True)
    engine.add_request(request)
    engine.step()
    ((partial,),) = (finished.completions.values() for finished in engine.interrupt())
    assert partial.finish == "interrupt"
    engine.expire(1)
    (resumed,) = finish_all(engine, [dataclasses.replace(request, partial=partial)])["r"]
    assert resumed.finish == "expire"
    assert torch.equal(torch.from_numpy(resumed.tokens), torch.from_numpy(partial.tokens))
