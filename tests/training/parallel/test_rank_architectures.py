"""Ranks compute what one rank computes with architectures that `millrace bench ranks` lacks.

With `pytest -m slow -s`, it prints the differences that docs/explanation/ranks.md has.
"""

import json
import os
import subprocess
import sys
from multiprocessing import forkserver
from pathlib import Path

import pytest
import torch
from architectures import MIXTURES, tiny_model

from millrace.bench import ranks as bench
from millrace.bench.rank_features import SMOOTH
from millrace.bench.rank_processes import run_ranks
from millrace.core.microbatch import MeshSizes
from millrace.models.sharding import shard_like
from millrace.run.mesh_checks import check_model_mesh

DENSE = ("llama", "qwen2", "qwen3", "gemma2", "gemma3", "phi3", "minicpm3")
COMPRESSED = ("deepseek_v2", "glm4_moe_lite")
OF_MESHES = {
    "tp 2": (
        *DENSE,
        *("qwen3_5", "qwen3_moe", "qwen2_moe", "mixtral", "glm4_moe", "qwen3_next"),
        *(*COMPRESSED, "glm4_moe_lite, plain queries"),
    ),
    "ep 2": (*MIXTURES, "qwen3_next", "phimoe", *COMPRESSED),
    "cp 2": (*DENSE, *MIXTURES, "phimoe", *COMPRESSED, "llama4"),
}
FEATURE = bench.Feature(settings={**SMOOTH, "trainer": {"replay_routes": False}})
# Layers whose inputs or outputs are divided (with biases in Qwen 2) or whole (Phi-3), and layers
# that compress keys and values.
ADAPTED = ("llama", "qwen2", "phi3", "minicpm3")
# A missing sum is a difference of about 1. Gradients of biases of keys are sums that nearly cancel.
FLOAT32_LIMIT = 1e-5


def train(ranks, folder, names, num_shares) -> dict[str, bench.Numbers]:
    shared = {"num_shares": num_shares, "device": "cpu"}
    return {name: bench.train(FEATURE, ranks, folder / name, **shared) for name in names}


def train_adapters(ranks, folder, names, num_shares, lora) -> dict[str, bench.Numbers]:
    """Gradients with factors that are not 0, as B is at first: then A has a gradient, too, and DoRA
    scales."""
    feature = bench.Feature(settings={**SMOOTH, "lora": lora})
    found = {}
    for name in names:
        trainer, config = bench.make_trainer(feature, ranks, folder / name, device="cpu")
        generator = torch.Generator().manual_seed(0)
        for weight in trainer.policy.weights().values():
            noise = 0.1 * torch.randn(weight.shape, generator=generator)
            weight.add_(shard_like(noise, weight))
        trainer.step(*bench._shares(feature, config, ranks, step=0, num_shares=num_shares))
        found[name] = bench._gradients(trainer)
    return found


def new_adapter(ranks, folder, names, num_shares) -> dict[str, bench.Numbers]:
    feature = bench.Feature(settings={**SMOOTH, "lora": {"rank": 4}})
    found = {}
    for name in names:
        trainer, _ = bench.make_trainer(feature, ranks, folder / name, device="cpu")
        found[name] = {key: bench._whole(w) for key, w in trainer.policy.weights().items()}
    return found


def differences(folder, mesh, names, *settings, run=train) -> dict[str, float]:
    """Those of a mesh from one rank, by architecture."""
    sizes = bench.MESHES[mesh]
    for name in names:
        model = tiny_model(name)
        check_model_mesh(sizes, model.config.get_text_config(), path=name)
        model.save_pretrained(folder / name / bench._model_name(is_mixture=False))
    arguments = (folder, names, sizes.num_data_ranks, *settings)
    alone = run_ranks(run, *arguments, sizes=MeshSizes())
    found = run_ranks(run, *arguments, sizes=sizes)
    return {name: bench._difference(found[name], alone[name]) for name in names}


def print_differences(folder, mesh, *names) -> None:
    forkserver.set_forkserver_preload(["millrace.bench.float64", __name__])  # in this order
    forkserver.ensure_running()
    print(json.dumps(differences(Path(folder), mesh, names)))


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("mesh", OF_MESHES)
def test_ranks_compute_what_one_rank_computes_with_other_architectures(tmp_path, mesh):
    found = differences(tmp_path, mesh, OF_MESHES[mesh])
    print(f"\n{mesh}: {max(found.values()):.1e} at most, of {found}")
    assert all(worst < FLOAT32_LIMIT for worst in found.values()), found


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("mesh", ["tp 2", "tp 2 fsdp 2"])
@pytest.mark.parametrize("dora", [False, True], ids=["lora", "dora"])
def test_adapters_of_ranks_that_share_products_have_the_gradients_of_one_rank(tmp_path, dora, mesh):
    lora = {"rank": 4, "dora": dora}
    found = differences(tmp_path, mesh, ADAPTED, lora, run=train_adapters)
    print(f"\n{mesh}, {lora}: {max(found.values()):.1e} at most, of {found}")
    assert all(worst < FLOAT32_LIMIT for worst in found.values()), found


@pytest.mark.slow
@pytest.mark.parametrize("mesh", ["fsdp 2", "tp 2"])
def test_ranks_begin_with_the_adapter_of_one_rank(tmp_path, mesh):
    found = differences(tmp_path, mesh, ("qwen3_5", "qwen3_moe"), run=new_adapter)
    assert set(found.values()) == {0.0}, found


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_differences_of_ranks_that_share_products_vanish_in_float64(tmp_path):
    code = f"import sys, millrace.bench.float64, {__name__} as t; t.print_differences(*sys.argv"
    command = [sys.executable, "-c", f"{code}[1:])", str(tmp_path), "tp 2", *DENSE, "qwen3_5"]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    printed = subprocess.run(command, stdout=subprocess.PIPE, env=env, check=True).stdout
    found = json.loads(printed.splitlines()[-1])
    print(f"\ntp 2 in float64: {max(found.values()):.1e} at most, of {found}")
    assert all(worst < bench.FLOAT64_LIMIT for worst in found.values()), found
