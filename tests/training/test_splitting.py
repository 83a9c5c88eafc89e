"""Halves of microbatches, and a trainer whose memory is too small. Memory is played by the loss."""

import numpy as np
import pytest
import torch
from architectures import tiny_model
from batches import batch_of, mixed_rollouts, random_rollout, sharing_rollouts, trainer_of

from millrace.core.errors import RunFailed
from millrace.models.attention.layout import PackedLayout
from millrace.training.losses.policy_loss import PolicyLoss
from millrace.training.packing.splitting import halves


def rng() -> np.random.Generator:
    return np.random.default_rng(11)


class SmallMemory:
    """A loss that finds no memory for more than `most_tokens` trained tokens; or, as a hook of the
    embeddings' weight, a backward pass that does not, when most gradients have been added up."""

    def __init__(self, *, most_tokens: int, in_backward: bool = False):
        self.most_tokens = most_tokens
        self.in_backward = in_backward
        self.num_calls = 0
        self.num_tokens = 0

    def __call__(self, tokens):
        self.num_calls += 1
        self.num_tokens = len(tokens.advantages)
        if not self.in_backward:
            self.run_out()
        return PolicyLoss()(tokens)

    def run_out(self, grad=None):
        if self.num_tokens > self.most_tokens:
            raise torch.OutOfMemoryError("CUDA out of memory.")


def rollouts_of(kind: str):
    return {
        "unrelated": lambda: mixed_rollouts(rng(), 9),
        "sharing": lambda: sharing_rollouts(rng(), num=9),
        "of two groups": lambda: sharing_rollouts(rng(), num=5) + sharing_rollouts(rng(), num=5),
    }[kind]()


@pytest.mark.parametrize("kind", ["unrelated", "sharing", "of two groups"])
def test_halves_of_halves_train_the_same_as_the_whole(kind):
    (whole,) = batch_of(rollouts_of(kind)).microbatches
    trainer = trainer_of(tiny_model("qwen3"))
    parts = [whole]
    while both := [pair for part in parts if (pair := halves(part))]:
        parts = [part for part in parts if halves(part) is None]
        parts += [half for pair in both for half in pair]
    assert len(parts) == whole.rollouts[-1] + 1
    with torch.no_grad():
        expected = trainer.policy.logprobs(whole).logprobs
        found = [trainer.policy.logprobs(part)[0] for part in parts]
    of_whole = sorted(
        zip(whole.engine_logprobs, whole.targets, whole.advantages, expected.tolist(), strict=True)
    )
    of_parts = sorted(
        row
        for part, logprobs in zip(parts, found, strict=True)
        for row in zip(
            part.engine_logprobs, part.targets, part.advantages, logprobs.tolist(), strict=True
        )
    )
    assert np.allclose(of_parts, of_whole, atol=1e-5)
    for part in parts:
        assert set(part.rollouts) == {0}
        PackedLayout(part.lengths, parents=part.parents, device=torch.device("cpu"))


@pytest.mark.parametrize("in_backward", [False, True])
@pytest.mark.parametrize("kind", ["unrelated", "sharing"])
def test_a_microbatch_that_does_not_fit_is_split_and_the_step_is_the_same(kind, in_backward):
    batch = batch_of(rollouts_of(kind))
    loss = SmallMemory(most_tokens=batch.num_trained_tokens // 3, in_backward=in_backward)
    model = tiny_model("llama")
    trainer = trainer_of(model, loss=loss)
    if in_backward:
        model.get_input_embeddings().weight.register_hook(loss.run_out)
    metrics = trainer.step(batch)
    expected = trainer_of(tiny_model("llama")).step(batch)
    assert metrics["batch/microbatch_splits"] >= 2
    assert metrics["batch/microbatches"] == metrics["batch/microbatch_splits"] + 1
    assert expected["batch/microbatch_splits"] == 0
    for name in ("loss", "grad_norm", "entropy", "batch/trained_tokens"):
        assert metrics[name] == pytest.approx(expected[name], rel=1e-4, abs=1e-6), name
    # What did not fit once is not tried again.
    loss.num_calls = 0
    again = trainer.step(batch)
    assert loss.num_calls == again["batch/microbatches"]


def test_a_sequence_that_does_not_fit_alone_fails_the_run_and_changes_nothing():
    batch = batch_of([random_rollout(rng(), sampled=30), random_rollout(rng(), sampled=3)])
    trainer = trainer_of(tiny_model("llama"), loss=SmallMemory(most_tokens=10))
    before = {name: w.clone() for name, w in trainer.policy.weights().items()}
    with pytest.raises(RunFailed, match=r"33 tokens .*trainer\.gradient_checkpointing"):
        trainer.step(batch)
    assert trainer.steps_done == 0
    for name, weight in trainer.policy.weights().items():
        assert torch.equal(weight, before[name]), name
