"""Checkpoints of several ranks: a model moves from one rank to several and back unchanged."""

from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from old_states import change_state, number_parameters
from safetensors.torch import load_file, save_file
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM

from millrace.bench import ranks as bench
from millrace.bench.rank_processes import run_ranks
from millrace.config import RunConfig
from millrace.core.microbatch import MeshSizes
from millrace.models.sharding import _host_mesh, local_part, whole
from millrace.training.build import build_trainer, seed_everything
from millrace.training.checkpoints.directory import CRITIC, damage_to, write_checkpoint
from millrace.training.checkpoints.snapshot import OPTIMIZER
from millrace.training.parallel.ranks import Ranks
from millrace.training.trainer import Trainer

MODELS = {
    "critic": bench.Feature(settings=bench.FEATURES["critic"].settings),
    "mixture": bench.Feature(is_mixture=True, settings={"optimizer": {"offload": True}}),
    "lora": bench.Feature(is_mixture=True, settings={"lora": {"rank": 4}}),  # of experts, too
}
Tensors = dict[str, torch.Tensor]


def config_of(kind: str, folder: Path) -> RunConfig:
    model = folder / bench._model_name(is_mixture=MODELS[kind].is_mixture)
    return RunConfig.model_validate(
        {
            "model": str(model),
            "scorers": ["exact"],
            "tasks": {"path": "tasks.jsonl"},
            "placement": {"trainer": "cpu"},
            **MODELS[kind].settings,
        }
    )


def trainer_of(
    config: RunConfig, ranks: Ranks | None = None, *, checkpoint: Path | None = None
) -> Trainer:
    seed_everything(0)
    path = config.model.path if config.lora else checkpoint or config.model.path
    trainer = build_trainer(config, path=str(path), ranks=ranks)
    if checkpoint is not None:
        trainer.restore(checkpoint)
    return trainer


def save(
    trainer: Trainer, directory: Path, ranks: Ranks | None = None, *, merged_into: str | None = None
) -> None:
    snapshot = trainer.snapshot(merged_into=merged_into)
    write_checkpoint(
        directory,
        write=lambda folder: snapshot.write(folder, ranks),
        run_state={},
        needed_bytes=trainer.state_bytes(),
        ranks=ranks,
    )


def contents(trainer: Trainer) -> Tensors:
    """All weights and optimizer states by name, whole on every rank."""
    found: Tensors = {}
    for model in filter(None, (trainer.policy, trainer.critic)):
        kind = type(model).__name__
        found |= {f"{kind} {name}": weight for name, weight in model.weights().items()}
        for name, values in model.optimizer_state()["state"].items():
            found |= {f"{kind} {name} {key}": value for key, value in values.items()}
    return {name: whole(tensor.detach()).clone() for name, tensor in found.items()}


def assert_equal(found: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name


def check_host_gathering(weights: Mapping[str, torch.Tensor]) -> None:
    """Ranks that share a GPU gather over the groups that they have, whichever meshes these form."""
    for name, weight in weights.items():
        if isinstance(weight, DTensor):
            on_host = DTensor.from_local(
                weight.to_local(),
                _host_mesh(weight.device_mesh),
                weight.placements,
                run_check=False,
                shape=weight.shape,
                stride=weight.stride(),
            )
            assert torch.equal(on_host.full_tensor(), whole(weight)), name


def pass_through(ranks: Ranks, kinds: list[str], folder: Path) -> None:
    """Load checkpoints of one rank and save what was loaded, on several ranks."""
    for kind in kinds:
        run = folder / "runs" / kind
        trainer = trainer_of(config_of(kind, folder), ranks, checkpoint=run / "step_1")
        expected = torch.load(run / "contents.pt", weights_only=True)
        assert_equal(contents(trainer), expected)
        check_host_gathering(trainer.policy.weights())
        parts = trainer.snapshot().parts
        own = sum(local_part(part).numel() for part in parts[OPTIMIZER].values())
        moments = [name for name in expected if "PolicyModel" in name and "exp_avg" in name]
        if kind != "lora":  # each value is written by one rank
            assert ranks.sum([own]) == [sum(expected[name].numel() for name in moments)]
            assert own <= 0.6 * ranks.sum([own])[0]
        merged_into = "merged" if kind == "lora" else None
        save(trainer, run / "step_2", ranks.for_thread(), merged_into=merged_into)


def check_meshes(folder: Path, kinds: list[str], meshes: list[MeshSizes]) -> None:
    for is_mixture in {MODELS[kind].is_mixture for kind in kinds}:
        bench._make_model(folder, is_mixture=is_mixture)
    for kind in kinds:
        config = config_of(kind, folder)
        trainer = trainer_of(config)
        trainer.step(*bench._batches(MODELS[kind], config, step=0, num_ranks=1))
        save(trainer, folder / "runs" / kind / "step_1")
        if trainer.critic is not None:  # as the release before wrote it
            (file,) = (folder / "runs" / kind / "step_1" / CRITIC).iterdir()
            save_file(load_file(file), file.with_name("critic.safetensors"))
            file.unlink()
            change_state(folder / "runs" / kind / "step_1", number_parameters)
        torch.save(contents(trainer), folder / "runs" / kind / "contents.pt")
    for sizes in meshes:
        run_ranks(pass_through, kinds, folder, sizes=sizes)
        for kind in kinds:
            run = folder / "runs" / kind
            check_files(run)
            resumed = trainer_of(config_of(kind, folder), checkpoint=run / "step_2")
            expected = torch.load(run / "contents.pt", weights_only=True)
            assert_equal(contents(resumed), expected)
            model = "merged" if kind == "lora" else "."
            loaded = AutoModelForCausalLM.from_pretrained(run / "step_2" / model)
            if kind != "lora":
                found = {f"PolicyModel {n}": p for n, p in loaded.named_parameters()}
                assert_equal(found, {name: expected[name] for name in found})


def check_files(folder: Path) -> None:
    """No leftovers, all files are in the manifest, and damage to a rank's file is noticed."""
    assert {path.name for path in folder.iterdir()} == {"step_1", "step_2", "contents.pt"}
    files = [path for path in (folder / "step_2").rglob("*") if path.is_file()]
    assert not any("weights" in path.parts for path in files)
    assert damage_to(folder / "step_2") is None
    for path in files:
        if path.name.startswith("shard-00002"):
            data = path.read_bytes()
            path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
            assert damage_to(folder / "step_2") is not None
            path.write_bytes(data)


@pytest.mark.slow
def test_checkpoint_moves_from_one_rank_to_several_and_back(tmp_path):
    meshes = [MeshSizes(dp_replicate=2, dp_shard=2), MeshSizes(dp_shard=2, tp=2, ep=2)]
    check_meshes(tmp_path, ["critic", "mixture", "lora"], meshes)
