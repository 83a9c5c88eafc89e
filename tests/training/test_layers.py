import functools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np
import pytest
import torch
from architectures import tiny_model
from batches import batch_of, mixed_rollouts, sharing_rollouts, trainer_of
from tiny_model import make_tiny_model
from torch import nn
from torch._dynamo.utils import counters
from torch.distributed.fsdp import FSDPModule

from millrace.config import load_config
from millrace.core.errors import ConfigError
from millrace.models.sharding import ShardingMeshes, decoder_layers, shard
from millrace.training.build import build_trainers
from millrace.training.layers import checkpoint_layers, compile_layers
from millrace.training.parallel.ranks import Ranks


def batches():
    rng = np.random.default_rng(2)
    rollouts = [mixed_rollouts(rng, 5), sharing_rollouts(rng), mixed_rollouts(rng, 3)]
    return [batch_of(part) for part in rollouts]


@dataclass(frozen=True, kw_only=True, slots=True)
class Steps:
    """The same batches, stepped through with and without compiled layers."""

    num_layers: int
    compiled: list[dict[str, float]]  # metrics by batch
    plain: list[dict[str, float]]
    num_graphs: list[int]  # compiled so far, after each batch


@pytest.fixture(
    scope="module",
    params=[
        # Traces as the others do, but leaves gradients to autograd, in a third of the time.
        pytest.param(("qwen3", False, "eager"), marks=pytest.mark.slow),
        pytest.param(("qwen3", False, "aot_eager"), marks=pytest.mark.slow),
        pytest.param(("qwen3", True, "aot_eager"), marks=pytest.mark.slow),
        pytest.param(("gemma2", False, "aot_eager"), marks=pytest.mark.slow),
        pytest.param(("gemma2", True, "aot_eager"), marks=pytest.mark.slow),
    ],
    ids=lambda param: f"{param[0]}-{'checkpointed' if param[1] else 'kept'}-{param[2]}",
)
def steps(request) -> Iterator[Steps]:
    architecture, checkpointing, backend = request.param
    compiled, plain = trainer_of(tiny_model(architecture)), trainer_of(tiny_model(architecture))
    torch._dynamo.reset()
    counters.clear()
    compile_layers(compiled.policy.module, backend=backend)
    if checkpointing:
        checkpoint_layers(compiled.policy.module)
    ours, num_graphs = [], []
    for batch in batches():
        ours.append(compiled.step(batch))
        num_graphs.append(counters["stats"]["unique_graphs"])
    yield Steps(
        num_layers=len(decoder_layers(compiled.policy.module)),
        compiled=ours,
        plain=[plain.step(batch) for batch in batches()],
        num_graphs=num_graphs,
    )
    torch._dynamo.reset()


def test_compiled_layers_give_the_same_steps(steps):
    for ours, theirs in zip(steps.compiled, steps.plain, strict=True):
        for name in ("loss", "entropy", "grad_norm"):
            assert ours[name] == pytest.approx(theirs[name], rel=1e-4, abs=1e-6), name


def test_all_layers_and_all_sizes_share_their_compiled_code(steps):
    assert steps.num_layers == 2
    assert steps.num_graphs[0] > 0
    assert set(steps.num_graphs) == {steps.num_graphs[0]}


def test_steps_after_a_warm_up_compile_nothing_more(monkeypatch):
    """Nor do they see its gradient."""
    eager = functools.partial(torch.compile, backend="eager")
    monkeypatch.setattr(torch, "compile", lambda f, *, dynamic, **_: eager(f, dynamic=dynamic))
    warm, plain = (
        trainer_of(tiny_model("qwen3"), compile_layers=compiles, logprob_chunk=16)
        for compiles in (True, False)
    )
    torch._dynamo.reset()
    counters.clear()
    warm.policy.warm_up()
    num_graphs = counters["stats"]["unique_graphs"]
    assert num_graphs > 1
    for batch in batches():
        whole = [replace(part, kept=None) for part in batch.microbatches]  # not truncated
        batch = replace(batch, microbatches=tuple(whole))
        ours, theirs = warm.step(batch), plain.step(batch)
        assert ours["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-4)
    assert counters["stats"]["unique_graphs"] == num_graphs
    torch._dynamo.reset()


def test_policies_that_share_a_model_warm_up(tmp_path, monkeypatch):
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    path = str(make_tiny_model(tmp_path))
    table = {"model": path, "lora": {"rank": 4}, "trainer": {"compile": True}}
    configs = [load_config({**table, "placement": {"trainer": "cpu"}, "seed": n}) for n in (0, 1)]
    trainers = build_trainers(configs, path=path, ranks=Ranks(), on_forward=lambda: None)
    for trainer in trainers:
        trainer.policy.warm_up()
        assert all(p.grad is None for p in trainer.policy.module.parameters())


def test_a_missing_compiler_is_reported_before_the_first_step(monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(ConfigError, match=r"trainer\.compile = true needs a C\+\+ compiler"):
        trainer_of(tiny_model("llama"), compile_layers=True)


def test_list_of_experts_is_refused_on_several_ranks_with_an_earlier_torch(monkeypatch):
    monkeypatch.delattr(FSDPModule, "set_reduce_scatter_unused_params", raising=False)
    model = tiny_model("qwen3")
    model.model.layers[0].mlp.experts = nn.ModuleList([nn.Linear(2, 2)])
    with pytest.raises(ConfigError, match=r"list of experts .* install torch 2\.13, or"):
        shard(model, root=model, meshes=ShardingMeshes(fsdp=cast(Any, None)))
