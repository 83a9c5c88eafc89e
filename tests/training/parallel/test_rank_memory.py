"""What rank_bytes() expects a rank to hold is what a trainer that was built holds."""

import dataclasses

import pytest
import torch

from millrace.bench import ranks as bench
from millrace.bench.rank_features import CRITIC
from millrace.bench.rank_processes import run_ranks
from millrace.config.training import MeshConfig
from millrace.models.devices import ModelSize, rank_bytes
from millrace.models.sharding import local_part
from millrace.training.parallel.ranks import Ranks

ADAMW = {"optimizer": {"type": "adamw"}}
FEATURES = {
    "critic": bench.Feature(settings={**CRITIC, **ADAMW}),
    "lora of some": bench.Feature(
        settings={"lora": {"rank": 16, "target_modules": ["q_proj", "experts.down_proj"]}, **ADAMW},
        is_mixture=True,
    ),
    "lora of experts": bench.Feature(
        settings={"lora": {"rank": 16}, "trainer": {"dtype": "bfloat16"}, **ADAMW}, is_mixture=True
    ),
}


def held_and_expected(ranks: Ranks, folder, names) -> dict[str, tuple[int, int]]:
    """Bytes of weights, gradients and optimizer state after a step, and rank_bytes()."""
    found = {}
    for name in names:
        feature = FEATURES[name]
        trainer, config = bench.make_trainer(feature, ranks, folder, device="cpu")
        batches = bench._batches(feature, config, step=0, num_ranks=ranks.sizes.num_data_ranks)
        trainer.step(*(batch.of_rank(ranks.data_rank) for batch in batches))
        held = 0
        for model in filter(None, (trainer.policy, trainer.critic)):
            parameters = [*model.module.parameters()]
            # The critic has freed its gradients, beside which there were those of the policy.
            trained = [p for p in parameters if p.requires_grad]
            states = [v for s in model._optimizer.state.values() for v in s.values()]
            states = [v for v in states if isinstance(v, torch.Tensor) and v.dim()]
            held += sum(local_part(tensor).nbytes for tensor in (*parameters, *trained, *states))
        mesh = MeshConfig(**dataclasses.asdict(ranks.sizes))
        config = config.updated(trainer={"ranks": ranks.sizes.num_ranks, "mesh": mesh})
        found[name] = (held, rank_bytes(config, ModelSize.read(config)))
    return found


def make_models(folder) -> None:
    for is_mixture in (False, True):
        bench._make_model(folder, is_mixture=is_mixture)


def test_a_rank_holds_what_is_expected(tmp_path):
    make_models(tmp_path)
    for name, (held, expected) in held_and_expected(Ranks(), tmp_path, FEATURES).items():
        assert expected <= held < 1.02 * expected, name


@pytest.mark.slow
@pytest.mark.parametrize("mesh", ["fsdp 2", "tp 2", "ep 2"])
def test_ranks_share_what_is_expected(tmp_path, mesh):
    make_models(tmp_path)
    sizes = bench.MESHES[mesh]
    names = [name for name, feature in FEATURES.items() if feature.fits(sizes)]
    found = run_ranks(held_and_expected, tmp_path, names, sizes=sizes)
    for name, (held, expected) in found.items():
        assert expected <= held < 1.1 * expected, name
