"""CPU time between scores and the trainer: advantages, filters, buffer and packing.

    python benchmarks/shaping_speed.py --json shaping.json

A step has 4,096 rollouts of 2,048 tokens on average (prompts of 128 to 512 tokens, completions with
a long tail), in groups of 16. The filters are `zero_variance` and `overlong`; `overlong` masks
completions that were cut at four times the average length. Everything runs on one core. The
benchmark measures CPU time, which other work on the machine does not change, and compares it with a
step that trains 42,546 tokens per second: Qwen3-1.7B on one H200 (docs/performance.md). Efficiency
is the filled share of the microbatches' token budgets.
"""

import argparse
import asyncio
import json
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from millrace.controller.buffer import Buffer
from millrace.controller.orders import Oldest
from millrace.core.microbatch import Batch
from millrace.core.records import Episode, Group, Rollout, Sampling, Score, Task, Turn
from millrace.core.staleness import StalenessLimit
from millrace.scoring.advantages import GroupAdvantages
from millrace.scoring.shaping import build_filters
from millrace.training.packing.packer import pack

TRAINED_TOKENS_PER_S = 42_546
SAMPLING = Sampling(max_new_tokens=8192)
VOCAB = 151_936
FILTERS = ({"type": "zero_variance"}, {"type": "overlong"})


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rollouts", type=int, default=4096)
    parser.add_argument("--tokens", type=int, default=2048, help="of a rollout, on average")
    parser.add_argument("--group-size", type=int, default=16)
    parser.add_argument("--microbatch-tokens", type=int, default=16384)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    groups = make_groups(args.rollouts, tokens=args.tokens, group_size=args.group_size)
    result = measure(groups, microbatch_tokens=args.microbatch_tokens)
    for name, value in result.items():
        print(f"{name:<24}{value:,.4g}")
    if args.json:
        args.json.write_text(json.dumps(result, indent=1) + "\n")


def make_groups(num_rollouts: int, *, tokens: int, group_size: int) -> list[Group]:
    """Groups of random tokens with random scores, without advantages."""
    rng = np.random.default_rng(0)
    groups = []
    for number in range(num_rollouts // group_size):
        prompt = rng.integers(0, VOCAB, int(rng.integers(tokens // 16, tokens // 4)))
        mean = tokens - tokens * 5 // 32  # without the mean prompt
        lengths = np.clip(rng.gamma(2.0, mean / 2, group_size), 1, 4 * tokens).astype(int)
        episodes = [
            _episode(_rollout(rng, prompt, num_sampled=length), is_cut=length == 4 * tokens)
            for length in lengths
        ]
        groups.append(
            Group(
                number=number,
                task=Task(prompt=""),
                episodes=tuple(episodes),
                scores=tuple(Score(total=float(s), parts={}) for s in rng.random(group_size)),
            )
        )
    return groups


def measure(groups: Sequence[Group], *, microbatch_tokens: int) -> dict[str, float]:
    started_s = time.process_time()
    estimate = GroupAdvantages()
    scored = [replace(g, advantages=estimate(g).astype(np.float32)) for g in groups]
    advantages_s = time.process_time() - started_s
    started_s = time.process_time()
    filters, wasted = build_filters(FILTERS), Counter[str]()
    useful = [filters(group, wasted=wasted) for group in scored]
    filters_s = time.process_time() - started_s
    taken: list[Group] = []
    started_s = time.process_time()
    asyncio.run(_through_buffer(useful, taken))
    buffer_s = time.process_time() - started_s
    started_s = time.process_time()
    batch = pack(taken, microbatch_tokens=microbatch_tokens)
    packing_s = time.process_time() - started_s
    num_tokens = sum(len(rollout.tokens) for group in groups for rollout in group.rollouts)
    step_s = num_tokens / TRAINED_TOKENS_PER_S
    return {
        "tokens": num_tokens,
        "masked_tokens": sum(wasted.values()),
        "advantages_s": advantages_s,
        "filters_s": filters_s,
        "buffer_s": buffer_s,
        "packing_s": packing_s,
        "step_s": step_s,
        "share_of_step": (advantages_s + filters_s + buffer_s + packing_s) / step_s,
        "microbatches": len(batch.microbatches),
        "packing_efficiency": efficiency(batch, microbatch_tokens=microbatch_tokens),
    }


def efficiency(batch: Batch, *, microbatch_tokens: int) -> float:
    rows = sum(len(microbatch.tokens) for microbatch in batch.microbatches)
    return rows / (len(batch.microbatches) * microbatch_tokens)


def _episode(rollout: Rollout, *, is_cut: bool) -> Episode:
    turn = Turn(prompt="", completion="", finish="length" if is_cut else "stop")
    return Episode(turns=(turn,), rollouts=(rollout,))


async def _through_buffer(groups: Sequence[Group], taken: list[Group]) -> None:
    """Admit all groups, then take them with the staleness check."""
    buffer = Buffer(
        capacity=len(groups),
        limit=StalenessLimit(max_staleness=2),
        order=Oldest(),
        on_drop=lambda waiting: None,
    )
    for group in groups:
        await buffer.admit(group)
    # Not returned: asyncio.run() would format the result, which is slow.
    taken += await buffer.take(len(groups), version=1)


def _rollout(rng: np.random.Generator, prompt: np.ndarray, *, num_sampled: int) -> Rollout:
    length = len(prompt) + num_sampled
    mask = np.arange(length) >= len(prompt)
    return Rollout(
        tokens=np.concatenate([prompt, rng.integers(0, VOCAB, num_sampled)]).astype(np.int32),
        mask=mask,
        engine_logprobs=np.where(mask, -rng.random(length), 0).astype(np.float32),
        versions=np.where(mask, 0, -1).astype(np.int32),
        sampling=SAMPLING,
    )


if __name__ == "__main__":
    main()
