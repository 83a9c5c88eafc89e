"""Several policies with adapters on one model: shared passes train each as if it were alone."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from architectures import tiny_model
from batches import batch_of, mixed_rollouts, sharing_rollouts, trainer_of

from millrace.config import LoraConfig
from millrace.core.microbatch import Batch
from millrace.core.records import Rollout
from millrace.training.adapters.adapted_model import AdaptedModel
from millrace.training.adapters.policy_adapter import PolicyAdapter
from millrace.training.adapters.shared_passes import clipped_gradients
from millrace.training.losses.recipes import build_loss
from millrace.training.packing.splitting import joined
from millrace.training.trainer import Trainer, step_together

LORA = LoraConfig(rank=3, alpha=8.0)
VERSION = 3  # of the weights, where tokens are stale
# One table for each policy.
LOSSES: Sequence[Mapping[str, Any]] = (
    {"type": "dapo", "max_token_staleness": 1},
    {"type": "cispo", "max_token_staleness": 2, "staleness_half_life": 1},
    {"type": "gspo"},
)


def trainers_of(
    num: int,
    *,
    architecture: str = "qwen3",
    alone: int | None = None,
    passes: list[int] | None = None,
    losses: Sequence[Mapping[str, Any]] = (),
) -> list[Trainer]:
    """Of `num` policies on one model, or only the trainer number `alone`. `passes`: where the rows
    of each pass are counted. `losses`: of each policy; the default one if empty."""
    model = tiny_model(architecture)
    if passes is not None:
        embeddings: Any = model.get_input_embeddings()
        embeddings.register_forward_pre_hook(lambda _, args: passes.append(args[0].numel()))
    adapted = AdaptedModel(model)
    made: list[Trainer] = []
    for number in range(num):
        options: dict[str, Any] = {"model_path": "tiny", "adapted": adapted, "seed": number}
        adapter = PolicyAdapter(model, LORA, **options)
        rng = torch.Generator().manual_seed(7 + number)
        for weight in adapter.trained.values():  # as if it had been trained: B is not 0
            weight.data += 0.1 * torch.randn(weight.shape, generator=rng)
        if alone in (None, number):
            rate = 1e-2 * (1 + number)
            own = {"adapter": adapter, "learning_rate": rate, "is_prepared": bool(made)}
            if losses:
                own["loss"] = build_loss(losses[number], max_new_tokens=20)
            made.append(trainer_of(model, **own))
    return made


def batches(num: int, *, microbatch_tokens: int) -> list[Batch]:
    rng = np.random.default_rng(5)
    rollouts = [
        [*sharing_rollouts(rng, num=4 + i), *mixed_rollouts(rng, 3 + i)] for i in range(num)
    ]
    return [batch_of(own, microbatch_tokens=microbatch_tokens) for own in rollouts]


def stale_batches(num: int) -> list[Batch]:
    """Each token was sampled by one of the versions 0 to VERSION."""
    rng = np.random.default_rng(11)

    def stale(rollout: Rollout) -> Rollout:
        versions = np.sort(rng.integers(0, VERSION + 1, len(rollout.tokens)))
        return replace(rollout, versions=np.where(rollout.mask, versions, -1).astype(np.int32))

    return [batch_of([*map(stale, mixed_rollouts(rng, 6 + i))]) for i in range(num)]


def gradients(trainer: Trainer) -> dict[str, torch.Tensor]:
    named = trainer.policy.module.named_parameters()
    return {name: parameter.grad for name, parameter in named}


@pytest.mark.parametrize("architecture", ["qwen3", "llama", "qwen2_moe"])
@pytest.mark.parametrize("microbatch_tokens", [10_000, 40])
def test_gradients_of_shared_passes_are_those_of_each_policy_alone(architecture, microbatch_tokens):
    given = batches(3, microbatch_tokens=microbatch_tokens)
    passes: list[int] = []
    trainers = trainers_of(3, architecture=architecture, passes=passes)
    pending = [trainer.pending(batch) for trainer, batch in zip(trainers, given, strict=True)]
    clipped_gradients(pending, pass_tokens=10_000)
    num_parts = [len(batch.microbatches) for batch in given]
    assert len(passes) == max(num_parts) < sum(num_parts)
    for number, (trainer, batch) in enumerate(zip(trainers, given, strict=True)):
        (alone,) = trainers_of(3, architecture=architecture, alone=number)
        alone.pending(batch).gradient()
        ours, theirs = gradients(trainer), gradients(alone)
        assert ours.keys() == theirs.keys()
        largest = {name: grad.abs().max() for name, grad in theirs.items()}
        assert all(size > 0 for size in largest.values())
        if architecture == "qwen2_moe":  # its gate sums large terms to a small gradient
            largest = dict.fromkeys(largest, max(largest.values()))
        for name, grad in theirs.items():
            assert (ours[name] - grad).abs().max() / largest[name] < 1e-6, name


def test_each_policy_of_shared_passes_has_its_own_loss_and_limit_of_staleness():
    given, trainers = stale_batches(3), trainers_of(3, losses=LOSSES)
    for trainer in trainers:
        trainer.steps_done = VERSION
    pending = [trainer.pending(batch) for trainer, batch in zip(trainers, given, strict=True)]
    clipped_gradients(pending, pass_tokens=10_000)

    def distances(number: int, loss: Mapping[str, Any]) -> list[float]:
        """To the gradient of each weight of the policy alone with this loss, relative to it."""
        (alone,) = trainers_of(3, alone=number, losses=[loss] * 3)
        alone.steps_done = VERSION
        alone.pending(given[number]).gradient()
        ours, theirs = gradients(trainers[number]), gradients(alone)
        assert ours.keys() == theirs.keys()
        return [float((ours[n] - grad).norm() / grad.norm()) for n, grad in theirs.items()]

    for number, loss in enumerate(LOSSES):
        assert max(distances(number, loss)) < 1e-5
        for other in (*LOSSES, {"type": loss["type"], "max_token_staleness": 0}):
            if other != loss:
                assert min(distances(number, other)) > 1e-2, (loss, other)


def test_pass_has_no_more_rows_than_allowed():
    passes: list[int] = []
    given, trainers = batches(3, microbatch_tokens=40), trainers_of(3, passes=passes)
    pending = [trainer.pending(batch) for trainer, batch in zip(trainers, given, strict=True)]
    clipped_gradients(pending, pass_tokens=80)
    assert max(passes) <= 80
    assert sum(passes) == sum(len(p.tokens) for batch in given for p in batch.microbatches)


def test_policy_with_a_broken_batch_leaves_the_others_as_they_would_be_alone():
    good, bad = batches(2, microbatch_tokens=10_000)
    for part in bad.microbatches:
        part.advantages[:] = np.nan
    trainers = trainers_of(2)
    step_together([(trainers[0], (good,)), (trainers[1], (bad,))], pass_tokens=10_000)
    assert [trainer.skipped for trainer in trainers] == [(), (0,)]
    (alone,) = trainers_of(2, alone=0)
    alone.step(good)
    for name, weight in alone.policy.weights().items():
        assert torch.equal(trainers[0].policy.weights()[name], weight)
    (untouched,) = trainers_of(2, alone=1)
    for name, weight in untouched.policy.weights().items():
        assert torch.equal(trainers[1].policy.weights()[name], weight)


def test_policy_without_a_turn_stays_as_it_is():
    (given,), trainers = batches(1, microbatch_tokens=10_000), trainers_of(2)
    before = {name: w.clone() for name, w in trainers[1].policy.weights().items()}
    nothing = Batch(microbatches=(), num_sequences=0, num_trained_tokens=0)
    metrics = step_together([(trainers[0], (given,)), (trainers[1], (nothing,))], pass_tokens=99)
    assert metrics[0]["grad_norm"] > 0
    assert metrics[1] == {"batch/trained_tokens": 0.0}
    assert [trainer.steps_done for trainer in trainers] == [1, 0]
    assert all(torch.equal(before[n], w) for n, w in trainers[1].policy.weights().items())


def test_saved_policies_continue_with_the_same_numbers(tmp_path):
    given = batches(2, microbatch_tokens=10_000)
    trainers = trainers_of(2)
    work = [(trainer, (batch,)) for trainer, batch in zip(trainers, given, strict=True)]
    step_together(work, pass_tokens=10_000)
    for number, trainer in enumerate(trainers):
        folder = tmp_path / str(number)
        folder.mkdir()
        trainer.snapshot().write(folder)
    expected = step_together(work, pass_tokens=10_000)
    resumed = trainers_of(2)
    for number, trainer in enumerate(resumed):
        trainer.restore(tmp_path / str(number))
    work = [(trainer, (batch,)) for trainer, batch in zip(resumed, given, strict=True)]
    assert step_together(work, pass_tokens=10_000) == expected


def test_joined_microbatches_keep_the_order_of_segments():
    parts = [part for batch in batches(3, microbatch_tokens=10_000) for part in batch.microbatches]
    whole, groups = joined(parts)
    assert sum(count for _, count in groups) == len(whole.tokens) == whole.lengths.sum()
    assert len(groups) <= 3 * len(parts)
    for place, part in enumerate(parts):
        start = sum(len(p.targets) for p in parts[:place])
        own = whole.predictors[start : start + len(part.targets)]
        assert (whole.tokens[own] == part.tokens[part.predictors]).all()
        assert (whole.positions[own] == part.positions[part.predictors]).all()
