"""Adapters over a base in 4 bits: gradients, memory, and engines with the same base."""

from pathlib import Path

import numpy as np
import pytest
import torch
from architectures import tiny_model
from batches import batch_of, mixed_rollouts, trainer_of
from engine_rig import cast, save_model
from test_lora import batches, rollouts_by
from torch import Tensor, nn

from millrace.config import EngineConfig, LoraConfig, RunConfig, load_config
from millrace.core.errors import ConfigError
from millrace.core.records import Rollout
from millrace.inference.backend import EngineSpec
from millrace.inference.embedded.build import build_engine
from millrace.inference.embedded.engine import EmbeddedEngine
from millrace.models.lora.nf4 import Nf4Linear
from millrace.models.lora.quantized import quantize_base, round_base
from millrace.models.lora.trained import TrainedAdapter
from millrace.run.resume import check_same_base
from millrace.training.build import build_trainer, build_trainers
from millrace.training.layers import compile_layers
from millrace.training.parallel.ranks import Ranks
from millrace.training.trainer import Trainer

CPU = torch.device("cpu")
LORA = LoraConfig(rank=4, alpha=8.0)


def config_of(path: Path, *, quantization: str | None = "nf4", **sections) -> RunConfig:
    lora = {"rank": 4, "alpha": 8.0, "quantization": quantization, **sections.pop("lora", {})}
    settings = {
        "model": str(path),
        "lora": lora,
        "optimizer": {"learning_rate": 1e-2},
        "trainer": {"dtype": "float32"},
        "placement": {"trainer": "cpu", "engines": "cpu"},
    }
    return load_config({**settings, **sections})


def engine_of(config: RunConfig) -> EmbeddedEngine:
    return build_engine(
        EngineSpec(
            model_path=config.model.path,
            config=EngineConfig(max_context=128, max_sequences=8),
            device="cpu",
            version=0,
            lora=config.lora,
        )
    )


@torch.no_grad()
def mismatch(trainer: Trainer, rollouts: list[Rollout]) -> float:
    """The most by which engine and trainer differ about a token."""
    (microbatch,) = batch_of(rollouts).microbatches
    with trainer.policy.changing(microbatch):
        logprobs = trainer.policy.logprobs(microbatch).logprobs
    return (logprobs - torch.from_numpy(microbatch.engine_logprobs)).abs().max().item()


def gradients(architecture: str, change, *, lora: LoraConfig, **settings) -> dict[str, Tensor]:
    """Of each tensor of the adapter, over a base that was changed in place."""
    model = cast(tiny_model(architecture), settings.pop("base_dtype", torch.float32))
    change(model)
    adapter = TrainedAdapter(model, lora, model_path="tiny")
    generator = torch.Generator().manual_seed(5)
    for weight in adapter.named_weights().values():
        weight.add_(0.1 * torch.randn(weight.shape, generator=generator))
    trainer = trainer_of(model, adapter=adapter, **settings)
    (microbatch,) = batch_of(mixed_rollouts(np.random.default_rng(3), 6)).microbatches
    trainer.policy.logprobs(microbatch).logprobs.mean().backward()
    found = {n: p.grad for n, p in model.named_parameters() if p.requires_grad}
    assert all(gradient is not None and gradient.any() for gradient in found.values())
    return found


@pytest.mark.parametrize(
    ("architecture", "lora", "settings"),
    [
        ("llama", LORA, {}),
        ("qwen2", LORA, {"gradient_checkpointing": True}),  # has biases
        ("qwen3", LoraConfig(rank=4, target_modules=("q_proj", "down_proj")), {}),
        ("llama", LoraConfig(rank=4, dora=True), {}),
        ("qwen3", LORA, {"compute_dtype": torch.bfloat16, "base_dtype": torch.bfloat16}),
    ],
    ids=["llama", "biases-checkpointed", "some-layers", "dora", "bfloat16"],
)
def test_gradients_are_those_over_the_values_that_the_base_stands_for(architecture, lora, settings):
    def quantize(model) -> None:
        quantize_base(model, device=CPU)

    held = gradients(architecture, quantize, lora=lora, **settings)
    expected = gradients(architecture, round_base, lora=lora, **settings)
    other = gradients(architecture, lambda model: None, lora=lora, **settings)
    assert held.keys() == expected.keys()
    for name, gradient in expected.items():
        torch.testing.assert_close(held[name], gradient, rtol=1e-5, atol=1e-6, msg=name)
    assert any((held[name] - other[name]).abs().max() > 1e-4 for name in held)


@pytest.mark.parametrize(
    ("architecture", "lora"),
    [
        ("llama", {"apply": "merged"}),
        ("qwen3", {"apply": "unmerged"}),
        ("llama", {"apply": "unmerged", "dora": True}),
    ],
    ids=["merged", "unmerged", "dora"],
)
def test_an_engine_computes_over_the_base_of_the_trainer(tmp_path, architecture, lora):
    save_model(tmp_path, architecture)
    config = config_of(tmp_path, lora=lora)
    trainer, engine = build_trainer(config, path=str(tmp_path)), engine_of(config)
    stale = rollouts_by(engine)
    assert mismatch(trainer, stale) < 1e-5
    trainer.step(*batches(1))
    assert mismatch(trainer, stale) > 1e-3
    engine.swap(trainer.policy.weights(), version=1)
    assert mismatch(trainer, rollouts_by(engine)) < 1e-5
    of_full_base = engine_of(config_of(tmp_path, quantization=None, lora=lora))
    of_full_base.swap(trainer.policy.weights(), version=1)
    assert mismatch(trainer, rollouts_by(of_full_base)) > 1e-2


def held_bytes(trainer: Trainer) -> int:
    module: nn.Module = trainer.policy.module
    tensors = [*module.parameters(), *module.buffers()]
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def test_the_trainer_holds_each_matrix_in_17_bits_for_four_weights(tmp_path):
    save_model(tmp_path)
    held, plain = (
        build_trainer(config_of(tmp_path, quantization=kind), path=str(tmp_path))
        for kind in ("nf4", None)
    )
    layers = [m for m in held.policy.module.modules() if isinstance(m, Nf4Linear)]
    num_weights = sum(layer.in_features * layer.out_features for layer in layers)
    tables = sum(layer.pairs.numel() * 4 for layer in layers)  # of levels: 2 KiB for any layer
    assert num_weights == 2 * (2 * 32 * 32 + 2 * 16 * 32 + 3 * 48 * 32)
    assert held_bytes(plain) - held_bytes(held) == 4 * num_weights - num_weights * 17 // 32 - tables
    assert held.policy.merged_bytes() == plain.policy.merged_bytes()


def test_several_adapters_share_one_quantized_base(tmp_path):
    save_model(tmp_path)
    config = config_of(tmp_path)
    path, ranks = str(tmp_path), Ranks()
    both = build_trainers([config, config], path=path, ranks=ranks, on_forward=lambda: None)
    alone = build_trainer(config, path=path)
    engine = engine_of(config)
    for trainer in (*both, alone):
        assert mismatch(trainer, rollouts_by(engine)) < 1e-5
    both[0].step(*batches(1))
    engine.swap(both[0].policy.weights(), version=1)
    assert mismatch(both[0], rollouts_by(engine)) < 1e-5
    assert mismatch(both[1], rollouts_by(engine)) > 1e-3


def test_the_reference_is_the_quantized_base(tmp_path):
    save_model(tmp_path)
    config = config_of(tmp_path)
    trainer, engine = build_trainer(config, path=str(tmp_path)), engine_of(config)
    rollouts = rollouts_by(engine)
    for batch in batches(2):
        trainer.step(batch)
    assert mismatch(trainer, rollouts) > 1e-3
    (asked,) = trainer.policy.with_reference_logprobs(batch_of(rollouts)).microbatches
    np.testing.assert_allclose(asked.reference_logprobs, asked.engine_logprobs, rtol=0, atol=1e-5)


@pytest.mark.slow
def test_compiled_layers_give_the_same_step(tmp_path):
    save_model(tmp_path)
    trainers: list[Trainer] = []
    for _ in range(2):
        torch.manual_seed(3)  # of the adapter
        trainers.append(build_trainer(config_of(tmp_path), path=str(tmp_path)))
    plain, compiled = trainers
    torch._dynamo.reset()
    compile_layers(compiled.policy.module, backend="eager")
    ours, theirs = compiled.step(*batches(1)), plain.step(*batches(1))
    torch._dynamo.reset()
    for name in ("loss", "entropy", "grad_norm"):
        assert ours[name] == pytest.approx(theirs[name], rel=1e-4, abs=1e-6), name


def test_an_adapter_is_not_resumed_over_another_base(tmp_path):
    quantized, plain = config_of(tmp_path), config_of(tmp_path, quantization=None)
    check_same_base(tmp_path, quantized, saved="nf4")
    check_same_base(tmp_path, plain, saved=None)
    with pytest.raises(ConfigError, match=r"was trained with lora\.quantization = 'nf4', and"):
        check_same_base(tmp_path, plain, saved="nf4")
    with pytest.raises(ConfigError, match=r"it is 'nf4' now; to resume, leave it out"):
        check_same_base(tmp_path, quantized, saved=None)
