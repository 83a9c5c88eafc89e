"""Engines that give back the memory of weights and KV while the trainer steps."""

import contextlib
from statistics import median
from typing import Any

import numpy as np
import pytest
import torch
from engine_rig import assert_same, finish_all, make_engine, make_request, prompt_of, weights
from test_engine_pause import UPDATE, serve

from millrace.bench.workloads import make_model
from millrace.cluster.messages import Generate, Pause, Resume, SwapWeights
from millrace.config import EngineConfig
from millrace.core.errors import ConfigError
from millrace.inference.backend import EmbeddedBackend
from millrace.inference.embedded.build import _room, engine_of
from millrace.inference.embedded.device_memory import EngineMemory, move_storages
from millrace.inference.embedded.engine import EmbeddedEngine
from millrace.inference.embedded.self_test import engine_path
from millrace.weights.transport import make_receiver, make_sender


class LostMemory:
    """Stands for memory of a GPU: what is not saved is lost."""

    def __init__(self) -> None:
        self.tensors: list[torch.Tensor] = []
        self._saved: list[torch.Tensor] = []

    def allocating(self) -> Any:
        return contextlib.nullcontext()

    def release(self, *, save: bool) -> None:
        self._saved = [t.clone() if save else torch.zeros_like(t) for t in self.tensors]
        for tensor in self.tensors:
            tensor.fill_(torch.nan)

    def restore(self) -> None:
        for tensor, saved in zip(self.tensors, self._saved, strict=True):
            tensor.copy_(saved)


class LostEngineMemory:
    def __init__(self) -> None:
        self.weights, self.kv = LostMemory(), LostMemory()

    def adopt(self, model: torch.nn.Module) -> None:
        self.weights.tensors = [parameter.data for parameter in model.parameters()]


def sleeping_engine(**settings: Any) -> EmbeddedEngine:
    memory: Any = LostEngineMemory()
    engine: Any = make_engine(memory=memory, **settings)
    memory.kv.tensors = list(engine._cache.layers.values())
    return engine


@pytest.mark.parametrize("decode_steps", [1, 4])
def test_completions_that_slept_equal_undisturbed_ones(decode_steps: int):
    requests = [make_request(str(i), prompt=prompt_of(5 + 9 * i), n=2, seed=i) for i in range(3)]
    expected = finish_all(make_engine(eos_ids=(), decode_steps=decode_steps), requests)
    engine = sleeping_engine(eos_ids=(), decode_steps=decode_steps)
    done: dict[str, dict[int, Any]] = {request.id: {} for request in requests}
    for request in requests:
        engine.add_request(request)
    while engine.has_work:
        for finished in engine.step():
            done[finished.id] |= finished.completions
        engine.sleep()
        engine.wake()
    for id, completions in expected.items():
        for member, completion in enumerate(completions):
            assert_same(done[id][member], completion)


def test_unused_prefixes_are_not_found_after_sleep():
    engine = sleeping_engine(eos_ids=())
    finish_all(engine, [make_request(prompt=20)])
    engine.sleep()
    engine.wake()
    again = make_request("again", prompt=20)
    expected = finish_all(make_engine(eos_ids=()), [again])["again"]
    assert_same(finish_all(engine, [again])["again"][0], expected[0])
    assert engine.stats().cached_tokens == 0


def test_weights_that_arrive_during_sleep_are_taken_after_it():
    link = serve(
        [Generate(request=make_request())],
        [Pause(sleep=True)],
        [SwapWeights(update=UPDATE)],
        [],
        [Resume()],
        [],
    )
    assert link.reply_to(SwapWeights).version == 1
    assert ("sleep", True) in link.spans
    assert [name for name, _ in link.spans].index("wake") < [n for n, _ in link.spans].index("swap")


def test_memory_of_staged_weights_is_given_back_in_sleep():
    sender = make_sender("shm", dtype=torch.float32, payload="delta")
    receiver = make_receiver("shm", payload="delta")
    kept: list[bool] = []
    first, second = (sender.publish(version, weights(seed=version)) for version in (1, 2))
    link = serve(
        [Generate(request=make_request())],
        [SwapWeights(update=first)],
        [Pause(sleep=True)],
        [lambda: kept.append(receiver._staging.newest is not None)],
        [Resume()],
        [SwapWeights(update=second)],
        [],
        receiver=receiver,
    )
    assert kept == [False]
    calls: list[Any] = link.calls_of(SwapWeights)
    assert [call.replies[0].version for call in calls] == [1, 2]
    sender.close()


@pytest.mark.gpu
def test_memory_of_a_gpu_is_given_back_and_restored_at_the_same_addresses():
    device = torch.device("cuda", 0)
    memory = EngineMemory(device)
    request = make_request(n=4, max_new_tokens=40)
    settings: dict[str, Any] = {"device": "cuda", "dtype": torch.bfloat16, "decode_steps": 4}
    expected = finish_all(make_engine(eos_ids=(), **settings), [request])[request.id]
    engine: Any = make_engine(eos_ids=(), memory=memory, num_blocks=400_000, **settings)
    engine.add_request(request)
    done: dict[int, Any] = {}
    given_back: list[float] = []
    while engine.has_work:
        for finished in engine.step():
            done |= finished.completions
        free = torch.cuda.mem_get_info(device)[0]
        engine.sleep()
        held = memory.weights.num_bytes + memory.kv.num_bytes
        given_back.append((torch.cuda.mem_get_info(device)[0] - free) / held)
        engine.wake()
    # Other processes use the GPU, too, so single differences may be smaller.
    assert held > 2**27
    assert median(given_back) >= 0.9
    for member, completion in enumerate(expected):
        assert_same(done[member], completion)
    assert np.isfinite(done[0].logprobs).all()


class Allocations:
    """Counts allocating(), and how often memory is freed."""

    def __init__(self) -> None:
        self.num_moved = self.num_freed = 0

    @contextlib.contextmanager
    def allocating(self) -> Any:
        self.num_moved += 1
        yield

    def free(self) -> None:
        self.num_freed += 1


def test_views_stay_views_of_one_memory_when_it_is_moved():
    whole, other = torch.arange(12.0), torch.ones(3)
    parts = [whole[:4].view(2, 2), whole[4:]]
    memory = Allocations()
    move_storages([*parts, other], allocating=memory.allocating, free=memory.free, free_every=32)
    assert (memory.num_moved, memory.num_freed) == (2, 2)
    assert whole.tolist() == [*range(12)]
    assert other.tolist() == [1.0] * 3
    whole.zero_()
    assert not parts[0].any()
    assert not parts[1].any()


def test_engine_that_sleeps_copies_new_weights_when_it_commits_them():
    engine = sleeping_engine()
    new = weights(seed=5)
    prepared = engine.prepare(new, version=1)
    assert all(any(value is tensor for tensor in new.values()) for _, value in prepared.pairs)
    engine.commit(prepared)
    for own, value in prepared.pairs:
        assert torch.equal(own, value)
    assert engine.version == 1


@pytest.mark.gpu
def test_sleep_saves_no_more_than_the_weights_of_the_model():
    """Projections that were fused leave nothing behind."""
    device = torch.device("cuda", 0)
    model, tokenizer = make_model(
        "300e6", dtype=torch.bfloat16, device=device, attention=engine_path(device)
    )
    num_bytes = sum(parameter.nbytes for parameter in model.parameters())
    memory = EngineMemory(device)
    engine_of(
        model,
        tokenizer,
        config=EngineConfig(max_sequences=4, max_context=256),
        version=0,
        options=EmbeddedBackend(kv_bytes=2**26, compile=False),
        memory=memory,
    )
    assert num_bytes <= memory.weights.num_bytes < 1.15 * num_bytes


def test_default_kv_cache_leaves_the_trainer_what_it_keeps(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (900, 1000))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _: 100)

    def room(trainer_bytes: int) -> int:
        found = _room(
            EmbeddedBackend(),
            size=10,
            states=(0, 0),
            device=torch.device("cuda", 0),
            trainer_bytes=trainer_bytes,
        )
        return found[0]

    assert room(0) == 360
    assert room(700) == 80
    with pytest.raises(ConfigError, match="does not hold one KV block"):
        room(900)
