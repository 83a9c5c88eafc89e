import dataclasses
import math

import numpy as np
import pytest
import torch
from architectures import ARCHITECTURES, tiny_model
from batches import (
    batch_of,
    in_order_of,
    mixed_rollouts,
    random_rollout,
    reference_logprobs,
    sharing_rollouts,
    trainer_of,
)

from millrace.core.microbatch import Batch
from millrace.training.losses.policy_loss import PolicyLoss
from millrace.training.losses.recipes import build_loss
from millrace.training.losses.weights import LossAverage
from millrace.training.optimizer import LossScale


def rng() -> np.random.Generator:
    return np.random.default_rng(11)


def gradients(model) -> dict[str, torch.Tensor]:
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def rollouts_of(kind: str, num: int = 8):
    return {
        "unrelated": lambda: mixed_rollouts(rng(), num),
        "sharing": lambda: sharing_rollouts(rng(), num=num),
        "sharing much": lambda: sharing_rollouts(rng(), num=num, prompt=100, sampled=20),
    }[kind]()


KINDS = ("unrelated", "sharing", "sharing much")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_trainer_logprobs_are_those_of_a_plain_forward_of_each_sequence(architecture, kind):
    rollouts = rollouts_of(kind)
    trainer = trainer_of(tiny_model(architecture), logprob_chunk=7)
    plain = tiny_model(architecture)
    plain.set_attn_implementation("eager")
    batch = batch_of(rollouts)
    assert len(batch.microbatches) == 1
    assert (batch.microbatches[0].parents >= 0).any() == (kind != "unrelated")
    order = in_order_of(rollouts, batch.microbatches[0])
    with torch.no_grad():
        logprobs, entropies, _ = trainer.policy.logprobs(batch.microbatches[0])
        expected = [reference_logprobs(plain, rollout) for rollout in order]
    torch.testing.assert_close(logprobs, torch.cat([e[0] for e in expected]), rtol=0, atol=1e-5)
    torch.testing.assert_close(entropies, torch.cat([e[1] for e in expected]), rtol=0, atol=1e-5)


@pytest.mark.parametrize("kind", KINDS[:2])
@pytest.mark.parametrize("aggregation", ["token", "sequence"])
def test_a_batch_has_one_gradient_however_it_is_split(aggregation, kind):
    rollouts = rollouts_of(kind, num=10)
    loss = PolicyLoss(average=LossAverage(aggregation=aggregation))
    trainer = trainer_of(tiny_model("llama"), loss=loss)
    whole = batch_of(rollouts)
    split = batch_of(rollouts, microbatch_tokens=40 if kind == "unrelated" else 18)
    assert len(split.microbatches) >= 3
    trainer.accumulate(whole)
    expected = {name: g.clone() for name, g in gradients(trainer.policy.module).items()}
    trainer.accumulate(split)
    for name, gradient in gradients(trainer.policy.module).items():
        torch.testing.assert_close(gradient, expected[name], rtol=1e-4, atol=1e-6, msg=name)


@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize("kind", KINDS[:2])
def test_gradients_of_all_ranks_sum_to_the_gradient_of_the_batch(kind, num_ranks):
    rollouts = rollouts_of(kind, num=10)
    trainer = trainer_of(tiny_model("llama"))
    trainer.accumulate(batch_of(rollouts))
    expected = {name: g.clone() for name, g in gradients(trainer.policy.module).items()}
    batch = batch_of(rollouts, microbatch_tokens=60, num_ranks=num_ranks)
    total = {name: torch.zeros_like(gradient) for name, gradient in expected.items()}
    for rank in range(num_ranks):
        trainer.accumulate(batch.of_rank(rank))
        for name, gradient in gradients(trainer.policy.module).items():
            total[name] += gradient
    for name, gradient in total.items():
        torch.testing.assert_close(gradient, expected[name], rtol=1e-4, atol=1e-6, msg=name)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("architecture", ["qwen3", "gemma3"])
def test_the_packed_gradient_is_that_of_separate_plain_forwards(architecture, kind):
    rollouts = rollouts_of(kind, num=6)
    advantages = [1.0, -0.5, 0.3, -2.0, 0.7, 0.1]
    batch = batch_of(rollouts, advantages=advantages)
    trainer = trainer_of(tiny_model(architecture))
    trainer.accumulate(batch)
    plain = tiny_model(architecture)
    plain.set_attn_implementation("eager")
    objective = torch.zeros(())
    for rollout, advantage in zip(rollouts, advantages, strict=True):
        logprobs, _ = reference_logprobs(plain, rollout)
        engine = torch.from_numpy(rollout.engine_logprobs[rollout.mask])
        ratio = (logprobs - engine).exp()
        # The truncated weight is a constant beyond max_ratio, with the gradient of the logprob.
        weight = ratio.detach().clamp(max=2.0)
        surrogate = weight * (logprobs - logprobs.detach()).exp() * advantage
        objective = objective + torch.minimum(surrogate, ratio.clamp(0.8, 1.28) * advantage).sum()
    (-objective / batch.num_trained_tokens).backward()
    ours, theirs = gradients(trainer.policy.module), gradients(plain)
    assert ours.keys() == theirs.keys()
    for name, gradient in ours.items():
        torch.testing.assert_close(gradient, theirs[name], rtol=1e-3, atol=1e-5, msg=name)


def test_metrics_do_not_depend_on_the_split_and_match_a_hand_computed_step():
    rollouts = mixed_rollouts(rng(), num=6)
    plain = tiny_model("llama")
    with torch.no_grad():
        logprobs, entropies = map(
            torch.cat, zip(*(reference_logprobs(plain, r) for r in rollouts), strict=True)
        )
    engine = torch.from_numpy(np.concatenate([r.engine_logprobs[r.mask] for r in rollouts]))
    log_ratio = (logprobs - engine).double()
    expected = {
        "entropy": entropies.mean(),
        "mismatch/kl_k1": -log_ratio.mean(),
        "mismatch/kl_k3": (log_ratio.exp() - 1 - log_ratio).mean(),
        "ratio/mean": log_ratio.exp().mean(),
        "ratio/max": log_ratio.exp().max(),
        "mismatch/logprob": log_ratio.abs().mean(),
        "batch/trained_tokens": float(len(engine)),
        "learning_rate": 1e-2,
    }
    for microbatch_tokens, num_microbatches in ((10_000, 1), (30, 3)):
        batch = batch_of(rollouts, microbatch_tokens=microbatch_tokens)
        metrics = trainer_of(tiny_model("llama")).step(batch)
        assert metrics["batch/microbatches"] == len(batch.microbatches) == num_microbatches
        for name, value in expected.items():
            assert metrics[name] == pytest.approx(float(value), rel=1e-4), name
        assert 0 < metrics["clip_ratio"] < 1
        assert metrics["grad_norm"] > 0


def test_steps_raise_logprobs_of_good_tokens_and_lower_those_of_bad_ones():
    rollouts = [random_rollout(rng(), temperature=0.8), random_rollout(np.random.default_rng(5))]
    trainer = trainer_of(tiny_model("qwen3"), learning_rate=3e-3)
    plain = trainer.policy.module
    batch = batch_of(rollouts, advantages=[1.0, -1.0])

    def mean_logprobs():
        with torch.no_grad():
            logprobs = trainer.policy.logprobs(batch.microbatches[0]).logprobs
        return logprobs[:6].mean().item(), logprobs[6:].mean().item()

    # On-policy: the engine's logprobs are the trainer's own.
    with torch.no_grad():
        own = trainer.policy.logprobs(batch.microbatches[0]).logprobs
    microbatch = batch.microbatches[0]
    microbatch.engine_logprobs[:] = own.numpy()
    good_before, bad_before = mean_logprobs()
    metrics = trainer.step(batch)
    assert metrics["mismatch/logprob"] < 1e-6
    assert metrics["loss"] == pytest.approx(0.0, abs=1e-6)
    trainer.step(batch)
    good_after, bad_after = mean_logprobs()
    assert good_after > good_before
    assert bad_after < bad_before
    assert trainer.steps_done == 2
    assert plain.training is False


def test_the_gradient_is_clipped_to_its_norm():
    batch = batch_of(mixed_rollouts(rng()))
    trainer = trainer_of(tiny_model("llama"), max_grad_norm=1e-3)
    metrics = trainer.step(batch)
    assert metrics["grad_norm"] > 1e-3
    norm = torch.stack([g.norm() for g in gradients(trainer.policy.module).values()]).norm()
    assert norm.item() == pytest.approx(1e-3, rel=1e-3)


def test_gradient_checkpointing_gives_the_same_gradient_with_less_saved():
    batch = batch_of(mixed_rollouts(rng()))
    outcomes = []
    for gradient_checkpointing in (False, True):
        trainer = trainer_of(tiny_model("gemma2"), gradient_checkpointing=gradient_checkpointing)
        saved = []
        with torch.autograd.graph.saved_tensors_hooks(
            lambda t, saved=saved: saved.append(t.numel()) or t, lambda t: t
        ):
            trainer.policy.logprobs(batch.microbatches[0])
        trainer.accumulate(batch)
        outcomes.append((gradients(trainer.policy.module), sum(saved)))
    (plain, plain_saved), (checkpointed, checkpointed_saved) = outcomes
    assert checkpointed_saved < 0.7 * plain_saved
    for name, gradient in plain.items():
        torch.testing.assert_close(checkpointed[name], gradient, msg=name)


@pytest.mark.parametrize(
    ("dtype", "most"), [(torch.bfloat16, 0.2), (torch.float16, 0.02)], ids=["bfloat16", "float16"]
)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("architecture", ["llama", "qwen3"])
def test_lower_precision_is_for_computing_only(architecture, kind, dtype, most):
    batch = batch_of(rollouts_of(kind))
    trainer = trainer_of(tiny_model(architecture), compute_dtype=dtype)
    exact = trainer_of(tiny_model(architecture))
    with torch.no_grad():
        rough = trainer.policy.logprobs(batch.microbatches[0]).logprobs
        fine = exact.policy.logprobs(batch.microbatches[0]).logprobs
    assert rough.dtype == torch.float32
    difference = (rough - fine).abs().max().item()
    assert 1e-6 < difference < most
    trainer.step(batch)
    assert {p.dtype for p in trainer.policy.weights().values()} == {torch.float32}


def test_float16_gradients_that_overflow_are_computed_again_with_a_smaller_scale():
    batch = batch_of(mixed_rollouts(rng()))
    for microbatch in batch.microbatches:
        microbatch.advantages[:] *= 1e4
    rough = trainer_of(tiny_model("llama"), compute_dtype=torch.float16).step(batch)
    fine = trainer_of(tiny_model("llama")).step(batch)
    assert rough["loss_scale"] < LossScale(is_on=True).value
    assert rough["grad_norm"] == pytest.approx(fine["grad_norm"], rel=0.05)


@pytest.mark.parametrize("poison", ["advantages", "engine_logprobs"])
def test_a_step_that_is_not_finite_makes_its_version_and_changes_nothing(poison):
    good, bad = batch_of(mixed_rollouts(rng())), batch_of(mixed_rollouts(rng()))
    getattr(bad.microbatches[0], poison)[:] = np.nan
    trainer, untouched = trainer_of(tiny_model("llama")), trainer_of(tiny_model("llama"))
    for one in (trainer, untouched):
        one.step(good)
    metrics = trainer.step(bad)
    assert (metrics["skipped/updates"], trainer.skipped, trainer.steps_done) == (1, (0,), 2)
    assert math.isnan(metrics["loss"])
    # The optimizer's moments are as they were, too: the next step is the same for both.
    for one in (trainer, untouched):
        assert one.step(good)["skipped/updates"] == 0
    assert trainer.skipped == ()
    for name, weight in trainer.policy.weights().items():
        assert torch.equal(weight, untouched.policy.weights()[name]), name


def test_float16_keeps_its_scale_if_the_scale_is_not_the_cause():
    """A gradient that is infinite in any precision, of a loss that is finite."""

    def loss(tokens):
        at_zero = tokens.trainer_logprobs - tokens.trainer_logprobs.detach()
        return at_zero.sqrt().sum(), {}

    trainer = trainer_of(tiny_model("llama"), compute_dtype=torch.float16, loss=loss)
    metrics = trainer.step(batch_of(mixed_rollouts(rng())))
    assert metrics["loss"] == 0
    assert metrics["skipped/updates"] == 1
    assert metrics["loss_scale"] == LossScale(is_on=True).value


def test_microbatches_without_trained_tokens_cost_nothing():
    batch = batch_of([random_rollout(rng()), random_rollout(np.random.default_rng(4))])
    (microbatch,) = batch.microbatches
    nothing = {
        name: getattr(microbatch, name)[:0]
        for name in ("predictors", "targets", "rollouts", "engine_logprobs")
    }
    with_empty = Batch(
        microbatches=(microbatch, dataclasses.replace(microbatch, **nothing)),
        num_sequences=batch.num_sequences,
        num_trained_tokens=batch.num_trained_tokens,
    )
    metrics = trainer_of(tiny_model("llama")).step(with_empty)
    assert metrics["batch/microbatches"] == 1


def test_read_only_arrays_are_accepted_without_a_warning(recwarn):
    batch = batch_of(mixed_rollouts(rng()))
    (microbatch,) = batch.microbatches
    for field in dataclasses.fields(microbatch):
        if isinstance(column := getattr(microbatch, field.name), np.ndarray):
            column.setflags(write=False)
    microbatch.kept.ids.setflags(write=False)
    microbatch.kept.offsets.setflags(write=False)
    trainer_of(tiny_model("llama")).step(batch)
    assert [str(warning.message) for warning in recwarn] == []


def test_weights_contain_tied_parameters_once():
    trainer = trainer_of(tiny_model("qwen3"))
    names = list(trainer.policy.weights())
    assert "model.embed_tokens.weight" in names
    assert "lm_head.weight" not in names
    assert not any(weight.requires_grad for weight in trainer.policy.weights().values())


def test_a_users_loss_gets_every_token_with_its_sequence_and_staleness():
    seen = []

    def loss(tokens):
        seen.append(tokens)
        return -aggregate_mean(tokens), {"mine": tokens.advantages}

    def aggregate_mean(tokens):
        return (tokens.trainer_logprobs + 0.1 * tokens.entropies).sum() / tokens.num_trained_tokens

    rollouts = [random_rollout(rng(), sampled=3), random_rollout(rng(), sampled=2)]
    trainer = trainer_of(tiny_model("llama"), loss=loss)
    trainer.steps_done = 4
    metrics = trainer.step(batch_of(rollouts, advantages=[0.5, -1.0]))
    assert metrics["mine"] == pytest.approx((3 * 0.5 - 2 * 1.0) / 5)
    (tokens,) = seen
    assert tokens.sequences.ids.tolist() in ([0, 0, 0, 1, 1], [0, 0, 1, 1, 1])
    by_sequence = {tuple(tokens.advantages[tokens.sequences.ids == i].tolist()) for i in (0, 1)}
    assert by_sequence == {(0.5,) * 3, (-1.0,) * 2}
    assert tokens.staleness.tolist() == [4] * 5
    assert (tokens.num_trained_tokens, tokens.num_sequences) == (5, 2)


@pytest.mark.parametrize("of", ["token", "sequence"])
def test_effective_sample_size_of_the_ratios_scales_the_step(of: str):
    batch = batch_of(mixed_rollouts(rng(), 8), microbatch_tokens=60)
    table = {"type": "tis", "ratio": of}
    plain, scaled = (
        trainer_of(
            tiny_model("llama"),
            loss=build_loss({**table, "ess_scaling": ess}, max_new_tokens=8),
        )
        for ess in (False, True if of == "token" else of)
    )
    before = {name: own.clone() for name, own in plain.policy.weights().items()}
    found = []
    assert len(batch.microbatches) > 1
    for part in batch.microbatches:
        with torch.no_grad():
            logprobs = plain.policy.logprobs(part).logprobs.double()
        log_ratio = logprobs - torch.from_numpy(part.engine_logprobs)
        if of == "sequence":
            log_ratio = torch.stack([log_ratio[part.rollouts == n].sum() for n in range(8)])
            log_ratio = log_ratio[: part.rollouts.max() + 1]
        found.append(log_ratio)
    ratios = torch.cat(found).exp()
    assert of == "token" or len(ratios) == 8
    plain.step(batch)
    metrics = scaled.step(batch)
    scale = float(ratios.sum() / (len(ratios) * ratios.square().sum()).sqrt())
    assert scale < 0.99
    assert metrics["step_scale"] == pytest.approx(scale, rel=1e-5)
    for name, own in scaled.policy.weights().items():
        expected = before[name] + scale * (plain.policy.weights()[name] - before[name])
        torch.testing.assert_close(own, expected, rtol=1e-4, atol=1e-6)
