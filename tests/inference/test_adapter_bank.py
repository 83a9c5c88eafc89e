"""Unmerged adapters: several in one engine, each against PEFT."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
import torch
from architectures import tiny_model
from engine_rig import (
    assert_same,
    assert_sampled_from,
    finish_all,
    make_engine,
    make_request,
    plain_logits,
    prompt_of,
    save_model,
    weights,
)
from peft import PeftModel

from millrace.config import EngineConfig, LoraConfig
from millrace.core.errors import TaskError, WeightError
from millrace.core.records import Request
from millrace.inference.backend import EngineSpec
from millrace.inference.embedded.adapters import tensors_of
from millrace.inference.embedded.build import build_engine
from millrace.inference.embedded.engine import EmbeddedEngine
from millrace.models.lora.factors import Adapter
from millrace.models.lora.folders import read_checkpoint, read_resident
from millrace.models.lora.trained import TrainedAdapter

POLICY = LoraConfig(rank=4, alpha=8.0, apply="unmerged")
# Other ranks and scales, other layers, and one with magnitudes.
RESIDENTS = {
    "wide": LoraConfig(rank=6, alpha=5.0, rslora=True, target_modules=("v_proj", "up_proj")),
    "dora": LoraConfig(rank=2, alpha=8.0, dora=True, target_modules=("q_proj", "k_proj", "o_proj")),
}
ADAPTERS = (None, "base", *RESIDENTS)
ROUNDS = pytest.mark.parametrize("decode_steps", [1, 4])


def save_adapter(folder: Path, lora: LoraConfig, *, architecture: str = "qwen3", seed: int) -> Path:
    adapter = TrainedAdapter(tiny_model(architecture), lora, model_path="tiny")
    torch.manual_seed(seed)
    for name, weight in adapter.named_weights().items():
        if name.endswith("magnitude_vector"):
            weight.mul_(torch.rand_like(weight) + 0.5)
        else:
            weight.normal_(std=0.3)
    folder.mkdir()
    adapter.write(adapter.named_weights(), folder)
    return folder


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str | None, Path]:
    """Of the residents, and under None of a version of the policy's adapter."""
    root = tmp_path_factory.mktemp("adapters")
    settings = {None: POLICY, **RESIDENTS}
    return {
        name: save_adapter(root / str(name), lora, seed=seed)
        for seed, (name, lora) in enumerate(settings.items())
    }


def residents(folders: Mapping[str | None, Path], architecture: str = "qwen3"):
    model = tiny_model(architecture)
    found: dict[str, Adapter] = {}
    for name in RESIDENTS:
        found[name] = read_resident(name, folders[name], model=model)
    return found


def bank_engine(folders: Mapping[str | None, Path], **settings) -> EmbeddedEngine:
    """With all adapters; the policy's adapter is version 1."""
    engine = make_engine(lora=POLICY, residents=residents(folders), eos_ids=(), **settings)
    engine.swap(read_checkpoint(folders[None]), version=1)
    return engine


def request_for(adapter: str | None, **settings) -> Request:
    request = make_request(f"for {adapter}", prompt=9, n=2, seed=3, **settings)
    return dataclasses.replace(request, adapter=adapter)


def peft_model(folder: Path, *, seed: int = 0):
    return PeftModel.from_pretrained(tiny_model("qwen3", seed=seed), folder).eval()


def assert_computed_by(model, engine_done, request: Request, *, tolerance: float = 1e-5) -> None:
    for completion in engine_done[request.id]:
        logits = plain_logits(model, request.prompt, completion)
        assert_sampled_from(logits, completion, request.sampling, tolerance=tolerance)


# Every pair of choices, not every combination.
@pytest.mark.parametrize(
    ("architecture", "apply", "dora", "decode_steps"),
    [
        ("qwen2", "merged", False, 1),
        ("qwen2", "unmerged", True, 4),
        ("qwen3", "merged", True, 4),
        ("qwen3", "unmerged", False, 1),
        ("gemma3", "merged", True, 1),
        ("gemma3", "unmerged", False, 4),
        ("gemma3", "unmerged", True, 1),
        ("qwen3", "merged", False, 4),
    ],
)
def test_swapped_adapter_matches_peft(architecture, apply, dora, decode_steps, tmp_path):
    lora = LoraConfig(rank=4, alpha=8.0, dora=dora, apply=apply)
    folder = save_adapter(tmp_path / "adapter", lora, architecture=architecture, seed=1)
    engine = make_engine(architecture, lora=lora, eos_ids=(), decode_steps=decode_steps)
    requests = [make_request("a", prompt=11, top_k=9), make_request("b", temperature=0.0)]
    before = finish_all(engine, requests)
    for request in requests:
        assert_computed_by(tiny_model(architecture), before, request)
    engine.swap(read_checkpoint(folder), version=1)
    after = finish_all(engine, requests)
    model = PeftModel.from_pretrained(tiny_model(architecture), folder).eval()
    for request in requests:
        assert_computed_by(model, after, request)


@ROUNDS
def test_adapters_in_one_batch_match_single_requests_and_peft(folders, decode_steps):
    engine = bank_engine(folders, decode_steps=decode_steps)
    requests = [request_for(name, top_p=0.9) for name in ADAPTERS]
    together = finish_all(engine, requests)
    for name, request in zip(ADAPTERS, requests, strict=True):
        alone = finish_all(engine, [request])[request.id]
        for left, right in zip(together[request.id], alone, strict=True):
            assert_same(left, right)
        model = tiny_model("qwen3") if name == "base" else peft_model(folders[name])
        assert_computed_by(model, together, request)
    texts = {tuple(completions[0].tokens) for completions in together.values()}
    assert len(texts) == len(ADAPTERS)


@ROUNDS
def test_policy_swap_changes_only_rows_of_the_policy(folders, decode_steps):
    requests = [request_for(name) for name in ADAPTERS]
    still = finish_all(bank_engine(folders, decode_steps=decode_steps), requests)
    engine = bank_engine(folders, decode_steps=decode_steps)
    for request in requests:
        engine.add_request(request)
    engine.step()
    engine.step()
    tensors = {name: -tensor for name, tensor in read_checkpoint(folders[None]).items()}
    tensors |= {name: t * 2 for name, t in tensors.items() if "lora_A" in name}
    engine.swap(tensors, version=2)
    swapped = finish_all(engine)
    for name, request in zip(ADAPTERS, requests, strict=True):
        for left, right in zip(still[request.id], swapped[request.id], strict=True):
            assert set(right.versions) == {1, 2}
            if name is None:
                assert not np.array_equal(left.tokens, right.tokens)
            else:
                assert_same(left, right)


@ROUNDS
def test_full_weights_are_swapped_below_resident_adapters(folders, decode_steps):
    engine = make_engine(residents=residents(folders), eos_ids=(), decode_steps=decode_steps)
    assert engine.parameter_shapes() == make_engine().parameter_shapes()
    engine.swap(weights(seed=7), version=1)
    requests = [request_for(name) for name in (None, *RESIDENTS)]
    done = finish_all(engine, requests)
    assert_computed_by(tiny_model("qwen3", seed=7), done, requests[0])
    for request in requests[1:]:
        assert_computed_by(peft_model(folders[request.adapter], seed=7), done, request)


@ROUNDS
def test_swap_leaves_model_weights_and_adapter_addresses_unchanged(folders, decode_steps):
    engine = bank_engine(folders, decode_steps=decode_steps)
    base = make_engine(decode_steps=decode_steps)._weights._parameters
    assert engine._weights._parameters.keys() == base.keys()
    assert all(torch.equal(p, base[name]) for name, p in engine._weights._parameters.items())
    bank = engine.bank
    assert bank is not None
    tensors = [tensor for product in bank._products for tensor in tensors_of(product).values()]
    places = [tensor.data_ptr() for tensor in tensors]
    engine.swap(read_checkpoint(folders[None]), version=2)
    tensors = [tensor for product in bank._products for tensor in tensors_of(product).values()]
    assert places == [tensor.data_ptr() for tensor in tensors]


def test_fused_projections_share_two_adapter_products():
    engine = make_engine(lora=POLICY, decode_steps=4)
    assert engine.bank is not None
    products = engine.bank._products
    # In each of two layers: query, key and value; output; gate and up; down.
    assert sorted(len(product.layers) for product in products) == [1, 1, 1, 1, 2, 2, 3, 3]
    assert all(product.gains is None for product in products)
    shapes = engine.parameter_shapes()
    own = sum(np.prod(shape) for name, shape in shapes.items() if "lora_A" in name)
    assert sum(product.a.numel() for product in products) == own


def test_failed_commit_leaves_no_version_until_the_next_complete_one(folders):
    engine = bank_engine(folders)
    tensors = read_checkpoint(folders[None])
    last = list(tensors)[-1]
    with pytest.raises(WeightError, match=r"as \(9, 32\)"):
        engine.swap({**tensors, last: torch.zeros(9, 32)}, version=2)
    assert engine.version == 1
    with pytest.raises(WeightError, match="Version 2 cannot be prepared"):
        engine.swap({**tensors, last: tensors[last].to("meta")}, version=2)
    assert engine.version == 1
    prepared = engine.prepare(tensors, version=2)
    broken = [(live, new.to("meta")) for live, new in prepared.pairs]
    with pytest.raises(WeightError, match="serves nothing until a complete version"):
        engine.commit(dataclasses.replace(prepared, pairs=broken))
    assert engine.version is None
    engine.swap(tensors, version=3)
    request = request_for(None)
    assert_computed_by(peft_model(folders[None]), finish_all(engine, [request]), request)


def test_error_for_unknown_adapter_lists_the_known_ones(folders):
    with pytest.raises(TaskError, match=r"no adapter 'narrow'; .* 'wide', 'dora', 'base'\."):
        bank_engine(folders).add_request(request_for("narrow"))
    plain = make_engine(residents=residents(folders))
    with pytest.raises(TaskError, match=r"no adapter 'base'; this engine has 'wide', 'dora'\."):
        plain.add_request(request_for("base"))
    merged = make_engine(lora=LoraConfig(rank=2))
    with pytest.raises(TaskError, match=r"only the policy\. .* lora\.apply to 'unmerged'"):
        merged.add_request(request_for("base"))
    assert not merged.has_work


@pytest.mark.parametrize("apply", ["auto", "unmerged"])
def test_engine_serves_resident_adapters_beside_a_saved_policy(folders, apply, tmp_path):
    save_model(tmp_path)
    paths = {name: str(folders[name]) for name in RESIDENTS}
    engine = build_engine(
        EngineSpec(
            model_path=str(tmp_path),
            config=EngineConfig(max_context=128, max_sequences=8, adapters=paths),
            device="cpu",
            version=7,
            lora=POLICY.model_copy(update={"apply": apply}),
            adapter_path=folders[None],
        )
    )
    requests = [request_for(name) for name in ADAPTERS]
    done = finish_all(engine, requests)
    for name, request in zip(ADAPTERS, requests, strict=True):
        model = tiny_model("qwen3") if name == "base" else peft_model(folders[name])
        assert_computed_by(model, done, request)


@pytest.mark.parametrize(
    ("lora", "merges"),
    [
        (LoraConfig(rank=2), True),
        (LoraConfig(rank=2, apply="merged"), True),
        (LoraConfig(rank=2, apply="unmerged"), False),
    ],
)
def test_single_adapter_is_merged_by_default(lora, merges, tmp_path):
    save_model(tmp_path)
    engine = build_engine(
        EngineSpec(
            model_path=str(tmp_path),
            config=EngineConfig(max_context=64, max_sequences=2),
            device="cpu",
            version=0,
            lora=lora,
        )
    )
    assert (engine.bank is None) == merges


@pytest.mark.parametrize("adapter", ADAPTERS)
def test_preempted_and_resumed_sequences_keep_their_adapter(folders, adapter):
    requests = [request_for(adapter)] + [
        make_request(str(i), prompt=prompt_of(12, seed=i), n=2) for i in range(3)
    ]
    engine = bank_engine(folders, num_blocks=24, prefill_tokens=13)
    done = finish_all(engine, requests)
    assert engine.stats().preemptions > 0
    model = tiny_model("qwen3") if adapter == "base" else peft_model(folders[adapter])
    assert_computed_by(model, done, requests[0])


@pytest.mark.gpu
@pytest.mark.parametrize("fast_layers", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_captured_graphs_serve_all_adapters_and_survive_swaps(folders, fast_layers, dtype):
    engine = bank_engine(
        folders, decode_steps=8, device="cuda", dtype=dtype, fast_layers=fast_layers
    )
    requests = [request_for(name) for name in ADAPTERS]
    finish_all(engine, requests)
    assert engine._decode_loop is not None
    graphs = dict(engine._decode_loop._steps)
    programs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    tensors = {name: tensor.cuda() for name, tensor in read_checkpoint(folders[None]).items()}
    engine.swap({n: -t if "lora_B" in n else t for n, t in tensors.items()}, version=2)
    finish_all(engine, requests)
    engine.swap(tensors, version=3)
    done = finish_all(engine, requests)
    assert engine._decode_loop._steps == graphs
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == programs
    tolerance = 1e-3 if dtype is torch.float32 else 0.3
    for name, request in zip(ADAPTERS, requests, strict=True):
        model = tiny_model("qwen3") if name == "base" else peft_model(folders[name])
        assert_computed_by(model, done, request, tolerance=tolerance)
