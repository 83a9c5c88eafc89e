"""Tokens per second with speculation, divided by those of plain decoding, at few live sequences.

    python benchmarks/smollm2.py smollm2
    python benchmarks/speculation.py smollm2
    python benchmarks/speculation.py smollm2 --device cuda

Two engines with the same model take turns, one with engine.options.speculation = "off". Each row is
one workload at one number of live sequences: greedy retries, whose prompts were served before;
greedy code edits and sampled tool results, whose completions repeat parts of their prompts; text at
random; and more sequences than speculation takes. The tokens of both engines are compared. On a
GPU, the engine without speculation has its decode loop, and the other one decodes in single steps.
A shape has random weights and random prompts, so only its retries repeat anything.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from millrace.bench import write_result
from millrace.bench.workloads import chosen_device, described, make_model
from millrace.config import EngineConfig
from millrace.core.records import Completion, Request, Sampling
from millrace.inference.backend import EmbeddedBackend
from millrace.inference.embedded.build import engine_of
from millrace.inference.embedded.engine import EmbeddedEngine
from millrace.inference.embedded.self_test import engine_path

CODE = """\
class Account:
    def __init__(self, owner, balance=0):
        self.owner = owner
        self.balance = balance
        self.history = []

    def deposit(self, amount):
        if amount <= 0:
            raise ValueError("amount must be positive")
        self.balance += amount
        self.history.append(("deposit", amount))

    def withdraw(self, amount):
        if amount > self.balance:
            raise ValueError("not enough money")
        self.balance -= amount
        self.history.append(("withdraw", amount))
"""
ROWS = "\n".join(
    f'{{"id": {100 + 7 * i}, "name": "item {i}", "price": {3 * i + 5}, "in_stock": true}}'
    for i in range(12)
)


class Workload(NamedTuple):
    name: str
    prompt: str  # "" = random tokens
    live: int
    group: int = 1  # completions of a prompt
    temperature: float = 0.3
    attempts: int = 1  # the last one is measured


EDIT = f"Repeat this code exactly, but rename deposit to pay_in.\n```python\n{CODE}```"
TOOL = f"Repeat the rows of this result exactly, as JSON.\n{ROWS}"
TASK = "Explain in a few sentences what Account is for in a bank."
WORKLOADS = (
    *(Workload("retries", TASK, live, temperature=0.0, attempts=2) for live in (16, 4, 1)),
    *(Workload("code edits", EDIT, live, temperature=0.0) for live in (16, 4, 1)),
    *(Workload("tool results", TOOL, live, group=8) for live in (16, 4, 1)),
    *(Workload("random text", "", live, temperature=1.0) for live in (16, 4, 1)),
    Workload("retries, many", TASK, 32, temperature=0.0, attempts=2),
)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Speculation against plain decoding.")
    parser.add_argument("model", help="a model directory, or a shape of `millrace bench engine`")
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--only", nargs="+", help="parts of the names of the rows to measure")
    parser.add_argument("--live", type=int, nargs="+", help="numbers of sequences to measure")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", choices=["float32", "bfloat16", "float16"])
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows here")
    args = parser.parse_args(argv)
    torch.set_num_threads(args.threads)
    rows: list[dict[str, Any]] = []
    print(f"{'workload':<20}{'live':>5}{'plain':>9}{'drafts':>9}{'ratio':>7}{'accepted':>10}")
    for load in WORKLOADS:
        is_named = not args.only or any(part in load.name for part in args.only)
        if not is_named or (args.live and load.live not in args.live):
            continue
        row = measure(load, args)
        rows.append(row)
        print(
            f"{load.name:<20}{load.live:>5}{row['plain']:>9.1f}{row['drafts']:>9.1f}"
            f"{row['ratio']:>7.2f}{row['accepted']:>10}",
            flush=True,
        )
    write_result(rows, args.json)
    return 0


def measure(load: Workload, args: argparse.Namespace) -> dict[str, Any]:
    """Both engines in turn; the median of the ratios, and the rates of that turn."""
    device, dtype = chosen_device(args)
    engines = {}
    for setting in ("off", "on"):
        path = engine_path(device)
        model, tokenizer = make_model(args.model, dtype=dtype, device=device, attention=path)
        config = EngineConfig(max_sequences=max(32, load.live), max_context=2048)
        options = EmbeddedBackend(speculation=setting)
        engines[setting] = engine_of(model, tokenizer, config=config, version=0, options=options)
    turns, differing = [], 0
    for repeat in range(args.repeats):
        numbers = range(-(-load.live // load.group))
        requests = [
            request_of(load, i, seed=repeat, tokenizer=tokenizer, args=args) for i in numbers
        ]
        for _ in range(load.attempts - 1):
            run([*engines.values()], requests)
        (plain, texts), (drafts, others) = run([*engines.values()], requests)
        turns.append((drafts / plain, plain, drafts))
        pairs = zip(texts, others, strict=True)
        differing += sum(a.tokens.tolist() != b.tokens.tolist() for a, b in pairs)
    ratio = statistics.median(turn[0] for turn in turns)
    _, plain, drafts = min(turns, key=lambda turn: abs(turn[0] - ratio))
    stats = engines["on"].stats()
    accepted = f"{stats.accepted_tokens}/{stats.drafted_tokens}"
    row = {"workload": load.name, "live": load.live, "model": args.model, "accepted": accepted}
    row |= described(device, dtype)
    ratios = [round(turn[0], 3) for turn in turns]
    return {
        **row,
        "plain": plain,
        "drafts": drafts,
        "ratio": ratio,
        "ratios": ratios,
        "differing": differing,  # completions, by rounding
    }


def request_of(
    load: Workload,
    index: int,
    *,
    seed: int,
    tokenizer: PreTrainedTokenizerBase,
    args: argparse.Namespace,
) -> Request:
    if load.prompt and tokenizer.chat_template:
        text = load.prompt.replace("Account", f"Account{index}")  # prompts of their own
        messages = [{"role": "user", "content": text}]
        prompt = tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_dict=False
        )
    else:
        prompt = np.random.default_rng((seed, index)).integers(3, 1000, 64).tolist()
    sampling = Sampling(max_new_tokens=args.new_tokens, temperature=load.temperature)
    count = min(load.group, load.live)
    return Request(
        id=str(index),
        prompt=np.array(prompt, dtype=np.int32),
        n=count,
        seed=1000 * seed + index,
        sampling=sampling,
    )


def run(
    engines: Sequence[EmbeddedEngine], requests: Sequence[Request]
) -> list[tuple[float, list[Completion]]]:
    """Tokens per second of each engine after prefill, and its completions. The engines take turns
    after every pass, so that a machine that changes its speed changes it for all of them."""
    seconds, before = [0.0] * len(engines), [0] * len(engines)
    found: list[dict[tuple[str, int], Completion]] = [{} for _ in engines]
    for number, engine in enumerate(engines):
        for request in requests:
            engine.add_request(request)
        engine.step()
        before[number] = engine.stats().generated_tokens
    while any(engine.has_work for engine in engines):
        for number, engine in enumerate(engines):
            started_s = time.perf_counter()
            finished = engine.step() if engine.has_work else []
            seconds[number] += time.perf_counter() - started_s
            for one in finished:
                found[number] |= {(one.id, member): c for member, c in one.completions.items()}
    return [
        ((engine.stats().generated_tokens - first) / spent, [own[key] for key in sorted(own)])
        for engine, first, spent, own in zip(engines, before, seconds, found, strict=True)
    ]


if __name__ == "__main__":
    sys.exit(main())
