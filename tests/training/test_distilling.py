"""Distillation from the scores of a teacher to the weights of the trainer."""

import dataclasses

import numpy as np
import pytest
import torch
from architectures import VOCAB, tiny_model
from batches import batch_of, random_rollout, trainer_of

from millrace.core.records import Rollout, TeacherLogprobs, score_request_for
from millrace.inference.embedded.scoring import ScoringEngine
from millrace.models.attention.packed import PACKED_ATTENTION
from millrace.training.losses.recipes import build_loss
from millrace.training.packing.splitting import halves


def taught_rollouts(*, num_topk: int, num: int = 4) -> list[Rollout]:
    rng = np.random.default_rng(5)
    rollouts = [random_rollout(rng, temperature=1.0) for _ in range(num)]
    model = tiny_model("qwen3", seed=1)
    model.set_attn_implementation(PACKED_ATTENTION)
    requests = [score_request_for(r, temperature=1.0, top_k=num_topk) for r in rollouts]
    scored = ScoringEngine(model).score([requests], version=None)[0]

    def spread(values: np.ndarray, rollout: Rollout) -> np.ndarray:
        whole = np.zeros((len(rollout.tokens), *values.shape[1:]), values.dtype)
        whole[rollout.mask] = values
        return whole

    return [
        dataclasses.replace(
            rollout,
            teacher=TeacherLogprobs(
                logprobs=spread(one.logprobs, rollout),
                top_ids=spread(one.top_ids, rollout),
                top_logprobs=spread(one.top_logprobs, rollout),
            ),
        )
        for rollout, one in zip(rollouts, scored, strict=True)
    ]


def distributions(model, rollout: Rollout) -> torch.Tensor:
    """[sampled, V] logprobs by plain transformers; differentiable."""
    model.set_attn_implementation("eager")
    tokens = torch.from_numpy(rollout.tokens).long()
    sampled = torch.from_numpy(np.flatnonzero(rollout.mask)) - 1
    return model(input_ids=tokens[None]).logits[0, sampled].log_softmax(-1)


def test_topk_of_all_ids_but_one_gives_the_gradient_of_the_full_divergence():
    rollouts = taught_rollouts(num_topk=VOCAB - 1)
    batch = batch_of(rollouts)
    loss = build_loss({"type": "distil", "distil": "forward_kl"}, max_new_tokens=6)
    trainer = trainer_of(tiny_model("qwen3"), loss=loss, logprob_chunk=7)
    trainer.accumulate(batch)
    plain, teacher = tiny_model("qwen3"), tiny_model("qwen3", seed=1)
    divergences = []
    for rollout in rollouts:
        q = distributions(plain, rollout)
        p = distributions(teacher, rollout).detach()
        divergences.append((p.exp() * (p - q)).sum(-1))
    torch.cat(divergences).mean().backward()
    expected = dict(plain.named_parameters())
    for name, parameter in trainer.policy.module.named_parameters():
        torch.testing.assert_close(parameter.grad, expected[name].grad, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("distil", ["reverse_kl", "forward_kl", "jsd"])
def test_steps_reduce_the_divergence_from_the_teacher(distil):
    batch = batch_of(taught_rollouts(num_topk=8))
    loss = build_loss({"type": "distil", "distil": distil}, max_new_tokens=6)
    trainer = trainer_of(tiny_model("qwen3"), loss=loss, learning_rate=3e-3)
    metric = "teacher/kl" if distil == "reverse_kl" else "teacher/divergence"
    found = [abs(trainer.step(batch)[metric]) for _ in range(30)]
    assert found[-1] < 0.5 * found[0]


def test_halves_of_a_microbatch_keep_their_teacher_logprobs():
    (whole,) = batch_of(taught_rollouts(num_topk=3)).microbatches
    parts = halves(whole)
    assert parts is not None
    for name in ("teacher_logprobs", "topk_ids", "topk_logprobs"):
        joined = np.concatenate([getattr(part, name) for part in parts])
        np.testing.assert_array_equal(joined, getattr(whole, name))
