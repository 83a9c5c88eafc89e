"""Logprob mismatch of engine and trainer in 16 bits, and of each against float32, on a CPU.

    python benchmarks/mismatch.py smollm2 [--dtype float16] [--layers]

The engine samples answers in that dtype, as on a GPU. The trainer computes the logprobs of the same
tokens in that dtype and in float32. Differences are means over the sampled tokens. With --layers,
the residual streams of both are compared behind each layer, for one answer to each prompt.
"""

import argparse
import contextlib
from collections.abc import Iterator

import numpy as np
import torch
from sums import make_tasks

from millrace.config import EngineConfig
from millrace.core.microbatch import Microbatch
from millrace.core.records import Completion, Episode, Group, Request, Rollout, Sampling, Task
from millrace.inference.backend import EmbeddedBackend, EngineSpec
from millrace.inference.embedded.build import build_engine
from millrace.inference.embedded.engine import EmbeddedEngine
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
    parser.add_argument("--layers", action="store_true", help="compare the layers, not logprobs")
    args = parser.parse_args()
    prompts = chat_prompts(args.model, args.prompts)
    if args.layers:
        print(by_layer(args.model, prompts, dtype=args.dtype))
        return
    batch = sample(engine_of(args.model, args.dtype), prompts)
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


def by_layer(model: str, prompts: list[np.ndarray], *, dtype: str) -> str:
    """A line per layer: |engine - trainer|, and that as a share of |trainer|, both as means."""
    engine, policy = engine_of(model, dtype), policy_of(model, getattr(torch, dtype))
    apart, size = 0.0, 0.0
    for prompt in prompts:
        with layer_outputs(engine._model) as ours:
            batch = sample(engine, [prompt], n=1)
        with layer_outputs(policy.module) as theirs, torch.no_grad():
            policy.logprobs(batch)
        # The engine computes the prompt in its first pass, and then one token and idle rows in each
        # further one. The last tokens are not the trainer's, which computes all but the last.
        tokens = [[passes[0], *(rows[:1] for rows in passes[1:])] for passes in ours]
        left, right = (torch.stack([torch.cat(p) for p in side]) for side in (tokens, theirs))
        apart = apart + (left[:, : right.shape[1]] - right).abs().mean((1, 2))
        size = size + right.abs().mean((1, 2))
    means = torch.stack([torch.as_tensor(apart) / len(prompts), torch.as_tensor(apart / size)])
    lines = [
        f"{i:5} {own:12.2e} {share:12.2e}" for i, (own, share) in enumerate(means.t().tolist())
    ]
    return "\n".join([f"{'layer':>5} {'difference':>12} {'relative':>12}", *lines])


@contextlib.contextmanager
def layer_outputs(model: torch.nn.Module) -> Iterator[list[list[torch.Tensor]]]:
    """The residual stream behind each layer in all passes of this context, [rows, hidden] each."""
    layers = list(model.get_submodule("model.layers").children())
    found: list[list[torch.Tensor]] = [[] for _ in layers]

    def keep(index: int, output: torch.Tensor | tuple[torch.Tensor, ...]) -> None:
        hidden = output[0] if isinstance(output, tuple) else output
        found[index].append(hidden.detach().float().flatten(0, -2))

    hooks = [
        layer.register_forward_hook(lambda _, __, output, index=index: keep(index, output))
        for index, layer in enumerate(layers)
    ]
    yield found
    for hook in hooks:
        hook.remove()


def engine_of(model: str, dtype: str) -> EmbeddedEngine:
    # With the decode loop, because it keeps the residual stream in float32, as on a GPU. Without a
    # prefix cache, so that each prompt is computed at once.
    config = EngineConfig.model_validate({"dtype": dtype, "max_context": 256})
    spec = EngineSpec(config=config, device="cpu", model_path=model, version=0)
    return build_engine(spec, options=EmbeddedBackend(decode_steps=4, prefix_cache=False))


def sample(engine: EmbeddedEngine, prompts: list[np.ndarray], *, n: int = 4) -> Microbatch:
    """n answers to each prompt, packed for the trainer."""
    for index, prompt in enumerate(prompts):
        engine.add_request(
            Request(id=str(index), prompt=prompt, sampling=SAMPLING, n=n, seed=index)
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
    with torch.no_grad():
        return policy_of(model, dtype).logprobs(batch).logprobs


def policy_of(model: str, dtype: torch.dtype) -> PolicyModel:
    device = torch.device("cpu")
    loaded = load_model(model, dtype=torch.float32, device=device, attention=PACKED)
    return PolicyModel(loaded, settings=TrainSettings(compute_dtype=dtype))


if __name__ == "__main__":
    main()
