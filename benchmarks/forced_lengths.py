"""The workload `--lengths forced` of grpo_on_gpu.py: completions with given long-tailed lengths.

Random weights have no long tail of their own. Therefore completion k of prompt p of a step has
`lengths[p * group + k]` tokens, whatever is sampled: in Millrace by the environment, in TRL by the
sampling parameters of vLLM. The tokenizer has an eos token that the model cannot sample.
"""

import math
import random
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from copy import copy
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from random_words import word_tokenizer

from millrace.bench.workloads import make_model
from millrace.models.attention.packed import PACKED

PROMPT_TOKENS = 64
MEAN_SHARE = 0.4  # of the limit; the mean of the lengths before they are cut at the limit


def long_tailed_lengths(prompts: int, group: int, *, longest: int, seed: int = 0) -> list[int]:
    """Exponential lengths of a step's completions, prompt by prompt, cut at `longest`: at 1,024
    tokens 376 on average, 8 % at the limit. Each group has one length of each of `group` parts of
    the distribution. Otherwise an asynchronous run would train the shortest groups first."""
    rng, lengths = random.Random(seed), [[0] * group for _ in range(prompts)]
    for part in range(group):
        for row, place in zip(lengths, rng.sample(range(prompts), prompts), strict=True):
            share = (part + (place + 0.5) / prompts) / group
            length = math.ceil(-MEAN_SHARE * longest * math.log(1 - share))
            row[part] = min(length, longest)
    for row in lengths:
        rng.shuffle(row)
    return [length for row in lengths for length in row]


def make_tasks(
    num: int, *, lengths: Sequence[int], group: int, seed: int = 0
) -> list[dict[str, Any]]:
    """Different prompts, each with the lengths of its completions: task i those of prompt i of a
    step, modulo the prompts of a step."""
    rng, prompts = random.Random(seed), len(lengths) // group
    letters = "abcdefghijklmnopqrstuvwxyz"
    tasks = []
    for number in range(num):
        first = number % prompts * group
        prompt = "".join(rng.choices(letters, k=PROMPT_TOKENS))
        tasks.append({"prompt": prompt, "lengths": [*lengths[first : first + group]]})
    return tasks


def make_environment() -> Callable[[Any, Any], Awaitable[None]]:
    """Plays one completion per episode, with the next of its task's lengths."""
    begun: Counter[str] = Counter()  # episodes by prompt

    async def play(task: Any, agent: Any) -> None:
        lengths = task.columns["lengths"]
        begun[task.prompt] += 1
        length = lengths[(begun[task.prompt] - 1) % len(lengths)]
        await agent.complete(task.prompt, max_new_tokens=length)

    return play


def force_lengths(llm: Any, lengths: Sequence[int]) -> None:
    """Make generate() of a vLLM engine give its completions these lengths, in the order of its
    prompts. TRL calls it once per step, with each prompt repeated for its group."""
    generate = llm.generate

    def with_lengths(prompts: Sequence[Any], *, sampling_params: Any, **options: Any) -> Any:
        if len(prompts) % len(lengths):
            raise ValueError(f"{len(prompts)} prompts are no multiple of {len(lengths)} lengths.")
        each = []
        for index in range(len(prompts)):
            own = copy(sampling_params)
            own.max_tokens, own.ignore_eos = lengths[index % len(lengths)], True
            each.append(own)
        return generate(prompts, sampling_params=each, **options)

    llm.generate = with_lengths


def vowel_share(completions: Sequence[str], **columns: Any) -> list[float]:
    """A reward that is rarely the same for two completions of random words."""
    return [sum(map(text.count, "aeiou")) / (len(text) + 1) for text in completions]


def make_directory(shape: str, directory: Path, *, device: str) -> None:
    """Save a model of that shape with random weights, unless it exists. Another process draws them,
    so that this one has no context on the GPU."""
    if not directory.is_dir():
        process = get_context("spawn").Process(target=_save, args=(shape, directory, device))
        process.start()
        process.join()
        if process.exitcode:
            raise RuntimeError(f"The model of shape {shape!r} could not be made; see above.")


def _save(shape: str, directory: Path, device: str) -> None:
    target = torch.device(device)
    model, _ = make_model(shape, dtype=torch.bfloat16, device=target, attention=PACKED)
    tokenizer = word_tokenizer(model.config.get_text_config().vocab_size, ends=False)
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
