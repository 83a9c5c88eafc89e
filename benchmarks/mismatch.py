"""Logprob mismatch of engine and trainer in 16 bits, and of each against float32, on a CPU.

    python benchmarks/mismatch.py smollm2 [--dtype float16]

The engine samples answers in that dtype, as on a GPU. The trainer computes the logprobs of the same
tokens in that dtype and in float32. Differences are means over the sampled tokens.
"""

import argparse

import numpy as np
import torch
from sums import make_tasks

from millrace.config import EngineConfig
from millrace.core.microbatch import Microbatch
from millrace.core.records import Completion, Episode, Group, Request, Rollout, Sampling, Task
from millrace.inference.backend import EmbeddedBackend, EngineSpec
from millrace.inference.embedded.build import build_engine
from millrace.models.attention.packed import PACKED
from millrace.models.directory import load_tokenizer
from millrace.models.loading import load_model
from millrace.training.optimizer import TrainSettings
from millrace.training.packing.packer import pack
from millrace.training.policy_model import PolicyModel

SAMPLING = Sampling(max_new_tokens=40)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model", help="directory that smollm2.py made")
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--dtype", choices=["bfloat16", "float16"], default="bfloat16")
    args = parser.parse_args()
    prompts = chat_prompts(args.model, args.prompts)
    batch = sample(args.model, prompts, dtype=args.dtype)
    engine = torch.from_numpy(batch.engine_logprobs)
    half, exact = (
        logprobs(args.model, batch, dtype=getattr(torch, dtype))
        for dtype in (args.dtype, "float32")
    )
    print(f"{len(engine)} tokens, mean absolute difference of logprobs")
    for name, left, right in (
        (f"engine - trainer, both {args.dtype}", engine, half),
        (f"engine {args.dtype} - float32", engine, exact),
        (f"trainer {args.dtype} - float32", half, exact),
    ):
        print(f"{name:<34}{(left - right).abs().mean().item():.4f}")


def chat_prompts(model: str, count: int) -> list[np.ndarray]:
    """Tokens of sums that the model is asked for."""
    tokenizer = load_tokenizer(model, trust_remote_code=False)
    tokens = (
        tokenizer.apply_chat_template(task["prompt"], add_generation_prompt=True, return_dict=False)
        for task in make_tasks(count, seed=0)
    )
    return [np.array(prompt, dtype=np.int32) for prompt in tokens]


def sample(model: str, prompts: list[np.ndarray], *, dtype: str) -> Microbatch:
    """Four answers to each prompt, packed for the trainer."""
    # With the decode loop, because it keeps the residual stream in float32, as on a GPU.
    config = EngineConfig.model_validate({"dtype": dtype, "max_context": 256})
    spec = EngineSpec(config=config, device="cpu", model_path=model, version=0)
    engine = build_engine(spec, options=EmbeddedBackend(decode_steps=4))
    for index, prompt in enumerate(prompts):
        engine.add_request(
            Request(id=str(index), prompt=prompt, sampling=SAMPLING, n=4, seed=index)
        )
    ended: dict[str, dict[int, Completion]] = {}
    while engine.has_work:
        for one in engine.step():
            ended.setdefault(one.id, {}).update(one.completions)
    answers = {id: [own[i] for i in sorted(own)] for id, own in ended.items()}
    groups = []
    for index, prompt in enumerate(prompts):
        rollouts = [rollout_of(prompt, answer) for answer in answers[str(index)]]
        groups.append(
            Group(
                number=index,
                task=Task(prompt=""),
                episodes=tuple(Episode(turns=(), rollouts=(rollout,)) for rollout in rollouts),
                advantages=np.ones(len(rollouts), dtype=np.float32),
            )
        )
    (microbatch,) = pack(groups, microbatch_tokens=10**6).microbatches
    return microbatch


def rollout_of(prompt: np.ndarray, answer: Completion) -> Rollout:
    before = np.zeros(len(prompt), dtype=np.float32)
    mask = np.arange(len(prompt) + len(answer.tokens)) >= len(prompt)
    return Rollout(
        tokens=np.concatenate([prompt, answer.tokens]),
        mask=mask,
        engine_logprobs=np.concatenate([before, answer.logprobs]),
        versions=np.where(mask, 0, -1).astype(np.int32),
        sampling=SAMPLING,
    )


def logprobs(model: str, batch: Microbatch, *, dtype: torch.dtype) -> torch.Tensor:
    device = torch.device("cpu")
    loaded = load_model(model, dtype=torch.float32, device=device, attention=PACKED)
    policy = PolicyModel(loaded, settings=TrainSettings(compute_dtype=dtype))
    with torch.no_grad():
        return policy.logprobs(batch).logprobs


if __name__ == "__main__":
    main()
