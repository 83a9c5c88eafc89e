"""Tokens that an engine computes for each turn of a conversation, and for a fork.

    python benchmarks/turns.py

Each turn adds 32 prompt tokens and samples 32. The engine counts the tokens that it computes. If
the KV of earlier turns is kept, each turn costs the same, so the cost of a conversation is linear
in its length. Otherwise it is quadratic. A fork continues from the middle of the last reply.
Weights are random and nothing is timed, so one core suffices.
"""

import argparse
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from millrace.bench.workloads import make_model
from millrace.config import EngineConfig
from millrace.core.completions import cut
from millrace.core.records import Completion, Request, Sampling
from millrace.inference.backend import EmbeddedBackend
from millrace.inference.embedded.build import engine_of
from millrace.inference.embedded.engine import EmbeddedEngine
from millrace.inference.embedded.self_test import SINGLE_STEPS

NEW_TOKENS = 32  # per turn: so many prompt tokens are added, and so many are sampled
MODEL = "tiny"


class TurnCase(NamedTuple):
    name: str
    settings: dict[str, Any]
    swaps: bool  # new weights after every turn
    prefix_cache: bool = True


CASES = (
    TurnCase("no swaps", {}, swaps=False),
    TurnCase('a swap every turn, kv = "keep"', {"kv": "keep"}, swaps=True),
    TurnCase('a swap every turn, kv = "recompute"', {"kv": "recompute"}, swaps=True),
    TurnCase("prefix_cache = false", {}, swaps=False, prefix_cache=False),
)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--turns", type=int, default=16)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    rows = [measure(case, num_turns=args.turns) for case in CASES]
    print(table(rows))
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1) + "\n")
    return 0


def measure(case: TurnCase, *, num_turns: int) -> dict[str, Any]:
    model, tokenizer = make_model(
        MODEL, dtype=torch.float32, device=torch.device("cpu"), attention=SINGLE_STEPS
    )
    config = EngineConfig(max_sequences=1, **case.settings)
    options = EmbeddedBackend(prefix_cache=case.prefix_cache)
    engine = engine_of(model, tokenizer, config=config, version=0, options=options)
    conversation = MeasuredConversation(engine)
    turns = []
    for turn in range(num_turns):
        turns.append(conversation.add_turn())
        if case.swaps:
            weights = {name: value.detach().clone() for name, value in model.named_parameters()}
            engine.swap(weights, version=turn + 1)
    num_tokens = len(conversation.tokens)
    num_forked = conversation.fork()
    return {"case": case.name, "computed": turns, "tokens": num_tokens, "fork": num_forked}


class MeasuredConversation:
    """A conversation that sends its whole history to the engine at each turn."""

    def __init__(self, engine: EmbeddedEngine) -> None:
        self.tokens = np.empty(0, np.int32)
        self._engine = engine
        self._rng = np.random.default_rng(0)
        self._num_requests = 0

    def add_turn(self) -> int:
        """Returns the number of prefilled tokens."""
        new_tokens = self._rng.integers(10, 1000, NEW_TOKENS).astype(np.int32)
        self._prompt = np.concatenate([self.tokens, new_tokens])
        self._reply, num_computed = self._generate()
        self.tokens = np.concatenate([self._prompt, self._reply.tokens])
        return num_computed

    def fork(self) -> int:
        """Continue from the middle of the last reply; returns the number of prefilled tokens."""
        beginning = cut(self._reply, 0, NEW_TOKENS // 2)
        return self._generate(partial=replace(beginning, finish="interrupt"), pinned=True)[1]

    def _generate(self, **request_fields: Any) -> tuple[Completion, int]:
        before = self._engine.stats().prefill_tokens
        self._num_requests += 1
        request = Request(
            id=str(self._num_requests),
            prompt=self._prompt,
            sampling=Sampling(max_new_tokens=NEW_TOKENS),
            session="talk",
            **request_fields,
        )
        self._engine.add_request(request)
        while not (finished := self._engine.step()):
            pass
        return finished[0].completions[0], self._engine.stats().prefill_tokens - before


def table(rows: Sequence[dict[str, Any]]) -> str:
    num_turns = len(rows[0]["computed"])
    at = [turn for turn in (1, 2, 4, 8, 16, 32, 64) if turn <= num_turns]
    names = (*(f"turn {turn}" for turn in at), "all", "tokens", "fork")
    lines = [f"{'tokens computed':<40}" + "".join(f"{name:>9}" for name in names)]
    for row in rows:
        computed = row["computed"]
        values = [*(computed[turn - 1] for turn in at), sum(computed)]
        values += [row["tokens"], row["fork"]]
        lines.append(f"{row['case']:<40}" + "".join(f"{value:9,}" for value in values))
    return "\n".join(lines)


if __name__ == "__main__":
    raise SystemExit(main())
