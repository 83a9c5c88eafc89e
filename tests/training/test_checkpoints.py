import json
from pathlib import Path

import numpy as np
import pytest
import torch
from architectures import MIXTURE, MIXTURES, tiny_model
from batches import batch_of, mixed_rollouts, trainer_of
from fake_checkpoint import write_fake_checkpoint
from full_disk import files_of_at_most
from old_states import change_state, number_parameters
from transformers import AutoModelForCausalLM

from millrace.config import ModelConfig
from millrace.core.errors import CheckpointError, ConfigError
from millrace.models.attention.packed import PACKED
from millrace.models.loading import load_model
from millrace.run.resume import check_same_model
from millrace.training.checkpoints.directory import (
    CRITIC,
    FoundCheckpoint,
    check_same_critic,
    newest_checkpoint,
    prune_checkpoints,
    read_run_state,
    write_checkpoint,
)
from millrace.training.checkpoints.snapshot import STATE_FORMAT


def batches(num: int):
    return [batch_of(mixed_rollouts(np.random.default_rng(seed))) for seed in range(num)]


def save(trainer, directory: Path, **run_state) -> None:
    write_checkpoint(
        directory,
        write=trainer.snapshot().write,
        run_state={"step": trainer.steps_done, **run_state},
        needed_bytes=trainer.state_bytes(),
    )


def load_trainer(directory: Path, **settings):
    model = load_model(
        str(directory),
        dtype=torch.float32,
        device=torch.device("cpu"),
        attention=PACKED,
    )
    trainer = trainer_of(model, **settings)
    trainer.restore(directory)
    return trainer


def fake_checkpoint(run_dir: Path, step: int) -> Path:
    directory = run_dir / "checkpoints" / f"step_{step}"
    write_fake_checkpoint(directory, run_state={"step": step})
    return directory


def flip_a_bit(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


@pytest.mark.parametrize("architecture", ["qwen3", "gemma2", MIXTURE])
def test_a_resumed_trainer_continues_bit_for_bit(tmp_path, architecture):
    first, second = batches(4)[:2], batches(4)[2:]
    settings = {"weight_decay": 0.1, "learning_rate": 3e-3}
    trainer = trainer_of(tiny_model(architecture), **settings)
    for batch in first:
        trainer.step(batch)
    save(trainer, tmp_path / "step_2")
    drawn = torch.rand(3)
    metrics = [trainer.step(batch) for batch in second]

    torch.manual_seed(999)
    resumed = load_trainer(tmp_path / "step_2", **settings)
    assert resumed.steps_done == 2
    assert torch.equal(torch.rand(3), drawn)
    assert [resumed.step(batch) for batch in second] == metrics
    for name, weight in trainer.policy.weights().items():
        assert torch.equal(resumed.policy.weights()[name], weight), name


def test_a_trainer_state_from_before_format_numbers_is_loaded(tmp_path):
    first, second = batches(2)
    trainer = trainer_of(tiny_model("qwen3"))
    trainer.step(first)
    save(trainer, tmp_path / "step_1")
    change_state(tmp_path / "step_1", number_parameters)
    resumed = load_trainer(tmp_path / "step_1")
    assert resumed.step(second) == trainer.step(second)


def test_a_trainer_state_of_a_later_format_is_refused(tmp_path):
    save(trainer_of(tiny_model("qwen3")), tmp_path / "step_0")
    change_state(tmp_path / "step_0", lambda state: state.update(format=STATE_FORMAT + 1))
    with pytest.raises(CheckpointError, match="has format 4, and this version of Millrace reads"):
        load_trainer(tmp_path / "step_0")


@pytest.mark.parametrize("architecture", ["llama", "qwen3", "gemma3", *MIXTURES[::2]])
def test_a_checkpoint_is_a_hugging_face_model(tmp_path, architecture):
    trainer = trainer_of(tiny_model(architecture))
    trainer.step(batches(1)[0])
    save(trainer, tmp_path / "step_1")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "step_1")
    assert loaded.dtype == torch.float32
    assert "millrace" not in (loaded.config._attn_implementation or "")
    assert "millrace" not in (tmp_path / "step_1" / "config.json").read_text()
    for name, weight in trainer.policy.weights().items():
        assert torch.equal(loaded.state_dict()[name], weight), name
    tokens = torch.randint(0, 60, (1, 9))
    plain = tiny_model(architecture)
    plain.load_state_dict(trainer.policy.module.state_dict())
    with torch.no_grad():
        torch.testing.assert_close(loaded(tokens).logits, plain(tokens).logits)


def test_the_run_state_is_restored(tmp_path):
    directory = tmp_path / "checkpoints" / "step_3"
    state = {"step": 3, "version": 3, "next_number": 12, "unfinished": [7, 9]}
    write_fake_checkpoint(directory, run_state=state)
    assert read_run_state(directory) == state
    assert names(directory.parent) == {"step_3"}


def test_the_newest_undamaged_checkpoint_is_found(tmp_path):
    assert newest_checkpoint(tmp_path) == FoundCheckpoint()
    fake_checkpoint(tmp_path, 9)
    expected = fake_checkpoint(tmp_path, 10)
    (tmp_path / "checkpoints" / "step_x").mkdir()
    (tmp_path / "checkpoints" / ".unfinished_step_12").mkdir()
    (tmp_path / "checkpoints" / "step_99").write_text("a file")
    assert newest_checkpoint(tmp_path) == FoundCheckpoint(directory=expected)


def missing(directory: Path) -> None:
    (directory / "trainer_state.pt").unlink()


def cut(directory: Path) -> None:
    (directory / "merged" / "model.safetensors").write_bytes(b"12")


def changed(directory: Path) -> None:
    flip_a_bit(directory / "run_state.json")


def without_manifest(directory: Path) -> None:
    (directory / "manifest.json").unlink()


def half_a_manifest(directory: Path) -> None:
    data = (directory / "manifest.json").read_bytes()
    (directory / "manifest.json").write_bytes(data[: len(data) // 2])


def emptied(directory: Path) -> None:
    for file in directory.glob("*.*"):
        file.unlink()


def manifest_of_nothing(directory: Path) -> None:
    (directory / "manifest.json").write_text('{"files": {}}')


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (missing, "has no trainer_state.pt"),
        (cut, "has a merged/model.safetensors of 2 bytes instead of 5"),
        (changed, "has a damaged run_state.json: its checksum differs"),
        (without_manifest, "has no manifest.json"),
        (half_a_manifest, "has a manifest.json that cannot be read"),
        (emptied, "has no manifest.json"),
        (manifest_of_nothing, "has no config.json"),
    ],
)
def test_a_damaged_checkpoint_is_named_and_the_one_before_is_used(tmp_path, damage, reason):
    good, bad = fake_checkpoint(tmp_path, 9), fake_checkpoint(tmp_path, 10)
    damage(bad)
    found = newest_checkpoint(tmp_path)
    assert found.directory == good
    assert found.refused[0].startswith(f"Checkpoint {str(bad)!r} is not used: it {reason}")
    assert len(found.refused) == 1
    assert "\n" not in found.refused[0]


def test_extra_files_in_a_checkpoint_are_ignored(tmp_path):
    directory = fake_checkpoint(tmp_path, 9)
    (directory / "README.md").write_text("a fine model")
    assert newest_checkpoint(tmp_path).directory == directory


def test_a_damaged_trainer_state_is_named(tmp_path):
    trainer = trainer_of(tiny_model("llama"))
    save(trainer, tmp_path / "step_0")
    (tmp_path / "step_0" / "trainer_state.pt").write_bytes(b"damaged")
    with pytest.raises(CheckpointError, match=r"trainer state in .*step_0' cannot be read"):
        load_trainer(tmp_path / "step_0")


def test_pruning_keeps_the_newest(tmp_path):
    for step in (2, 30, 4, 100):
        fake_checkpoint(tmp_path, step)
    folder = tmp_path / "checkpoints"
    prune_checkpoints(folder, keep=2, good=set())
    assert names(folder) == {"step_30", "step_100"}
    prune_checkpoints(folder, keep=5, good=set())
    assert names(folder) == {"step_30", "step_100"}


def test_pruning_counts_only_good_checkpoints(tmp_path):
    paths = {step: fake_checkpoint(tmp_path, step) for step in (1, 2, 3, 4, 5)}
    for step in (1, 3, 5):
        missing(paths[step])
    folder = tmp_path / "checkpoints"
    prune_checkpoints(folder, keep=1, good=set())
    assert names(folder) == {"step_4", "step_5"}
    missing(paths[4])
    fake_checkpoint(tmp_path, 2)
    prune_checkpoints(folder, keep=1, good=set())
    assert names(folder) == {"step_2", "step_4", "step_5"}  # the only good one stays


def test_pruning_does_not_read_checkpoints_known_to_be_good(tmp_path):
    known = fake_checkpoint(tmp_path, 2)
    other = fake_checkpoint(tmp_path, 1)
    missing(known)  # not read again
    good = {"step_2"}
    prune_checkpoints(tmp_path / "checkpoints", keep=2, good=good)
    assert good == {"step_2", "step_1"}
    prune_checkpoints(tmp_path / "checkpoints", keep=1, good=good)
    assert good == {"step_2"}
    assert not other.exists()


def test_a_repeated_step_replaces_its_checkpoint(tmp_path):
    directory = fake_checkpoint(tmp_path, 4)
    write_fake_checkpoint(directory, run_state={"again": True})
    assert read_run_state(directory) == {"again": True}
    assert names(directory.parent) == {"step_4"}


# The first limit is hit by the model's weights, the second by the larger optimizer state.
@pytest.mark.parametrize("limit", [40_000, 120_000])
def test_a_disk_that_fills_up_leaves_the_old_checkpoint_and_nothing_half_written(tmp_path, limit):
    trainer = trainer_of(tiny_model("llama"))
    trainer.step(batches(1)[0])
    directory = tmp_path / "checkpoints" / "step_1"
    save(trainer, directory, marker="old")
    before = {path.name: path.read_bytes() for path in directory.iterdir()}
    with files_of_at_most(limit), pytest.raises(CheckpointError) as caught:
        save(trainer, directory, marker="new")
    sentence = str(caught.value)
    assert "file too large" in sentence.lower()
    assert sentence.startswith(f"Checkpoint '{directory}' could not be written (")
    assert "it needs about 0.000235 GB and" in sentence
    assert "free some space" in sentence
    assert "\n" not in sentence
    assert names(directory.parent) == {"step_1"}
    assert {path.name: path.read_bytes() for path in directory.iterdir()} == before
    save(trainer, directory, marker="new")  # with room again, all is well
    assert json.loads((directory / "run_state.json").read_text())["marker"] == "new"


def test_a_disk_without_room_is_noticed_before_anything_is_written(tmp_path):
    written = []
    with pytest.raises(CheckpointError, match=r"the disk is too full\): it needs about 1e\+06 GB"):
        write_checkpoint(
            tmp_path / "step_1", write=written.append, run_state={}, needed_bytes=10**18 // 1000
        )
    assert written == []
    assert names(tmp_path) == set()


def test_a_folder_that_cannot_be_made_is_one_sentence(tmp_path):
    (tmp_path / "checkpoints").write_text("in the way")
    with pytest.raises(CheckpointError, match=r"could not be written \(file exists\)"):
        fake_checkpoint(tmp_path, 1)


def test_leftovers_of_a_killed_process_are_removed_by_the_next_checkpoint(tmp_path):
    left = tmp_path / "checkpoints" / ".unfinished_step_3"
    left.mkdir(parents=True)
    (left / "model.safetensors").write_bytes(b"half")
    fake_checkpoint(tmp_path, 4)
    assert names(tmp_path / "checkpoints") == {"step_4"}


def test_a_run_resumes_with_a_critic_only_if_it_had_one(tmp_path):
    check_same_critic(tmp_path, has_critic=False)
    with pytest.raises(ConfigError, match=r"was trained without a critic; .* leave out the"):
        check_same_critic(tmp_path, has_critic=True)
    (tmp_path / CRITIC).mkdir()
    check_same_critic(tmp_path, has_critic=True)
    with pytest.raises(ConfigError, match=r"was trained with a critic; to resume, add the"):
        check_same_critic(tmp_path, has_critic=False)


@pytest.mark.parametrize(
    ("architecture", "changes", "weight", "found", "wanted"),
    [
        ("qwen3", {"intermediate_size": 96}, "mlp.gate_proj.weight", [48, 32], [96, 32]),
        ("qwen3", {"head_dim": 16}, "self_attn.q_proj.weight", [32, 32], [64, 32]),
        ("qwen3", {"num_key_value_heads": 1}, "self_attn.k_proj.weight", [16, 32], [8, 32]),
        (MIXTURE, {"num_experts": 4}, "mlp.experts.gate_up_proj", [8, 32, 32], [4, 32, 32]),
        (MIXTURE, {"mlp_only_layers": [0]}, "mlp.experts.gate_up_proj", [8, 32, 32], None),
        ("llama", {"attention_bias": True}, "self_attn.q_proj.bias", None, [32]),
    ],
)
def test_a_checkpoint_of_another_model_is_named_by_the_first_difference_of_weights(
    tmp_path, architecture, changes, weight, found, wanted
):
    def check(**changes) -> None:
        config = tiny_model(architecture).config
        for name, value in changes.items():
            setattr(config, name, value)
        config.save_pretrained(tmp_path / "model")
        check_same_model(tmp_path / "step_1", ModelConfig(path=str(tmp_path / "model")))

    save(trainer_of(tiny_model(architecture)), tmp_path / "step_1")
    check(max_position_embeddings=512, pad_token_id=3, dtype=torch.bfloat16)
    with pytest.raises(ConfigError) as caught:
        check(**changes)
    saved, ours = ("absent" if s is None else f"of shape {s}" for s in (found, wanted))
    assert str(caught.value) == (
        f"{str(tmp_path / 'step_1')!r} holds a model whose model.layers.0.{weight} is {saved}, and"
        f" that of model.path = {str(tmp_path / 'model')!r} is {ours}; resume with the model that"
        " the run began with."
    )
