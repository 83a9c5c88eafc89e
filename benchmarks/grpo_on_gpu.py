"""GRPO end to end on one GPU: SmolLM2-135M-Instruct learns to add two numbers below 100.

    python benchmarks/smollm2.py smollm2
    python benchmarks/grpo_on_gpu.py smollm2 --json rows.json

A step has 32 prompts x 8 completions of at most 128 tokens. The reward is 1 if the last number is
the sum. Engine and trainer are two processes on the GPU and compute in float16 with float32 master
weights. With --dtype bfloat16, the first dozens of these small updates are lost to rounding.

To run TRL on the same machine (needs `pip install trl datasets`, and vllm to be fast):

    python benchmarks/grpo_on_gpu.py smollm2 --peer --save trl.json
    python benchmarks/grpo_on_gpu.py smollm2 --peer-json trl.json --json rows.json

Large models with random weights and an adapter, with the same long-tailed lengths on both sides:

    python benchmarks/grpo_on_gpu.py qwen3-8b --lengths forced --lora 32 --dtype bfloat16 \
        --steps 8 --set trainer.microbatch_tokens=8192 --set engine.options.kv_bytes=36000000000
    python benchmarks/grpo_on_gpu.py qwen3-8b --lengths forced --lora 32 --dtype bfloat16 \
        --steps 8 --peer --peer-sequences 8 --save trl.json

Any saved run can be the peer. To compare asynchronous with synchronous training, with completions
of up to 1,024 tokens:

    python benchmarks/grpo_on_gpu.py smollm2 --lengths long --sync --save sync.json
    python benchmarks/grpo_on_gpu.py smollm2 --lengths long --peer-json sync.json

Rows are {measure, ours, peer, ratio}: samples per second after the first steps, rewards over the
same number of samples, lengths, logprob mismatch, memory. In an asynchronous run, the mismatch
includes what the policy learned while its samples waited. With --sync, only rounding remains.
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import forced_lengths
from grpo_peer import measure_peer
from grpo_run import (
    PROMPT_TOKENS,
    WARM_UP_STEPS,
    Measurement,
    Workload,
    compare,
    load_measurement,
    sampled_gpu_memory,
)
from trl_runs import BETAS

from millrace.bench.workloads import shapes
from millrace.config import parse_overrides
from millrace.models.devices import resolve_device
from millrace.monitoring.activity import ROLES, mean_by_role, total_shares
from millrace.monitoring.files.metrics import read_metrics, table
from millrace.monitoring.files.trace import read_trace
from millrace.monitoring.run_dir import RunDir
from millrace.run.train import train

MAX_NEW_TOKENS = {"short": 128, "long": 1024, "forced": 1024}
EPISODES_RECORDED = 16  # per step; they show how many completions ended before the limit
# Samples per second of TRL 1.16 with vLLM 0.24 colocated, on one H200, for the default workload.
# Runs without --peer-json are compared with it.
RECORDED_PEER = 135.0


def main(argv: Sequence[str] | None = None) -> int:
    args = _arguments(argv)
    workload = Workload(
        model=args.model,
        lengths=args.lengths,
        prompts=args.prompts,
        group=args.group,
        max_new_tokens=args.max_new_tokens or MAX_NEW_TOKENS[args.lengths],
        steps=args.steps,
        learning_rate=args.learning_rate,
        seed=args.seed,
        device=(device := resolve_device(args.device).type),
        dtype=args.dtype or ("float16" if device == "cuda" else "float32"),
        lora=args.lora,
    )
    with tempfile.TemporaryDirectory(prefix="grpo-on-gpu-") as scratch:
        folder = Path(args.keep or scratch)
        if not Path(args.model).is_dir():
            workload = replace(workload, model=str(folder / "model"))
            forced_lengths.make_directory(args.model, folder / "model", device=device)
        if args.peer:
            measured = measure_peer(workload, folder=folder, sequences=args.peer_sequences)
        else:
            measured = measure_ours(
                workload,
                folder=folder,
                max_staleness=0 if args.sync else args.max_staleness,
                overrides=parse_overrides(dict(text.partition("=")[::2] for text in args.set)),
            )
    if args.save:
        measured.save(Path(args.save))
    peer = load_measurement(Path(args.peer_json)) if args.peer_json else None
    recorded = RECORDED_PEER if _is_recorded_workload(workload) and not args.peer else None
    rows = compare(measured, peer, recorded=recorded)
    print(_table(rows, ours=measured.name, peer=_peer_name(peer, recorded)))
    if args.json:
        Path(args.json).write_text(json.dumps(rows, indent=2) + "\n")
    return 0


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "model",
        help="directory that smollm2.py made; with forced lengths, a shape with random weights",
    )
    parser.add_argument("--steps", type=int, default=60, help="at least 2 (60)")
    parser.add_argument("--prompts", type=int, default=32, help="per step (32)")
    parser.add_argument("--group", type=int, default=8, help="completions of each prompt (8)")
    parser.add_argument("--lengths", choices=MAX_NEW_TOKENS, default="short", help="of completions")
    parser.add_argument("--max-new-tokens", type=int, help="at most (128; with long 1024)")
    parser.add_argument("--lora", type=int, metavar="RANK", help="train an adapter of all layers")
    parser.add_argument("--learning-rate", type=float, default=5e-6, help="(5e-6)")
    parser.add_argument("--max-staleness", type=int, default=4, help="of trained tokens (4)")
    parser.add_argument("--sync", action="store_true", help="staleness 0: synchronous training")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="auto")
    parser.add_argument(
        "--dtype", choices=["float32", "bfloat16", "float16"], help="float16; on a CPU float32"
    )
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="any Millrace setting"
    )
    parser.add_argument("--peer", action="store_true", help="run TRL instead of Millrace")
    parser.add_argument("--peer-sequences", type=int, help="of TRL in a forward pass, at most")
    parser.add_argument("--peer-json", metavar="FILE", help="a saved run to compare with")
    parser.add_argument("--save", metavar="FILE", help="save this run, for --peer-json")
    parser.add_argument("--json", metavar="FILE", help="write the rows here")
    parser.add_argument("--keep", metavar="DIR", help="keep the run directory here")
    args = parser.parse_args(argv)
    is_shape = args.model in shapes() and args.lengths == "forced"
    if not Path(args.model).is_dir() and not is_shape:
        parser.error(
            f"{args.model} is not a directory; run: python benchmarks/smollm2.py {args.model}, or"
            f" use --lengths forced with one of {', '.join(shapes())}"
        )
    if args.steps < 2:
        parser.error(f"--steps {args.steps} leaves no time between two steps; use at least 2")
    if args.peer and (args.sync or args.set):
        parser.error("--sync and --set are settings of Millrace; leave them out with --peer")
    return args


def measure_ours(
    workload: Workload, *, folder: Path, max_staleness: int, overrides: dict[str, Any]
) -> Measurement:
    run_dir = RunDir(folder / "run")
    with sampled_gpu_memory(workload.device) as used:
        train(
            settings(workload, run_dir=run_dir.path, max_staleness=max_staleness),
            tasks=workload.tasks(),
            scorers=workload.reward,
            environment=forced_lengths.make_environment() if workload.lengths == "forced" else None,
            **overrides,
        )
    rows = read_metrics(run_dir.metrics)
    busy_from_s = rows[min(WARM_UP_STEPS, len(rows) // 2) - 1]["time_s"]
    return Measurement(
        name=f"Millrace, {f'staleness {max_staleness}' if max_staleness else 'sync'}",
        samples_per_step=workload.samples_per_step,
        times_s=[row["time_s"] for row in rows],
        rewards=[row["reward/mean"] for row in rows],
        mean_lengths=[row["completion_length/mean"] for row in rows],
        mismatches=[row["mismatch/logprob"] for row in rows],
        ended_share=_ended_share(run_dir),
        peak_gpu_bytes=max(used, default=None),
        notes={
            "learning_rate": workload.learning_rate,
            "dtype": workload.dtype,
            "staleness_mean": sum(row["staleness/mean"] for row in rows) / len(rows),
            "groups_dropped": table(rows[-1], "dropped"),
            **_shares(run_dir, start_s=busy_from_s, end_s=rows[-1]["time_s"]),
        },
    )


def settings(workload: Workload, *, run_dir: Path, max_staleness: int) -> dict[str, Any]:
    """The settings that a user would write for this workload on one GPU."""
    on_gpu = workload.device == "cuda"
    waiting = (max_staleness + 1) * workload.prompts
    return {
        **({"lora": {"rank": workload.lora}} if workload.lora else {}),
        # The lengths of consecutive tasks are those of a step.
        **({"tasks": {"order": "sequential"}} if workload.lengths == "forced" else {}),
        "model": workload.model,
        "run_dir": str(run_dir),
        "seed": workload.seed,
        "sampling": {"max_new_tokens": workload.max_new_tokens},
        "rollout": {"group_size": workload.group, "max_running_groups": waiting},
        "buffer": {"capacity": waiting, "max_staleness": max_staleness},
        "engine": {
            "dtype": workload.dtype,
            # Room for all groups that may be in flight.
            "max_sequences": min(1024, waiting * workload.group) if on_gpu else 32,
            "max_context": PROMPT_TOKENS + workload.max_new_tokens,
        },
        "trainer": {
            "dtype": workload.dtype,
            "steps": workload.steps,
            "groups_per_step": workload.prompts,
            "microbatch_tokens": 32768 if on_gpu else 2048,
        },
        "optimizer": {"learning_rate": workload.learning_rate, "betas": BETAS},
        "placement": {"trainer": workload.device, "engines": workload.device},
        "scoring": {"workers": 1},
        "checkpoint": {"every_steps": 0},
        "monitoring": {"samples_per_step": EPISODES_RECORDED},
    }


def _shares(run_dir: RunDir, *, start_s: float, end_s: float) -> dict[str, Any]:
    """How busy engine and trainer were after the first steps, and what they waited for."""
    timed = [
        replace(span, start_s=max(span.start_s, start_s), end_s=min(span.end_s, end_s))
        for span in read_trace(run_dir.trace)
        if span.end_s > start_s and span.start_s < end_s
    ]
    roles = mean_by_role(total_shares(timed))
    return {
        **{f"{role}_busy": roles[role].busy for role in ROLES if role in roles},
        "idle_reasons": {role: roles[role].waiting for role in ROLES if role in roles},
    }


def _ended_share(run_dir: RunDir) -> float:
    """Share of the recorded episodes that ended before the limit."""
    finishes = [
        json.loads(line)["finish"]
        for path in run_dir.rollouts.glob("step_*.jsonl")
        for line in path.read_text(encoding="utf-8").splitlines()
    ]
    return sum(finish != "length" for finish in finishes) / len(finishes)


def _is_recorded_workload(workload: Workload) -> bool:
    shape = (workload.prompts, workload.group, workload.max_new_tokens, workload.lengths)
    return workload.device == "cuda" and shape == (32, 8, 128, "short")


def _peer_name(peer: Measurement | None, recorded: float | None) -> str:
    if peer is not None:
        return peer.name
    return "TRL 1.16, vLLM 0.24 colocated (recorded)" if recorded is not None else "no peer"


def _table(rows: list[dict[str, Any]], *, ours: str, peer: str) -> str:
    lines = [f"this run: {ours}; peer: {peer}", f"{'':44}{'this run':>14}{'peer':>14}{'ratio':>8}"]
    for row in rows:
        values = (f"{_format(row[side]):>14}" for side in ("ours", "peer"))
        ratio = "" if row["ratio"] is None else f"{row['ratio']:.2f}x"
        lines.append(f"{row['measure']:44}{''.join(values)}{ratio:>8}")
    for role, reasons in rows[0].get("idle_reasons", {}).items():
        longest_first = sorted(reasons.items(), key=lambda item: -item[1])
        waits = ", ".join(f"{share:.0%} {why}" for why, share in longest_first if share >= 0.005)
        busy = rows[0][f"{role}_busy"]
        lines.append(f"{role} {busy:.0%} busy, waits for: {waits or 'nothing'}")
    return "\n".join(lines)


def _format(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:,.0f}" if value >= 1000 else f"{value:.4g}"


if __name__ == "__main__":
    sys.exit(main())
