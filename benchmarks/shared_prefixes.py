"""Training on trees of turns: rows computed per trained token, and speed, with and without sharing.

    python benchmarks/shared_prefixes.py --json shared.json

An agentic workload: groups of 8 episodes of 8 turns. The first episode is played whole. Each other
one begins as an earlier one, branches off at a random turn, and plays the rest anew, as episodes do
that are branched by [environment.recipe] or tried again. A token is trained in one episode, and is
context in those that branched off after it. A prompt has four times as many tokens as a turn, and
half of a turn is sampled; the rest are results of tools.

The same rollouts are packed three times: without sharing, with the rows that all episodes of a
group share stored once (the prompt and the turns before the first branch), and as trees. The
gradient of every parameter is compared between the first and the last, and in 16 bits also with
that of float32 without sharing. Rows are given per trained token.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from millrace.bench import show_result
from millrace.bench.workloads import best_s, chosen_device, described, group_of, make_model
from millrace.core.microbatch import Batch
from millrace.core.records import Group, Rollout, Sampling
from millrace.models.attention.packed import PACKED
from millrace.training.losses.policy_loss import PolicyLoss
from millrace.training.optimizer import Schedule, TrainSettings
from millrace.training.packing.packer import pack
from millrace.training.packing.prefix_trees import Sample, grow_trees
from millrace.training.policy_model import PolicyModel
from millrace.training.trainer import Trainer

NUM_EPISODES = NUM_TURNS = 8
PROMPT_TURNS = 4  # the prompt is as long as this many turns


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", help="a shape of `millrace bench train`")
    parser.add_argument("--groups", type=int, default=2)
    parser.add_argument("--turn-tokens", type=int, help="of one turn (256; on a CPU 32)")
    parser.add_argument("--microbatch-tokens", type=int, default=16384)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    show_result(measure(args), args.json)


def measure(args: argparse.Namespace) -> dict[str, Any]:
    device, dtype = chosen_device(args)
    on_gpu = device.type == "cuda"
    name = args.model or ("qwen3-1.7b" if on_gpu else "tiny")
    trainer = make_trainer(name, dtype, device)
    rng = np.random.default_rng(0)
    size = args.turn_tokens or (256 if on_gpu else 32)
    vocab = trainer.policy.module.config.vocab_size
    groups = [episodes(rng, number, size=size, vocab=vocab) for number in range(args.groups)]
    alone = [
        group_of(i, [rollout], np.array([advantage]))
        for i, (rollout, advantage) in enumerate(
            pair for group in groups for pair in zip(group.rollouts, group.advantages, strict=True)
        )
    ]
    batches = [pack(part, microbatch_tokens=args.microbatch_tokens) for part in (alone, groups)]
    seconds = [[] for _ in batches]
    for _ in range(args.repeats):  # side by side
        for batch, own in zip(batches, seconds, strict=True):
            own.append(best_s(lambda b=batch: trainer.accumulate(b), repeats=1, device=device))
    unshared, trees = (gradient(trainer, batch) for batch in batches)
    rounding = {}
    if dtype != torch.float32:
        trainer.policy.module.to("cpu")
        exact = gradient(make_trainer(name, torch.float32, device), batches[0])
        rounding = {
            "rounding_unshared": largest_difference(unshared, exact),
            "rounding_trees": largest_difference(trees, exact),
        }
    trained = batches[0].num_trained_tokens
    return {
        "model": name,
        **described(device, dtype),
        "trained_tokens": trained,
        "rows_unshared": num_rows(batches[0]) / trained,
        "rows_first_level": first_level_rows(groups) / trained,
        "rows_trees": num_rows(batches[1]) / trained,
        "unshared_s": min(seconds[0]),
        "trees_s": min(seconds[1]),
        "speedup": min(seconds[0]) / min(seconds[1]),
        "gradient_error": largest_difference(trees, unshared),
        **rounding,
    }


def make_trainer(name: str, dtype: torch.dtype, device: torch.device) -> Trainer:
    """With the same random weights in each call."""
    model, _ = make_model(name, dtype=torch.float32, device=device, attention=PACKED)
    settings = TrainSettings(compute_dtype=dtype, compile_layers=device.type == "cuda")
    policy = PolicyModel(model, settings=settings)
    schedule = Schedule(learning_rate=1e-6, total_steps=1000)
    return Trainer(policy, loss=PolicyLoss(), schedule=schedule)


def episodes(rng: np.random.Generator, number: int, *, size: int, vocab: int) -> Group:
    """The episodes of one group, as rollouts; episode i has the advantage -1 or 1."""

    def turns(count: int) -> tuple[np.ndarray, np.ndarray]:
        """New tokens, and which of them were sampled."""
        sampled = np.tile(np.arange(size) < size // 2, count)
        return rng.integers(3, vocab, count * size).astype(np.int32), sampled

    prompt = rng.integers(3, vocab, PROMPT_TURNS * size).astype(np.int32)
    tokens, mask = turns(NUM_TURNS)
    played = [
        (np.concatenate([prompt, tokens]), np.concatenate([np.zeros(len(prompt), bool), mask]))
    ]
    while len(played) < NUM_EPISODES:
        before, _ = played[rng.integers(len(played))]
        turn = int(rng.integers(1, NUM_TURNS))
        shared = before[: (PROMPT_TURNS + turn) * size]
        tokens, mask = turns(NUM_TURNS - turn)
        is_new = np.concatenate([np.zeros(len(shared), bool), mask])
        played.append((np.concatenate([shared, tokens]), is_new))
    advantages = (-1.0) ** np.arange(NUM_EPISODES)
    return group_of(number, [rollout_of(*one, vocab=vocab) for one in played], advantages)


def rollout_of(tokens: np.ndarray, mask: np.ndarray, *, vocab: int) -> Rollout:
    return Rollout(
        tokens=tokens,
        mask=mask,
        engine_logprobs=np.where(mask, -np.log(vocab), 0).astype(np.float32),
        versions=np.where(mask, 0, -1).astype(np.int32),
        sampling=Sampling(),
    )


def num_rows(batch: Batch) -> int:
    return sum(len(part.tokens) for part in batch.microbatches)


def first_level_rows(groups: Sequence[Group]) -> int:
    """Rows if only the rows that all branches of a tree share were stored once."""
    trees = [
        tree
        for group in groups
        for tree in grow_trees([Sample(rollout=r, advantages=np.zeros(0)) for r in group.rollouts])
    ]
    return sum(
        tree.num_shared + sum(len(path.tokens) - tree.num_shared for path in tree.paths())
        for tree in trees
    )


def gradient(trainer: Trainer, batch: Batch) -> list[torch.Tensor]:
    """Of each parameter, on the host."""
    trainer.accumulate(batch)
    found = [parameter.grad for parameter in trainer.policy.module.parameters()]
    return [grad.to("cpu", copy=True) for grad in found if grad is not None]


def largest_difference(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> float:
    """Of all parameters, relative to the largest entry of the parameter's gradient."""
    pairs = zip(ours, theirs, strict=True)
    return max(((a - b).abs().max() / b.abs().max()).item() for a, b in pairs)


if __name__ == "__main__":
    main()
