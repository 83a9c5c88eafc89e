import dataclasses

import numpy as np
import torch
from batches import batch_of, random_rollout

from millrace.training.packing.splitting import halves
from millrace.training.token_batches import PolicyOutput, token_batch


def two_turns(rng: np.random.Generator):
    """Two sampled tokens, two of the environment, and three sampled ones."""
    rollout = random_rollout(rng, prompt=3, sampled=7)
    mask = np.array([0, 0, 0, 1, 1, 0, 0, 1, 1, 1], bool)
    return dataclasses.replace(rollout, mask=mask)


def tokens_of(batch, *, version: int = 0):
    (microbatch,) = batch.microbatches
    nothing = torch.zeros(len(microbatch.targets))
    output = PolicyOutput(nothing, nothing, None)
    return token_batch(microbatch, batch, output=output, version=version)


def test_turn_ends_at_a_token_that_was_not_sampled_and_with_its_sequence():
    rng = np.random.default_rng(1)
    tokens = tokens_of(batch_of([two_turns(rng), two_turns(rng)]))
    assert tokens.sequences.ids.tolist() == [0] * 5 + [1] * 5
    assert tokens.sequences.lengths.tolist() == [5, 5]
    assert tokens.turns.ids.tolist() == [0, 0, 1, 1, 1, 2, 2, 3, 3, 3]
    assert tokens.turns.lengths.tolist() == [2, 3, 2, 3]


def test_turns_of_sequences_with_a_shared_prefix_are_separate():
    rng = np.random.default_rng(2)
    first = two_turns(rng)
    second = dataclasses.replace(first, tokens=first.tokens.copy())
    second.tokens[8] += 1
    batch = batch_of([first, second])
    assert (batch.microbatches[0].parents >= 0).any()
    assert tokens_of(batch).turns.lengths.tolist() == [2, 3, 2, 3]


def test_staleness_is_counted_from_the_trainers_version():
    rollout = random_rollout(np.random.default_rng(3), prompt=2, sampled=3)
    rollout = dataclasses.replace(rollout, versions=np.array([-1, -1, 4, 5, 7], np.int32))
    assert tokens_of(batch_of([rollout]), version=7).staleness.tolist() == [3, 2, 0]


def test_reference_logprobs_reach_the_loss_also_from_halves_of_a_microbatch():
    rng = np.random.default_rng(4)
    rollouts = [
        dataclasses.replace(r, reference_logprobs=np.arange(10, dtype=np.float32) - 50 * i)
        for i, r in enumerate([random_rollout(rng), random_rollout(rng)])
    ]
    batch = batch_of(rollouts)
    whole = tokens_of(batch).reference_logprobs
    assert sorted(whole.tolist()) == sorted([*range(4, 10), *range(-46, -40)])
    parts = halves(batch.microbatches[0])
    found = np.concatenate([part.reference_logprobs for part in parts])
    assert found.tolist() == whole.tolist()


def test_without_a_reference_there_are_no_reference_logprobs():
    tokens = tokens_of(batch_of([random_rollout(np.random.default_rng(5))]))
    assert tokens.reference_logprobs is None
    assert tokens.proximal_logprobs is None
