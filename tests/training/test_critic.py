"""A critic against plain loops and plain forward passes of unpacked sequences."""

import dataclasses

import numpy as np
import pytest
import torch
from architectures import tiny_model
from batches import in_order_of, mixed_rollouts, random_rollout, sharing_rollouts, trainer_of
from critics import (
    critic_batch,
    critic_of,
    plain_critic,
    plain_estimates,
    plain_values,
    were_cut,
)
from transformers import AutoModelForCausalLM, Qwen3ForCausalLM

from millrace.core.errors import CheckpointError
from millrace.training.checkpoints.directory import CRITIC
from millrace.training.critic import Critic, GaeEstimator
from millrace.training.losses.policy_loss import PolicyLoss
from millrace.training.optimizer import TrainSettings

DISCOUNT, DECAY = 0.9, 0.8
NUM = 7
SCORES = [1.0, -0.5, 0.0, 2.0, 0.3, 1.0, -1.0]


def rng() -> np.random.Generator:
    return np.random.default_rng(11)


def rollouts_of(kind: str):
    if kind == "unrelated":
        return mixed_rollouts(rng(), NUM)
    if kind == "sharing":
        return sharing_rollouts(rng(), num=NUM)
    return [
        dataclasses.replace(r, rewards=rng().random(len(r.tokens), np.float32) * r.mask)
        for r in sharing_rollouts(rng(), num=NUM)
    ]


class Spy:
    """A loss that remembers what it was called with."""

    def __init__(self):
        self.seen = []

    def __call__(self, tokens):
        self.seen.append(tokens)
        return PolicyLoss()(tokens)


def weights_of(critic) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in critic.module.named_parameters()}


def expected_estimates(rollouts, *, architecture="qwen3"):
    """Advantages and values of all rollouts, by plain code."""
    backbone, head = plain_critic(architecture)
    found = []
    for rollout, score, was_cut in zip(rollouts, SCORES, were_cut(NUM), strict=True):
        with torch.no_grad():
            values = plain_values(backbone, head, rollout).numpy()
        found.append(
            plain_estimates(
                values, rollout, score=score, was_cut=was_cut, discount=DISCOUNT, decay=DECAY
            )
        )
    return found


@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("kind", ["unrelated", "sharing", "with rewards of tokens"])
def test_a_step_uses_the_advantages_of_a_plain_loop(kind, normalize):
    rollouts = rollouts_of(kind)
    batch = critic_batch(rollouts, scores=SCORES)
    estimator = GaeEstimator(gamma=DISCOUNT, gae_lambda=DECAY, normalize=normalize)
    spy = Spy()
    trainer = trainer_of(tiny_model("qwen3"), loss=spy, critic=critic_of(estimator=estimator))
    metrics = trainer.step(batch)
    estimates = expected_estimates(rollouts)
    advantages = np.concatenate([a for a, _ in estimates])
    values = np.concatenate([v for _, v in estimates])
    returns = advantages + values
    assert metrics["critic/value_mean"] == pytest.approx(values.mean(), abs=1e-5)
    assert metrics["critic/return_mean"] == pytest.approx(returns.mean(), abs=1e-5)
    explained = 1 - (returns - values).var() / returns.var()
    assert metrics["critic/explained_variance"] == pytest.approx(explained, abs=1e-4)
    assert metrics["critic/loss"] == pytest.approx(np.mean(advantages**2), rel=1e-4)
    order = [rollouts.index(r) for r in in_order_of(rollouts, batch.microbatches[0])]
    expected = np.concatenate([estimates[i][0] for i in order])
    if normalize:
        expected = (expected - expected.mean()) / (expected.std() + 1e-4)
    (tokens,) = spy.seen
    np.testing.assert_allclose(tokens.advantages.numpy(), expected, atol=1e-5)


def test_each_forward_pass_of_the_critic_is_reported_as_progress():
    num_passes = 0

    def count():
        nonlocal num_passes
        num_passes += 1

    critic = critic_of(on_forward=count)
    batch = critic_batch(rollouts_of("unrelated"), scores=SCORES, microbatch_tokens=16)
    (estimated,) = critic.estimate_advantages([batch])
    assert num_passes == len(batch.microbatches) > 1
    critic.update(estimated)
    assert num_passes == 2 * len(batch.microbatches)


@pytest.mark.parametrize("architecture", ["qwen3", "gemma3"])
@pytest.mark.parametrize("kind", ["unrelated", "sharing"])
def test_the_gradient_is_that_of_plain_forwards_of_unpacked_sequences(kind, architecture):
    rollouts = rollouts_of(kind)
    critic = critic_of(architecture)
    (batch,) = critic.estimate_advantages([critic_batch(rollouts, scores=SCORES)])
    critic.accumulate(batch, lambda part: critic.value_loss(part, batch))
    backbone, head = plain_critic(architecture)
    loss = torch.zeros(())
    estimates = expected_estimates(rollouts, architecture=architecture)
    for rollout, (advantages, before) in zip(rollouts, estimates, strict=True):
        states = torch.from_numpy(np.flatnonzero(rollout.mask) - 1)
        returns = torch.tensor(advantages) + torch.tensor(before)
        errors = plain_values(backbone, head, rollout)[states] - returns
        loss = loss + 0.5 * errors.square().sum() / batch.num_trained_tokens
    loss.backward()
    plain = torch.nn.ModuleDict({"backbone": backbone, "head": head})
    theirs = dict(plain.named_parameters())
    ours = dict(critic.module.named_parameters())
    assert ours.keys() == theirs.keys()
    for name, parameter in ours.items():
        torch.testing.assert_close(
            parameter.grad, theirs[name].grad, rtol=1e-5, atol=1e-5, msg=name
        )


@pytest.mark.parametrize("kind", ["unrelated", "sharing"])
def test_a_step_does_not_depend_on_the_packing(kind):
    rollouts = rollouts_of(kind)
    outcomes = []
    for budget in (10_000, 15):
        critic = critic_of()
        trainer = trainer_of(tiny_model("qwen3"), critic=critic, learning_rate=1e-3)
        batch = critic_batch(rollouts, scores=SCORES, microbatch_tokens=budget)
        outcomes.append((len(batch.microbatches), trainer.step(batch), weights_of(critic)))
    (one, metrics, weights), (several, others, other_weights) = outcomes
    assert one == 1
    assert several >= 3
    for name in (
        *(
            "critic/loss",
            "critic/explained_variance",
            "critic/value_mean",
            "critic/return_mean",
            "critic/grad_norm",
        ),
        *("loss", "grad_norm"),
    ):
        assert metrics[name] == pytest.approx(others[name], rel=1e-3, abs=1e-5), name
    for name, weight in weights.items():
        torch.testing.assert_close(weight, other_weights[name], rtol=1e-3, atol=1e-4, msg=name)


@pytest.mark.parametrize(
    ("settings", "tolerance"),
    [
        ({"gradient_checkpointing": True}, 1e-5),
        ({"compute_dtype": torch.bfloat16}, 0.05),
        ({"compute_dtype": torch.float16}, 0.01),
    ],
)
def test_the_critic_uses_the_train_settings(settings, tolerance):
    batch = critic_batch(rollouts_of("sharing"), scores=SCORES)
    outcomes = []
    for critic in (critic_of(), critic_of(**settings)):
        critic.update(critic.estimate_advantages([batch])[0])
        outcomes.append(critic.step_metrics())
    expected, metrics = outcomes
    assert metrics["critic/loss"] == pytest.approx(expected["critic/loss"], rel=tolerance)
    assert metrics["critic/grad_norm"] == pytest.approx(expected["critic/grad_norm"], rel=tolerance)


def test_a_truncated_rollout_bootstraps_from_the_value_of_its_last_state():
    rollout = random_rollout(rng(), sampled=3)
    twin = dataclasses.replace(rollout, engine_logprobs=rollout.engine_logprobs + np.float32(0.1))
    critic = critic_of(estimator=GaeEstimator(gamma=0.5, gae_lambda=0.5, normalize=False))
    batch = critic_batch([rollout, twin], scores=[1.0, 1.0], cut=[True, False])
    (estimated,) = critic.estimate_advantages([batch])
    (micro,) = estimated.microbatches
    with torch.no_grad():
        last = plain_values(*plain_critic(), rollout)[-1].item()
    assert abs(last) > 0.1
    was_cut = micro.last_rows[micro.rollouts] >= 0
    difference = micro.advantages[was_cut] - micro.advantages[~was_cut]
    # Discounted once, and then by discount * decay for each token before the last.
    expected = 0.5 * last * np.array([1 / 16, 1 / 4, 1])
    np.testing.assert_allclose(difference, expected, atol=1e-5)


def test_advantages_of_all_minibatches_are_estimated_before_the_first_update():
    rollouts = rollouts_of("sharing")
    first = critic_batch(rollouts[:4], scores=SCORES[:4])
    second = critic_batch(rollouts[4:], scores=SCORES[4:])
    expected = critic_of().estimate_advantages([first, second])
    spy = Spy()
    trainer = trainer_of(tiny_model("qwen3"), loss=spy, critic=critic_of())
    metrics = trainer.step(first, second)
    assert trainer.steps_done == 1
    for tokens, batch in zip(spy.seen, expected, strict=True):
        assert np.array_equal(tokens.advantages.numpy(), batch.microbatches[0].advantages)
    both = np.concatenate([tokens.advantages.numpy() for tokens in spy.seen])
    assert both.mean() == pytest.approx(0, abs=1e-6)
    assert metrics["critic/value_mean"] == pytest.approx(
        np.mean(np.concatenate([b.microbatches[0].values for b in expected])), rel=1e-5
    )


def test_while_the_critic_warms_up_the_policy_does_not_learn():
    critic = critic_of(warmup_steps=2)
    trainer = trainer_of(tiny_model("qwen3"), critic=critic)
    batch = critic_batch(rollouts_of("sharing"), scores=SCORES)
    policy = {name: w.clone() for name, w in trainer.policy.weights().items()}
    for step in range(3):
        value_head = critic.module.head.weight.detach().clone()
        metrics = trainer.step(batch)
        assert trainer.steps_done == step + 1
        assert not torch.equal(critic.module.head.weight, value_head)
        stayed = all(torch.equal(w, policy[n]) for n, w in trainer.policy.weights().items())
        assert stayed == (step < 2)
        assert (metrics["learning_rate"] == 0) == (step < 2)


def test_a_value_beyond_the_clip_has_no_gradient():
    critic = critic_of(value_clip=0.2)
    (batch,) = critic.estimate_advantages([critic_batch(rollouts_of("unrelated"), scores=SCORES)])
    (micro,) = batch.microbatches
    with torch.no_grad():
        critic.module.head.bias += 0.5
    gradient = critic.accumulate(batch, lambda part: critic.value_loss(part, batch))
    value_loss = torch.stack(gradient.outputs).sum().item()
    values, returns = micro.values.astype(np.float64), micro.returns.astype(np.float64)
    errors = np.maximum((values + 0.5 - returns) ** 2, (values + 0.2 - returns) ** 2)
    assert value_loss == pytest.approx(errors.mean(), rel=1e-4)
    # Only where moving on makes things worse does the unclipped error count, and has a gradient.
    counts = (values + 0.5 - returns) ** 2 > (values + 0.2 - returns) ** 2
    assert 0 < counts.mean() < 1
    expected = (counts * (values + 0.5 - returns)).sum() / len(values)
    assert critic.module.head.bias.grad.item() == pytest.approx(expected, rel=1e-3)


def test_a_restored_critic_makes_the_same_next_step(tmp_path):
    batch = critic_batch(rollouts_of("sharing"), scores=SCORES)
    critic = critic_of()
    trainer = trainer_of(tiny_model("qwen3"), critic=critic)
    trainer.step(batch)
    folder = tmp_path / "step_1"
    trainer.snapshot().write(folder)
    saved = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    assert saved == pytest.approx(trainer.state_bytes(), rel=0.2)  # besides headers
    expected = trainer.step(batch)
    resumed_critic = critic_of(seed=5)
    resumed = trainer_of(AutoModelForCausalLM.from_pretrained(folder), critic=resumed_critic)
    resumed.restore(folder)
    assert resumed.step(batch) == expected
    for name, weight in weights_of(critic).items():
        assert torch.equal(weight, weights_of(resumed_critic)[name]), name
    assert (
        trainer.policy.weights().keys() == trainer_of(tiny_model("qwen3")).policy.weights().keys()
    )


def test_a_damaged_critic_is_one_sentence(tmp_path):
    trainer = trainer_of(tiny_model("qwen3"), critic=critic_of())
    folder = tmp_path / "step_0"
    trainer.snapshot().write(folder)
    (file,) = (folder / CRITIC).iterdir()
    file.write_bytes(b"not tensors")
    with pytest.raises(CheckpointError, match="remove that checkpoint"):
        trainer.restore(folder)


def test_the_critic_of_another_model_is_named_by_its_first_difference(tmp_path):
    folder = tmp_path / "step_0"
    trainer_of(tiny_model("qwen3"), critic=critic_of()).snapshot().write(folder)
    config = tiny_model("qwen3").config
    config.intermediate_size = 96
    critic = Critic(
        Qwen3ForCausalLM(config),
        estimator=GaeEstimator(),
        learning_rate=1e-3,
        settings=TrainSettings(),
    )
    with pytest.raises(CheckpointError) as caught:
        trainer_of(tiny_model("qwen3"), critic=critic).restore(folder)
    assert str(caught.value) == (
        f"{str(folder / CRITIC)!r} was saved from another model, whose"
        " backbone.layers.0.mlp.gate_proj.weight is of shape [48, 32], and here it is of shape"
        " [96, 32]; resume with the model.path and critic.path that the run began with."
    )


def test_microbatches_that_do_not_fit_are_split_with_the_same_advantages_and_update():
    rollouts = rollouts_of("sharing")
    batch = critic_batch(rollouts, scores=SCORES)
    most_rows = len(batch.microbatches[0].tokens) * 2 // 3
    outcomes = []
    for limit in (10_000, most_rows):
        critic = critic_of()

        def too_much(module, args, kwargs, limit=limit):
            if kwargs["input_ids"].shape[1] > limit:
                raise torch.OutOfMemoryError("CUDA out of memory.")

        critic.module.backbone.register_forward_pre_hook(too_much, with_kwargs=True)
        trainer = trainer_of(tiny_model("qwen3"), critic=critic, learning_rate=1e-3)
        outcomes.append((trainer.step(batch), weights_of(critic)))
    (whole, weights), (split, split_weights) = outcomes
    assert split["batch/microbatches"] > whole["batch/microbatches"]
    for name in (
        "critic/loss",
        "critic/explained_variance",
        "loss",
        "grad_norm",
        "batch/trained_tokens",
    ):
        assert split[name] == pytest.approx(whole[name], rel=1e-3, abs=1e-5), name
    for name, weight in weights.items():
        torch.testing.assert_close(weight, split_weights[name], rtol=1e-3, atol=1e-4, msg=name)


def test_an_update_that_is_not_finite_in_the_critic_is_skipped_for_both():
    critic = critic_of(estimator=GaeEstimator(normalize=False), loss_weight=float("inf"))
    trainer = trainer_of(tiny_model("qwen3"), critic=critic)
    before = {name: w.clone() for name, w in trainer.policy.weights().items()}
    judging = weights_of(critic)
    metrics = trainer.step(critic_batch(rollouts_of("unrelated"), scores=SCORES))
    assert metrics["skipped/updates"] == 1
    assert trainer.skipped == (0,)
    for name, weight in trainer.policy.weights().items():
        assert torch.equal(weight, before[name]), name
    for name, weight in weights_of(critic).items():
        assert torch.equal(weight, judging[name]), name


def test_the_critic_learns_to_predict_returns_from_the_prompt():
    generator = rng()
    critic = critic_of(learning_rate=3e-3, estimator=GaeEstimator(gae_lambda=0.95))
    trainer = trainer_of(tiny_model("qwen3"), critic=critic, learning_rate=1e-4)
    explained = []
    for _ in range(20):
        decisive = generator.integers(10, 14, 16)
        rollouts = [random_rollout(generator, begin=[3, token]) for token in decisive]
        scores = (decisive > 11).astype(float)
        metrics = trainer.step(critic_batch(rollouts, scores=scores, cut=[False] * 16))
        explained.append(metrics["critic/explained_variance"])
    assert np.mean(explained[:3]) < 0
    assert np.mean(explained[-3:]) > 0.3
