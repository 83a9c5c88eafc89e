"""The embedded engine in the self-test of models/support.py: tokens and logprobs that it samples.

Prompts are prefilled in chunks beside decoding sequences, completions of one prompt share its KV,
and a prompt that comes last continues KV of the prefix cache.
"""

import functools
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from millrace.core.records import Request, Sampling
from millrace.inference.embedded.engine import EmbeddedEngine
from millrace.inference.embedded.kv.paged_attention import PAGED_ATTENTION
from millrace.inference.embedded.parts import EngineSizes
from millrace.models.support import AttentionPath, ScoredTokens

_NEW_TOKENS = 4


def _generate(
    model: PreTrainedModel, sequences: Sequence[np.ndarray], *, decode_steps: int, exact: bool
) -> list[ScoredTokens]:
    """Prompts are the sequences without their last tokens, which are sampled."""
    sizes = EngineSizes(
        max_context=max(map(len, sequences)),
        max_sequences=8,
        num_blocks=128,
        block_tokens=4,
        prefill_tokens=16,
        decode_steps=decode_steps,
        exact=exact,
        fast_layers=not exact,
        num_snapshots=32,
    )
    tokenizer: Any = SimpleNamespace(decode=lambda *_, **__: "")
    engine = EmbeddedEngine(model, tokenizer, sizes=sizes, version=0, eos_ids=())
    prompts = [tokens[: max(1, len(tokens) - _NEW_TOKENS)] for tokens in sequences]
    results: list[ScoredTokens] = []
    for batch in (prompts, prompts[:1]):
        for i, prompt in enumerate(batch):
            sampling = Sampling(max_new_tokens=len(sequences[i]) - len(prompt))
            n = 2 if i == 0 and batch is prompts else 1
            tokens = prompt.astype(np.int32)
            engine.add_request(Request(id=str(i), prompt=tokens, sampling=sampling, n=n))
        while engine.has_work:
            for finished in engine.step():
                for completion in finished.completions.values():
                    tokens = np.concatenate([prompts[int(finished.id)], completion.tokens])
                    results.append(ScoredTokens(tokens=tokens, logprobs=completion.logprobs))
    return results


def _path(decode_steps: int, *, exact: bool = False) -> AttentionPath:
    score = functools.partial(_generate, decode_steps=decode_steps, exact=exact)
    return AttentionPath(name=PAGED_ATTENTION, user="engine", score=score)


SINGLE_STEPS, DECODE_LOOP, EXACT = _path(1), _path(2), _path(2, exact=True)


def engine_path(device: torch.device, *, exact: bool = False) -> AttentionPath:
    """What an engine on this device uses."""
    if exact:
        return EXACT
    return DECODE_LOOP if device.type == "cuda" else SINGLE_STEPS
