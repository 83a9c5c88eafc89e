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
from architectures import MIXTURES, tiny_model

from millrace.bench import ranks as bench
from millrace.bench.rank_features import SMOOTH
from millrace.bench.rank_processes import run_ranks
from millrace.core.microbatch import MeshSizes
from millrace.run.mesh_checks import check_model_mesh

DENSE = ("llama", "qwen2", "qwen3", "gemma2", "gemma3")
OF_MESHES = {
    "tp 2": (*DENSE, "qwen3_5", "qwen3_moe", "qwen2_moe", "mixtral", "glm4_moe", "qwen3_next"),
    "ep 2": (*MIXTURES, "qwen3_next", "phimoe", "deepseek_v2"),
    "cp 2": (*DENSE, *MIXTURES, "phimoe", "deepseek_v2", "llama4"),
}
FEATURE = bench.Feature(settings={**SMOOTH, "trainer": {"replay_routes": False}})
# A missing sum is a difference of about 1. Gradients of biases of keys are sums that nearly cancel.
FLOAT32_LIMIT = 1e-5


def train(ranks, folder, names, num_shares) -> dict[str, bench.Numbers]:
    shared = {"num_shares": num_shares, "device": "cpu"}
    return {name: bench.train(FEATURE, ranks, folder / name, **shared) for name in names}


def differences(folder, mesh, names) -> dict[str, float]:
    """Those of a mesh from one rank, by architecture."""
    sizes = bench.MESHES[mesh]
    for name in names:
        model = tiny_model(name)
        check_model_mesh(sizes, model.config.get_text_config(), path=name)
        model.save_pretrained(folder / name / bench._model_name(is_mixture=False))
    arguments = (folder, names, sizes.num_data_ranks)
    alone = run_ranks(train, *arguments, sizes=MeshSizes())
    found = run_ranks(train, *arguments, sizes=sizes)
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
@pytest.mark.timeout(900)
def test_differences_of_ranks_that_share_products_vanish_in_float64(tmp_path):
    code = f"import sys, millrace.bench.float64, {__name__} as t; t.print_differences(*sys.argv"
    command = [sys.executable, "-c", f"{code}[1:])", str(tmp_path), "tp 2", *DENSE, "qwen3_5"]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    printed = subprocess.run(command, stdout=subprocess.PIPE, env=env, check=True).stdout
    found = json.loads(printed.splitlines()[-1])
    print(f"\ntp 2 in float64: {max(found.values()):.1e} at most, of {found}")
    assert all(worst < bench.FLOAT64_LIMIT for worst in found.values()), found
