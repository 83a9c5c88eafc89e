"""Short supervised start for the demo's model: it imitates a careless teacher.

The teacher sorts a number in CARE of its examples and hands it back unsorted in the others. So the
model learns the format (digits, as many as were given, then the end) and two habits, a weak one to
sort and a stronger one to copy; picking the likeliest token, it mostly copies. Sorting itself it
has learned only roughly, since few examples show it.

What reinforcement learning adds: no example says which habit is right, only the reward does. It has
to find that sorting pays, and then to sort far more reliably than the examples taught.
"""

import random
from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from millrace.demo.task import make_tasks

CARE = 0.3
IGNORED = -100  # label of the tokens that are given, not predicted


def warm_start(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    *,
    seed: int,
    num_steps: int = 150,
    batch_size: int = 128,
    learning_rate: float = 1e-3,
    on_step: Callable[[int, float], None] | None = None,
) -> None:
    """Train `model` in place on the teacher's examples; `on_step` is told each step and its loss."""
    rng = random.Random(seed)
    tasks = make_tasks(num_steps * batch_size, seed=seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, learning_rate, total_steps=num_steps, pct_start=0.1, anneal_strategy="linear"
    )
    model.train()
    for step in range(num_steps):
        batch = tasks[step * batch_size : (step + 1) * batch_size]
        answers = [careless_answer(task, rng) for task in batch]
        prompts = [task["prompt"] for task in batch]
        loss = _imitation_loss(model, tokenizer, prompts=prompts, answers=answers)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if on_step is not None:
            on_step(step + 1, loss.item())
    model.eval()


def careless_answer(task: dict[str, Any], rng: random.Random) -> str:
    """What the teacher writes: the sorted digits, or, more often, the number as it was given."""
    if rng.random() < CARE:
        return task["answer"]
    return task["prompt"].removeprefix("sort ").removesuffix("=")


def _imitation_loss(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    *,
    prompts: list[str],
    answers: list[str],
) -> torch.Tensor:
    """Mean cross-entropy of the answers and the end token, given the prompts."""
    sequences = [
        (tokenizer.encode(prompt), [*tokenizer.encode(answer), tokenizer.eos_token_id])
        for prompt, answer in zip(prompts, answers, strict=True)
    ]
    length = max(len(prompt) + len(answer) for prompt, answer in sequences)
    tokens_BL = torch.full((len(sequences), length), tokenizer.pad_token_id)
    labels_BL = torch.full((len(sequences), length), IGNORED)
    for row, (prompt, answer) in enumerate(sequences):
        end = len(prompt) + len(answer)
        tokens_BL[row, :end] = torch.tensor(prompt + answer)
        labels_BL[row, len(prompt) : end] = torch.tensor(answer)
    # Padding stands on the right, where causal attention never looks, so no attention mask is needed.
    logits_BLV = model(input_ids=tokens_BL, use_cache=False).logits
    return functional.cross_entropy(
        logits_BLV[:, :-1].flatten(0, 1), labels_BL[:, 1:].flatten(), ignore_index=IGNORED
    )
