"""Several optimizer updates in one step: one version, and one policy to compare with."""

import numpy as np
import pytest
import torch
from architectures import tiny_model
from batches import batch_of, mixed_rollouts, trainer_of

from millrace.core.records import Episode, Group, Task
from millrace.training.losses.recipes import build_loss
from millrace.training.packing.packer import pack


def rng() -> np.random.Generator:
    return np.random.default_rng(7)


def two_batches():
    rollouts = mixed_rollouts(rng(), 8)
    return batch_of(rollouts[:4]), batch_of(rollouts[4:])


class Spy:
    """A loss that remembers what it was called with."""

    def __init__(self, *, needs_proximal: bool):
        self.needs_proximal = needs_proximal
        self.seen = []
        self._loss = build_loss({"type": "decoupled_ppo"}, max_new_tokens=8)

    def __call__(self, tokens):
        self.seen.append(tokens)
        return self._loss(tokens)


def test_a_step_of_two_updates_is_two_steps_that_make_one_version():
    together, apart = trainer_of(tiny_model("llama")), trainer_of(tiny_model("llama"))
    first, second = two_batches()
    metrics = together.step(first, second)
    separate = [apart.step(first), apart.step(second)]
    assert (together.steps_done, apart.steps_done) == (1, 2)
    for name, weight in together.policy.weights().items():
        assert torch.equal(weight, apart.policy.weights()[name]), name
    tokens = [m["batch/trained_tokens"] for m in separate]
    assert metrics["batch/trained_tokens"] == sum(tokens)
    for name in ("entropy", "mismatch/kl_k3", "clip_ratio"):
        expected = np.average([m[name] for m in separate], weights=tokens)
        assert metrics[name] == pytest.approx(expected), name
    for name in ("loss", "grad_norm"):
        assert metrics[name] == pytest.approx(np.mean([m[name] for m in separate])), name


def test_trainer_reports_tokens_of_chosen_rollouts_from_their_first_update():
    rollouts = mixed_rollouts(rng(), 8)
    group = Group(
        number=0,
        task=Task(prompt=""),
        episodes=tuple(Episode(turns=(), rollouts=(r,)) for r in rollouts),
        advantages=np.arange(8, dtype=np.float32),
    )
    numbers = {rollouts[2]: 0, rollouts[5]: 1}
    batch = pack([group], microbatch_tokens=1000, reported=numbers)
    trainer = trainer_of(tiny_model("llama"), epochs=2)
    trainer.limit_rows(60)  # it splits the microbatch
    (whole,) = batch.microbatches
    with torch.no_grad():
        before = trainer.policy.logprobs(whole)
    metrics = trainer.step(batch)
    assert metrics["batch/microbatch_splits"] > 0
    assert trainer.reported.keys() == {0, 1}
    for rollout, number in numbers.items():
        logprobs, entropies, advantages = trainer.reported[number]
        own = np.flatnonzero(whole.reported == number)
        assert whole.targets[own].tolist() == rollout.tokens[rollout.mask].tolist()
        np.testing.assert_allclose(logprobs, before.logprobs[own], atol=1e-5)
        np.testing.assert_allclose(entropies, before.entropies[own], atol=1e-5)
        assert set(advantages) == {2.0 if number == 0 else 5.0}
    assert trainer.step(*two_batches())
    assert trainer.reported == {}


def test_all_updates_of_a_step_use_proximal_logprobs_from_before_the_first():
    batches = two_batches()
    untouched = trainer_of(tiny_model("llama"))
    with torch.no_grad():
        before = [untouched.policy.logprobs(b.microbatches[0])[0] for b in batches]
    spy = Spy(needs_proximal=True)
    metrics = trainer_of(tiny_model("llama"), loss=spy).step(*batches)
    assert metrics["batch/proximal_microbatches"] == 2
    for tokens, expected in zip(spy.seen, before, strict=True):
        torch.testing.assert_close(tokens.proximal_logprobs, expected)
    second = spy.seen[1]
    assert (second.trainer_logprobs - second.proximal_logprobs).abs().max() > 1e-3


@pytest.mark.parametrize("bad", [0, 1])
def test_an_update_that_is_not_finite_is_skipped_and_the_others_are_applied(bad):
    batches = two_batches()
    batches[bad].microbatches[0].advantages[:] = np.inf
    trainer, expected = trainer_of(tiny_model("llama")), trainer_of(tiny_model("llama"))
    metrics = trainer.step(*batches)
    alone = expected.step(batches[1 - bad])
    assert (trainer.skipped, trainer.steps_done) == ((bad,), 1)
    assert metrics == {**alone, "skipped/updates": 1}
    for name, weight in trainer.policy.weights().items():
        assert torch.equal(weight, expected.policy.weights()[name]), name


def test_a_single_update_needs_no_forward_pass_for_proximal_logprobs():
    spy = Spy(needs_proximal=True)
    metrics = trainer_of(tiny_model("llama"), loss=spy).step(two_batches()[0])
    assert metrics["batch/proximal_microbatches"] == 0
    assert spy.seen[0].proximal_logprobs is None


def test_a_loss_that_needs_no_proximal_logprobs_causes_no_forward_pass():
    spy = Spy(needs_proximal=False)
    trainer_of(tiny_model("llama"), loss=spy).step(*two_batches())
    assert [tokens.proximal_logprobs for tokens in spy.seen] == [None, None]


def test_the_forward_pass_for_proximal_logprobs_is_split_when_memory_is_short(monkeypatch):
    batches = two_batches()
    spy = Spy(needs_proximal=True)
    trainer = trainer_of(tiny_model("llama"), loss=spy)
    most_rows = len(batches[0].microbatches[0].tokens) - 1
    forward = trainer.policy.module.model.forward

    def small(*args, **kwargs):
        if kwargs["input_ids"].shape[-1] > most_rows:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return forward(*args, **kwargs)

    monkeypatch.setattr(trainer.policy.module.model, "forward", small)
    metrics = trainer.step(*batches)
    expected = trainer_of(tiny_model("llama"), loss=Spy(needs_proximal=True)).step(*batches)
    assert len(spy.seen) == metrics["batch/microbatches"] > 2
    for name in ("loss", "grad_norm", "entropy", "ratio/mean"):
        assert metrics[name] == pytest.approx(expected[name], rel=1e-4), name


def test_the_state_of_an_adaptive_loss_is_in_the_checkpoint(tmp_path):
    def trainer():
        table = {"entropy_target": 100.0, "entropy_bonus_step": 0.01}
        loss = build_loss(table, max_new_tokens=8)
        return trainer_of(tiny_model("llama"), loss=loss)

    first = trainer()
    first.step(two_batches()[0])
    first.snapshot().write(tmp_path)
    second = trainer()
    second.restore(tmp_path)
    assert second.loss == first.loss
    assert second.loss.state() == {"entropy_bonus": 0.01}


def test_epochs_repeat_the_updates_and_make_one_version():
    thrice = trainer_of(tiny_model("llama"), epochs=3)
    plain = trainer_of(tiny_model("llama"))
    first, second = two_batches()
    metrics = thrice.step(first, second)
    expected = plain.step(first, second, first, second, first, second)
    assert thrice.steps_done == 1
    assert metrics == expected
    for name, weight in thrice.policy.weights().items():
        assert torch.equal(weight, plain.policy.weights()[name]), name


def test_proximal_logprobs_are_computed_once_for_all_epochs():
    spy = Spy(needs_proximal=True)
    trainer = trainer_of(tiny_model("llama"), loss=spy, epochs=2)
    metrics = trainer.step(two_batches()[0])
    assert metrics["batch/proximal_microbatches"] == 1
    first, second = spy.seen
    assert torch.equal(first.proximal_logprobs, second.proximal_logprobs)
    torch.testing.assert_close(first.trainer_logprobs, first.proximal_logprobs)
    assert (second.trainer_logprobs - second.proximal_logprobs).abs().max() > 1e-3
