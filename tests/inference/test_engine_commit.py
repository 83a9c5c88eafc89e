"""Updates are prepared while decoding continues; the cost of a commit is the same for any model."""

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from engine_rig import assert_same, finish_all, make_engine, make_request
from torch.utils._python_dispatch import TorchDispatchMode

from millrace.config import LoraConfig
from millrace.inference.embedded.adapters import tensors_of
from millrace.inference.embedded.engine import EmbeddedEngine

# What an update brings, and how the engine applies it.
KINDS: dict[str, LoraConfig | None] = {
    "full": None,
    "merged": LoraConfig(rank=4, alpha=8.0),
    "unmerged": LoraConfig(rank=4, alpha=8.0, apply="unmerged"),
    "magnitudes": LoraConfig(rank=4, alpha=8.0, dora=True, apply="unmerged"),
}
ALL_KINDS = pytest.mark.parametrize("kind", KINDS)
ROUNDS = pytest.mark.parametrize("decode_steps", [1, 4])


class Operations(TorchDispatchMode):
    """How many tensors each operation on tensors wrote, within."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[int] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None) -> Any:
        self.sizes.append(len(args[0]) if isinstance(args[0], list) else 1)
        return func(*args, **(kwargs or {}))


def engine_of_kind(kind: str, **settings) -> EmbeddedEngine:
    return make_engine(lora=KINDS[kind], eos_ids=(), **settings)


def update_for(engine: EmbeddedEngine, *, seed: int, device: str = "cpu") -> dict[str, Any]:
    draw = torch.Generator().manual_seed(seed)
    shapes = engine.parameter_shapes()
    return {
        name: (torch.rand(shape, generator=draw) * 0.4 + 0.1).to(device)
        for name, shape in shapes.items()
    }


def live_tensors(engine: EmbeddedEngine) -> list[torch.Tensor]:
    """Copies of everything that decodes."""
    tensors = list(engine._weights._parameters.values())
    if engine.bank is not None:
        tensors += [t for one in engine.bank._products for t in tensors_of(one).values()]
    return [tensor.clone() for tensor in tensors]


def assert_equal(left: list[torch.Tensor], right: list[torch.Tensor]) -> None:
    assert all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


@pytest.mark.parametrize("kind", ["unmerged", "magnitudes"])
@pytest.mark.parametrize("num_layers", [1, 2, 6])
@ROUNDS
def test_adapter_commit_is_one_operation_for_any_number_of_layers(kind, num_layers, decode_steps):
    engine = engine_of_kind(kind, num_layers=num_layers, decode_steps=decode_steps)
    engine.add_request(make_request(n=4))
    engine.step()
    prepared = engine.prepare(update_for(engine, seed=1), version=1)
    with Operations() as operations:
        engine.commit(prepared)
    assert len(operations.sizes) == 1


@pytest.mark.parametrize("kind", ["full", "merged"])
def test_weight_commit_is_one_operation_on_changed_tensors(kind):
    engine = engine_of_kind(kind)
    before = live_tensors(engine)
    prepared = engine.prepare(update_for(engine, seed=1), version=1)
    with Operations() as operations:
        engine.commit(prepared)
    after = live_tensors(engine)
    num_changed = sum(not torch.equal(a, b) for a, b in zip(before, after, strict=True))
    assert operations.sizes == [num_changed]


@ALL_KINDS
@ROUNDS
def test_prepare_changes_no_live_tensor(kind, decode_steps):
    engine = engine_of_kind(kind, decode_steps=decode_steps)
    before = live_tensors(engine)
    engine.prepare(update_for(engine, seed=1), version=1)
    assert engine.version == 0
    assert_equal(live_tensors(engine), before)


@ALL_KINDS
def test_dropped_prepared_version_has_no_effect(kind):
    engine, plain = engine_of_kind(kind), engine_of_kind(kind)
    engine.prepare(update_for(engine, seed=1), version=1)
    newer = engine.prepare(update_for(engine, seed=2), version=2)
    engine.commit(newer)
    plain.swap(update_for(plain, seed=2), version=2)
    assert engine.version == plain.version == 2
    assert_equal(live_tensors(engine), live_tensors(plain))


@ALL_KINDS
def test_several_prepared_versions_are_committed_independently(kind):
    engine, plain = engine_of_kind(kind), engine_of_kind(kind)
    versions = [engine.prepare(update_for(engine, seed=n), version=n) for n in (1, 2)]
    for prepared in versions:
        engine.commit(prepared)
        plain.swap(update_for(plain, seed=prepared.version), version=prepared.version)
        assert_equal(live_tensors(engine), live_tensors(plain))


@ALL_KINDS
@ROUNDS
def test_prepare_in_another_thread_does_not_change_decoding(kind, decode_steps):
    """And under the version that is then committed they are as after a swap."""
    engine, plain = (engine_of_kind(kind, decode_steps=decode_steps) for _ in range(2))
    requests = [make_request(str(seed), n=3, seed=seed, max_new_tokens=40) for seed in range(2)]
    update = update_for(engine, seed=1)
    with ThreadPoolExecutor(max_workers=1) as stager:
        staged = [stager.submit(engine.prepare, update, version=1) for _ in range(8)]
        done = finish_all(engine, requests)
        engine.commit(staged[-1].result())
        then = finish_all(engine, requests)
    undisturbed = finish_all(plain, requests)
    plain.swap(update, version=1)
    after = finish_all(plain, requests)
    for request in requests:
        for left, right in ((done, undisturbed), (then, after)):
            for a, b in zip(left[request.id], right[request.id], strict=True):
                assert_same(a, b)
        assert {int(v) for c in then[request.id] for v in c.versions} == {1}


@pytest.mark.gpu
@ALL_KINDS
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("on_host", [False, True])
def test_captured_graphs_decode_with_weights_prepared_in_another_thread(kind, dtype, on_host):
    """Without being captured again, whether the update lies on the device or on the host."""
    engine, plain = (
        engine_of_kind(kind, decode_steps=8, device="cuda", dtype=dtype) for _ in range(2)
    )
    requests = [make_request("r", n=4, temperature=0.0, max_new_tokens=60)]
    finish_all(engine, requests)
    assert engine._decode_loop is not None
    graphs = dict(engine._decode_loop._steps)
    with ThreadPoolExecutor(max_workers=1) as stager:
        for version in (1, 2, 3):
            update = update_for(engine, seed=version, device="cpu" if on_host else "cuda")
            torch.cuda.synchronize()
            staged = stager.submit(engine.prepare, update, version=version)
            finish_all(engine, requests)
            engine.commit(staged.result())
            plain.swap(update, version=version)
            assert_equal(live_tensors(engine), live_tensors(plain))
    done, expected = (finish_all(each, requests)["r"][0] for each in (engine, plain))
    assert engine._decode_loop._steps == graphs
    # Its own graphs were captured under these weights.
    logprobs = [torch.from_numpy(completion.logprobs[:1].copy()) for completion in (done, expected)]
    tolerance = 1e-4 if dtype is torch.float32 else 5e-2
    torch.testing.assert_close(logprobs[0], logprobs[1], rtol=0, atol=tolerance)
