"""Decoding with every option that could slow it down, next to plain decoding.

    python benchmarks/cliffs.py --model qwen3-1.7b --batch 256 --json cliffs.json

Each row is one option for all sequences or for one of them, and `ratio` its tokens/s divided by
those of plain sampling at the same number of sequences. The model has random weights, which give
nearly flat distributions: at temperature 1, top-p keeps about half of the vocabulary, and at
temperature 0.3 some thousand ids. The tokenizer has random words, as many as the model has ids.
"""

import argparse
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import torch
from random_words import word_tokenizer

from millrace.bench import write_result
from millrace.bench.workloads import make_model
from millrace.config import EngineConfig, LoraConfig
from millrace.core.errors import TaskError
from millrace.core.records import Request, Sampling
from millrace.inference.embedded.build import engine_of
from millrace.inference.embedded.engine import EmbeddedEngine
from millrace.inference.embedded.self_test import engine_path
from millrace.models.devices import resolve_device
from millrace.models.grammars import grammar_of
from millrace.models.lora.factors import Adapter, adapter_of

PROMPT_TOKENS = 64
STOP = ("a string that never comes",)
# Random weights end any JSON that may end: half of all objects without required keys would be {}.
SCHEMAS: Mapping[str, Any] = {
    "text": {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"]},
    "numbers": {"type": "array", "items": {"type": "integer"}, "minItems": 2000},
}


class DecodeCase(NamedTuple):
    name: str
    sampling: Mapping[str, Any] = MappingProxyType({})
    one: bool = False  # of the sequences; the others are plain
    stream: bool = False
    extra: int = 0  # sequences beyond the plain batch
    long_tokens: int = 0  # prompt of one sequence


CASES = (
    DecodeCase("plain"),
    DecodeCase("top-k 50, top-p 0.9", {"top_k": 50, "top_p": 0.9}),
    DecodeCase("top-p 0.9, temperature 0.3", {"top_p": 0.9, "temperature": 0.3}),
    DecodeCase("top-p 0.9", {"top_p": 0.9}),
    DecodeCase("top-p 0.9, one sequence", {"top_p": 0.9}, one=True),
    DecodeCase("min-p 0.05", {"min_p": 0.05}),
    DecodeCase("stop string", {"stop": STOP}),
    DecodeCase("streaming", stream=True),
    DecodeCase("odd batch", extra=1),
    DecodeCase("one long sequence", long_tokens=16384),
    DecodeCase("penalty, one sequence", {"presence_penalty": 0.5}, one=True),
    DecodeCase("penalty", {"presence_penalty": 0.5}),
    DecodeCase("logit bias, one sequence", {"logit_bias": ((5, 1.0),)}, one=True),
    DecodeCase("top logprobs, one sequence", {"top_logprobs": 5}, one=True),
    DecodeCase("top logprobs", {"top_logprobs": 5}),
    DecodeCase("grammar, one sequence", {"grammar": "text"}, one=True),
    DecodeCase("grammar", {"grammar": "text"}),
    DecodeCase("grammar of numbers", {"grammar": "numbers"}),
)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Options that could slow decoding down.")
    parser.add_argument("--model", default="qwen3-1.7b", help="a shape of `millrace bench engine`")
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--new-tokens", type=int, default=256)
    parser.add_argument("--rank", type=int, default=32, help="of the unmerged adapter")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="bfloat16")
    parser.add_argument("--only", nargs="+", help="parts of the names of the rows to measure")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows here")
    args = parser.parse_args(argv)
    rows: list[dict[str, Any]] = []
    for adapted in (False, True):
        if adapted and args.only and not any(part in "LoRA unmerged" for part in args.only):
            continue
        engine = _engine(args, adapted=adapted)
        for case in (DecodeCase("LoRA unmerged"),) if adapted else CASES:
            if case.name != "plain" and args.only and not any(p in case.name for p in args.only):
                continue
            rate = _rate(engine, case, args)
            if rate is None:
                continue
            ratio = rate / (rows[0]["tokens_per_s"] if rows else rate)
            row = {"case": case.name, "tokens_per_s": round(rate), "ratio": round(ratio, 3)}
            print(f"{case.name:<28}{rate:>10,.0f} tokens/s {ratio:>7.2f}", flush=True)
            rows.append({**row, "model": args.model, "batch": args.batch, "dtype": args.dtype})
        del engine
        torch.compiler.reset()
    write_result(rows, args.json)
    return 0


def _engine(args: argparse.Namespace, *, adapted: bool) -> EmbeddedEngine:
    device = resolve_device(args.device)
    model, _ = make_model(
        args.model, dtype=getattr(torch, args.dtype), device=device, attention=engine_path(device)
    )
    adapters: dict[str | None, Adapter] = {}
    if adapted:
        policy = adapter_of(model, LoraConfig(rank=args.rank, alpha=2 * args.rank))
        factors = {n: torch.rand(s, device=device) / 100 for n, s in policy.shapes().items()}
        adapters = {None: replace(policy, tensors=factors)}
    vocab_size = model.config.get_text_config().vocab_size
    context = max(case.long_tokens for case in CASES) + PROMPT_TOKENS + args.new_tokens
    context = min(context, model.config.get_text_config().max_position_embeddings)
    config = EngineConfig(max_sequences=args.batch + 1, max_context=context)
    args.max_prompt = context
    return engine_of(model, word_tokenizer(vocab_size), config=config, version=0, adapters=adapters)


def _rate(engine: EmbeddedEngine, case: DecodeCase, args: argparse.Namespace) -> float | None:
    """Tokens per second; None if the option cannot be measured here."""
    settings = dict(case.sampling)
    if "grammar" in settings:
        try:
            schema = {"schema": SCHEMAS[settings["grammar"]]}
            settings["grammar"] = grammar_of({"type": "json_schema", "json_schema": schema})
        except TaskError as error:
            print(f"{case.name:<28}{error}")
            return None
    _run(engine, case, args, settings, new_tokens=min(40, args.new_tokens))  # captures graphs
    return _run(engine, case, args, settings, new_tokens=args.new_tokens)


def _run(
    engine: EmbeddedEngine,
    case: DecodeCase,
    args: argparse.Namespace,
    settings: dict[str, Any],
    *,
    new_tokens: int,
) -> float:
    batch = args.batch + case.extra
    # Prompts differ at every call, so that the prefix cache does not help.
    random = np.random.default_rng(engine.stats().generated_tokens)
    plain = Sampling(max_new_tokens=new_tokens)
    for index in range(batch):
        is_special = index == 0 or not (case.one or case.long_tokens)
        length = case.long_tokens if index == 0 and case.long_tokens else PROMPT_TOKENS
        length = min(length, args.max_prompt - new_tokens)
        prompt = random.integers(300, 1000, length).astype(np.int32)
        sampling = replace(plain, **settings) if is_special else plain
        request = Request(id=str(index), prompt=prompt, sampling=sampling, seed=index)
        engine.add_request(request, stream=case.stream)
        if length > PROMPT_TOKENS:  # its prefill is not part of the measurement
            engine.step()
    before, before_s = engine.stats().generated_tokens, time.perf_counter()
    while engine.has_work:
        engine.step()
        engine.take_chunks()
    return (engine.stats().generated_tokens - before) / (time.perf_counter() - before_s)


if __name__ == "__main__":
    sys.exit(main())
