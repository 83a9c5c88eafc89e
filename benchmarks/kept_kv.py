"""What `engine.kv = "keep"` means for logprobs: how far they are from those of each version.

    python benchmarks/kept_kv.py smollm2 [--learning-rates 5e-6 1e-4] [--steps 1 4]

The engine swaps weights in the middle of its answers. The new version is `--steps` steps of AdamW
away from the old one. For the tokens after the swap, the script compares the logprobs that the
engine recorded with those that a plain forward pass of either version gives, all in float32 on a
CPU. Differences are means of absolute values, in nats.
"""

import argparse

import numpy as np
import torch
from mismatch import SAMPLING, chat_prompts
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from millrace.config import EngineConfig
from millrace.core.records import Completion, Request
from millrace.inference.backend import EmbeddedBackend, EngineSpec
from millrace.inference.embedded.build import build_engine

BEFORE_SWAP = SAMPLING.max_new_tokens // 2  # decode steps


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model", help="directory that smollm2.py made")
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--learning-rates", type=float, nargs="+", default=[5e-6, 1e-4])
    parser.add_argument("--steps", type=int, nargs="+", default=[1, 4])
    args = parser.parse_args()
    prompts = chat_prompts(args.model, args.prompts)
    old = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32)
    print("| learning rate | steps | `engine.kv` | tokens | to the new version | to the old |")
    print("|---" * 6 + "|")
    for rate in args.learning_rates:
        for steps in args.steps:
            new = updated(args.model, prompts, learning_rate=rate, steps=steps)
            for kv in ("keep", "recompute"):
                row = measure(args.model, prompts, old=old, new=new, kv=kv)
                print(f"| {rate:g} | {steps} | `{kv}` | {row}", flush=True)


def updated(
    path: str, prompts: list[np.ndarray], *, learning_rate: float, steps: int
) -> PreTrainedModel:
    """The model after steps that make half of its own answers likelier, and the others less."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    answers = generate(path, prompts, kv="keep", new=None)
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, weight_decay=0.0)
    for _ in range(steps):
        for number, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
            advantage = 1.0 if number % 2 else -1.0
            (-advantage * logprobs(model, prompt, answer).mean()).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.requires_grad_(False)


def measure(
    path: str, prompts: list[np.ndarray], *, old: PreTrainedModel, new: PreTrainedModel, kv: str
) -> str:
    answers = generate(path, prompts, kv=kv, new=new)
    found: list[tuple[Tensor, Tensor, Tensor]] = []
    with torch.no_grad():
        for prompt, answer in zip(prompts, answers, strict=True):
            after = torch.from_numpy(answer.versions == 1)
            of_new, of_old = (logprobs(model, prompt, answer)[after] for model in (new, old))
            found.append((torch.from_numpy(answer.logprobs)[after], of_new, of_old))
    recorded, of_new, of_old = map(torch.cat, zip(*found, strict=True))
    distances = " | ".join(
        f"{(recorded - other).abs().mean().item():.4f}" for other in (of_new, of_old)
    )
    return f"{len(recorded)} | {distances} |"


def generate(
    path: str, prompts: list[np.ndarray], *, kv: str, new: PreTrainedModel | None
) -> list[Completion]:
    """An answer to each prompt; `new` weights arrive in the middle."""
    config = EngineConfig.model_validate({"dtype": "float32", "max_context": 256, "kv": kv})
    spec = EngineSpec(config=config, device="cpu", model_path=path, version=0)
    engine = build_engine(spec, options=EmbeddedBackend(decode_steps=1))
    for index, prompt in enumerate(prompts):
        engine.add_request(Request(id=str(index), prompt=prompt, sampling=SAMPLING, seed=index))
    ended: dict[str, Completion] = {}
    steps = 0
    while engine.has_work:
        if steps == BEFORE_SWAP and new is not None:
            engine.swap(dict(new.named_parameters()), version=1)
        for one in engine.step():
            ended[one.id] = one.completions[0]
        steps += 1
    return [ended[str(index)] for index in range(len(prompts))]


def logprobs(model: PreTrainedModel, prompt: np.ndarray, answer: Completion) -> Tensor:
    tokens = torch.from_numpy(np.concatenate([prompt, answer.tokens])).long()
    logits = model(tokens[None]).logits[0, len(prompt) - 1 : -1]
    return logits.log_softmax(-1).gather(1, tokens[len(prompt) :, None])[:, 0]


if __name__ == "__main__":
    main()
