"""Throughput with a process reward model as costly as generation: scoring steps during generation
against scoring complete episodes.

    python benchmarks/pipelined_scoring.py

The two runs differ only in `pipelined`. Both are strictly on-policy (buffer.max_staleness = 0), so
a training step waits until its whole batch is generated and scored. Policy and judge, the process
reward model, have random weights. All completions have the same length, and a reasoning step ends
about every 13 tokens. Engine and judge have one thread each. The trainer has two, because it works
while both wait. The benchmark needs two idle cores.
"""

import argparse
import json
import random
import statistics
import tempfile
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from chains import PIECES, STEP, small_config
from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM, Qwen3ForTokenClassification

import millrace as mr
from millrace.demo.model import build_tokenizer
from millrace.monitoring.files.metrics import read_metrics, table

WARM_STEPS = 2  # left out of the rates


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=8, help="timed; their median counts")
    parser.add_argument("--tokens", type=int, default=768, help="of each completion")
    parser.add_argument("--groups", type=int, default=4, help="of 8 episodes, per step")
    parser.add_argument("--policy-layers", type=int, default=2)
    parser.add_argument("--policy-size", type=int, default=64)
    parser.add_argument("--judge-layers", type=int, default=4)
    parser.add_argument("--judge-size", type=int, default=192)
    parser.add_argument(
        "--ahead-tokens", type=int, default=32, help="fewest tokens to score ahead (32)"
    )
    parser.add_argument("--repeats", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_models(folder, args)
        for repeat in range(args.repeats):
            rows = {
                pipelined: measure(folder, pipelined=pipelined, repeat=repeat, args=args)
                for pipelined in (False, True)
            }
            for row in rows.values():
                print(json.dumps(row), flush=True)
            ratio = rows[True]["episodes_per_s"] / rows[False]["episodes_per_s"]
            print(f"pipelined: {ratio:.2f} times the throughput", flush=True)


def make_models(folder: Path, args: argparse.Namespace) -> None:
    tokenizer = without_end(build_tokenizer(PIECES))
    torch.manual_seed(0)
    config = small_config(
        len(tokenizer), hidden_size=args.policy_size, num_layers=args.policy_layers
    )
    config.eos_token_id = None
    config.max_position_embeddings = 2 * args.tokens
    policy = Qwen3ForCausalLM(config)
    policy.generation_config.eos_token_id = None
    config = small_config(len(tokenizer), hidden_size=args.judge_size, num_layers=args.judge_layers)
    config.num_labels = 1
    config.max_position_embeddings = 2 * args.tokens
    judge = Qwen3ForTokenClassification(config)
    for name, model in (("policy", policy), ("judge", judge)):
        model.save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)


def without_end(tokenizer: PreTrainedTokenizerFast) -> PreTrainedTokenizerFast:
    """The tokenizer without an end token, so that every completion has max_new_tokens."""
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer.backend_tokenizer, pad_token=tokenizer.pad_token
    )


def measure(
    folder: Path, *, pipelined: bool, repeat: int, args: argparse.Namespace
) -> dict[str, Any]:
    run_dir = folder / f"run-{pipelined}-{repeat}"
    rng = random.Random(0)
    scorer = {
        "type": "process_reward_model",
        "model": str(folder / "judge"),
        "steps": {"by": "delimiter", "delimiter": STEP},
        "pipelined": pipelined,
        "ahead_tokens": args.ahead_tokens,
    }
    mr.train(
        {
            "model": str(folder / "policy"),
            "run_dir": str(run_dir),
            "scorers": [scorer],
            "placement": {"models": {scorer["type"]: "cpu"}},
            "sampling": {"max_new_tokens": args.tokens},
            "rollout": {"group_size": 8},
            "buffer": {"max_staleness": 0, "capacity": args.groups},
            "trainer": {
                "steps": args.steps + WARM_STEPS,
                "groups_per_step": args.groups,
            },
            "optimizer": {"learning_rate": 1e-6},
            "engine": {"max_sequences": 8 * args.groups},
            "cluster": {"threads": 1},
            "scoring": {"workers": 1, "advantages": {"type": "returns"}},
            "checkpoint": {"every_steps": 0},
            "monitoring": {"progress": "off"},
        },
        tasks=[{"prompt": "".join(rng.choices("01234", k=5)) + "="} for _ in range(256)],
    )
    rows = read_metrics(run_dir / "metrics.jsonl")
    times = [row["time_s"] for row in rows[WARM_STEPS - 1 :]]
    seconds = statistics.median(end - begin for begin, end in pairwise(times))
    timed = rows[WARM_STEPS:]
    idle = [table(row, "waiting/process_reward_model-0") for row in timed]
    return {
        "pipelined": pipelined,
        "episodes_per_s": round(8 * args.groups / seconds, 2),
        "seconds_per_step": round(seconds, 3),
        "engine_busy": mean([row["busy/engine"] for row in timed]),
        "judge_busy": mean([1.0 - sum(reasons.values()) for reasons in idle]),
        "trainer_busy": mean([row["busy/trainer"] for row in timed]),
    }


def mean(values: list[float]) -> float:
    return round(sum(values) / len(values), 3)


if __name__ == "__main__":
    main()
