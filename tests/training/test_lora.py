"""Training an adapter: what learns, what stays, and that engines compute with it what it means."""

import numpy as np
import pytest
import torch
from architectures import tiny_model
from batches import batch_of, mixed_rollouts, trainer_of
from engine_rig import finish_all, make_engine, make_request, prompt_of

from millrace.config import LoraConfig
from millrace.core.errors import CheckpointError
from millrace.core.records import Rollout
from millrace.environments.token_record import rollout_of
from millrace.inference.embedded.engine import EmbeddedEngine
from millrace.models.lora.trained import TrainedAdapter
from millrace.training.losses.policy_loss import PolicyLoss, ReferenceKl
from millrace.training.trainer import Trainer

LORA = LoraConfig(rank=4, alpha=8.0)
SAMPLING = ({}, {"temperature": 0.7}, {"top_k": 5}, {"top_p": 0.8, "temperature": 1.3})


def lora_trainer(architecture: str = "qwen3", lora: LoraConfig = LORA, **settings) -> Trainer:
    model = tiny_model(architecture)
    torch.manual_seed(3)
    adapter = TrainedAdapter(model, lora, model_path="tiny")
    return trainer_of(model, adapter=adapter, **settings)


def batches(num: int):
    rng = np.random.default_rng(7)
    return [batch_of(mixed_rollouts(rng, 6)) for _ in range(num)]


def rollouts_by(engine: EmbeddedEngine) -> list[Rollout]:
    """Sampled by the engine with its present weights."""
    requests = [
        make_request(str(i), prompt=prompt_of(4 + 3 * i, seed=i), n=2, seed=i, **settings)
        for i, settings in enumerate(SAMPLING)
    ]
    done = finish_all(engine, requests)
    return [
        rollout_of(request.prompt, completion, request.sampling)
        for request in requests
        for completion in done[request.id]
    ]


@torch.no_grad()
def mismatch(trainer: Trainer, rollouts: list[Rollout]) -> float:
    """The most by which engine and trainer differ about a token."""
    (microbatch,) = batch_of(rollouts).microbatches
    logprobs = trainer.policy.logprobs(microbatch).logprobs
    return (logprobs - torch.from_numpy(microbatch.engine_logprobs)).abs().max().item()


ALL, RSLORA = LORA, LoraConfig(rank=4, rslora=True)
SOME, DORA = LoraConfig(target_modules=("v_proj", "up_proj")), LoraConfig(rank=4, dora=True)


# Every pair of choices, not every combination.
@pytest.mark.parametrize(
    ("lora", "apply", "architecture", "decode_steps"),
    [
        pytest.param(ALL, "merged", "llama", 1, id="all-merged"),
        pytest.param(ALL, "unmerged", "qwen3", 4, id="all-unmerged"),
        pytest.param(RSLORA, "merged", "qwen3", 4, id="rslora-merged"),
        pytest.param(RSLORA, "unmerged", "llama", 1, id="rslora-unmerged"),
        pytest.param(SOME, "merged", "llama", 4, id="some-merged"),
        pytest.param(SOME, "unmerged", "qwen3", 1, id="some-unmerged"),
        pytest.param(DORA, "merged", "qwen3", 1, id="dora-merged"),
        pytest.param(DORA, "unmerged", "llama", 4, id="dora-unmerged"),
        pytest.param(ALL, "merged", "qwen2_moe", 1, id="mixture-merged"),
        pytest.param(ALL, "unmerged", "qwen2_moe", 4, id="mixture-unmerged"),
    ],
)
def test_an_engine_computes_with_a_swapped_adapter_what_the_trainer_does(
    architecture, decode_steps, lora, apply
):
    lora = lora.model_copy(update={"apply": apply})
    trainer = lora_trainer(architecture, lora)
    engine = make_engine(architecture, lora=lora, decode_steps=decode_steps, eos_ids=())
    assert mismatch(trainer, rollouts_by(engine)) < 1e-5
    for version, batch in enumerate(batches(3), start=1):
        stale = rollouts_by(engine)
        trainer.step(batch)
        assert mismatch(trainer, stale) > 1e-3
        engine.swap(trainer.policy.weights(), version=version)
        assert mismatch(trainer, rollouts_by(engine)) < 1e-5


@pytest.mark.parametrize("dora", [False, True])
def test_only_the_adapter_is_trained(dora):
    lora = LORA.model_copy(update={"dora": dora})
    trainer = lora_trainer(lora=lora, weight_decay=0.1)
    before = {name: p.detach().clone() for name, p in trainer.policy.module.named_parameters()}
    for batch in batches(3):
        trainer.step(batch)
    changed = {
        name
        for name, p in trainer.policy.module.named_parameters()
        if not torch.equal(p, before[name])
    }
    assert changed == {name for name in before if ".lora_" in name}
    weights = trainer.policy.weights()
    assert trainer.state_bytes() == 3 * 4 * sum(w.numel() for w in weights.values())
    state = trainer.policy.optimizer_state()["state"]
    assert len(state) == len(weights) == len(changed)


def test_gradient_checkpointing_gives_the_adapter_the_same_gradient():
    plain, checkpointed = lora_trainer(), lora_trainer(gradient_checkpointing=True)
    for batch in batches(2):
        expected, metrics = plain.step(batch), checkpointed.step(batch)
        assert metrics["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-4)
    for name, weight in plain.policy.weights().items():
        torch.testing.assert_close(
            checkpointed.policy.weights()[name], weight, rtol=0, atol=1e-4, msg=name
        )


@pytest.mark.parametrize("dora", [False, True])
def test_a_resumed_adapter_continues_bit_for_bit(tmp_path, dora):
    first, second = batches(4)[:2], batches(4)[2:]
    lora = LORA.model_copy(update={"dora": dora})
    trainer = lora_trainer(lora=lora, weight_decay=0.1)
    for batch in first:
        trainer.step(batch)
    trainer.snapshot().write(tmp_path)
    assert not (tmp_path / "config.json").exists()
    metrics = [trainer.step(batch) for batch in second]
    resumed = lora_trainer(lora=lora, weight_decay=0.1)
    resumed.restore(tmp_path)
    assert resumed.steps_done == 2
    assert [resumed.step(batch) for batch in second] == metrics
    for name, weight in trainer.policy.weights().items():
        assert torch.equal(resumed.policy.weights()[name], weight), name


def test_a_checkpoint_without_its_adapter_is_not_resumed_from(tmp_path):
    trainer = lora_trainer()
    trainer.snapshot().write(tmp_path)
    (tmp_path / "adapter_model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"The adapter in .* cannot be read"):
        trainer.restore(tmp_path)


@pytest.mark.parametrize("lora", [LORA, LoraConfig(rank=4, dora=True)], ids=["lora", "dora"])
def test_the_base_model_of_an_adapter_is_the_reference(lora):
    loss = PolicyLoss(kl=ReferenceKl(kl=0.5))
    trainer = lora_trainer(lora=lora, loss=loss)
    whole = trainer_of(tiny_model("qwen3"))
    first, second = batches(2)
    assert trainer.step(first)["kl"] == pytest.approx(0, abs=1e-6)
    assert trainer.step(second)["kl"] > 1e-6  # it has moved, and knows from where
    (asked,) = trainer.policy.with_reference_logprobs(first).microbatches
    with torch.no_grad():
        expected = whole.policy.logprobs(first.microbatches[0]).logprobs
        moved = trainer.policy.logprobs(first.microbatches[0]).logprobs
    np.testing.assert_allclose(asked.reference_logprobs, expected, rtol=0, atol=1e-5)
    assert (moved - expected).abs().max() > 1e-3  # the adapter is back
    assert all(
        w.requires_grad for n, w in trainer.policy.module.named_parameters() if ".lora_" in n
    )
