"""Adapters of several policies in one engine: each is swapped on its own, with its own version."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from architectures import tiny_model
from engine_rig import assert_same, finish_all, make_engine, make_request
from queue_link import FakeLink, in_thread

from millrace.cluster.messages import Generate, Stop, SwapWeights
from millrace.config import LoraConfig
from millrace.core.records import Request, WeightUpdate
from millrace.core.spans import Timeline
from millrace.inference.embedded.engine import EmbeddedEngine
from millrace.inference.worker import EngineWorker
from millrace.models.lora.factors import adapter_of

LORA = LoraConfig(rank=4, alpha=8.0, apply="unmerged")


def engine_of(**settings: Any) -> EmbeddedEngine:
    """With a first policy, and "solver"."""
    solver = adapter_of(tiny_model("qwen3"), LORA)
    return make_engine(lora=LORA, residents={"solver": solver}, eos_ids=(), **settings)


def tensors_of(engine: EmbeddedEngine, *, seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = engine.parameter_shapes()
    return {name: 0.3 * torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def of_solver(id: str) -> Request:
    return replace(make_request(id), adapter="solver")


def requests() -> list[Request]:
    return [make_request("first"), of_solver("solver")]


@pytest.mark.parametrize("decode_steps", [1, 4])
@pytest.mark.parametrize("kv", ["keep", "recompute"])
def test_swap_of_one_policy_changes_tokens_and_versions_of_no_other(decode_steps, kv):
    engine = engine_of(decode_steps=decode_steps, kv=kv)
    before = finish_all(engine, requests())
    assert_same(before["first"][0], before["solver"][0])  # both are the model
    engine.swap(tensors_of(engine, seed=1), version=5, policy="solver")
    after = finish_all(engine, requests())
    assert_same(after["first"][0], before["first"][0])
    assert set(after["first"][0].versions) == {0}
    assert set(after["solver"][0].versions) == {5}
    assert engine.version == 0
    assert engine.version_of("solver") == 5
    # The first policy with the same adapter is the same model.
    engine.swap(tensors_of(engine, seed=1), version=7)
    again = finish_all(engine, requests())
    assert np.array_equal(again["first"][0].tokens, after["solver"][0].tokens)
    assert_same(again["solver"][0], after["solver"][0])
    assert set(again["first"][0].versions) == {7}
    assert set(again["solver"][0].versions) == {5}


def test_running_sequences_get_the_versions_of_their_own_policy():
    engine = engine_of()
    for request in requests():
        engine.add_request(request)
    for _ in range(3):
        engine.step()
    engine.swap(tensors_of(engine, seed=1), version=1, policy="solver")
    done = finish_all(engine)
    assert set(done["first"][0].versions) == {0}
    assert done["solver"][0].versions.tolist() == sorted(done["solver"][0].versions.tolist())
    assert set(done["solver"][0].versions) == {0, 1}


def test_requests_expire_by_the_version_of_their_own_policy():
    engine = engine_of()
    for request in requests():
        engine.add_request(replace(request, expires=True))
    for _ in range(3):
        engine.step()
    (expired,) = engine.expire(1, {"solver": 0})
    assert expired.id == "first"
    (expired,) = engine.expire(1, {"solver": 1})
    assert expired.id == "solver"
    assert not engine.has_work


class Receiver:
    """Hands out tensors whose seed is the checksum."""

    def __init__(self, engine: EmbeddedEngine) -> None:
        self._engine, self.staged = engine, list[int]()

    def stage(self, update: WeightUpdate) -> dict[str, torch.Tensor]:
        self.staged.append(update.version)
        return tensors_of(self._engine, seed=update.checksum)

    def close(self) -> None: ...


def update_of(version: int, policy: str, *, checksum: int) -> SwapWeights:
    update = WeightUpdate(
        version=version,
        tensors=(),
        num_bytes=0,
        checksum=checksum,
        transport="shm",
        location="",
        policy=policy,
    )
    return SwapWeights(update=update)


def test_worker_swaps_policies_in_turn_and_fetches_no_adapter_that_it_holds():
    link, engine = FakeLink(), engine_of()
    first, solver = Receiver(engine), Receiver(engine)
    worker = EngineWorker(
        link,  # pyright: ignore[reportArgumentType]
        engine=engine,
        receiver=first,  # pyright: ignore[reportArgumentType]
        receivers={"solver": solver},  # pyright: ignore[reportArgumentType]
        timeline=Timeline("engine-0"),
    )
    with in_thread(worker.serve):
        swaps = [update_of(1, "policy", checksum=3), update_of(1, "solver", checksum=4)]
        assert [c.result().version for c in [link.call(swap) for swap in swaps]] == [1, 1]
        expected = link.call(Generate(request=of_solver("a"))).result()
        swaps = [update_of(2, "policy", checksum=5), update_of(2, "solver", checksum=4)]
        assert [c.result().version for c in [link.call(swap) for swap in swaps]] == [2, 2]
        same = link.call(Generate(request=of_solver("b"))).result()
        link.call(Stop()).result()
    assert (first.staged, solver.staged) == ([1, 2], [1])
    (expected,), (same,) = expected.completions.values(), same.completions.values()
    assert np.array_equal(expected.tokens, same.tokens)
    assert (set(expected.versions), set(same.versions)) == ({1}, {2})
