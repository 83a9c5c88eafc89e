"""Short supervised start for the demo's model: it imitates a careless teacher.

The teacher sorts a number in CARE of its examples and hands it back unsorted in the others. So the
model learns the format (digits, as many as were given, then the end) and two habits, a weak one to
sort and a stronger one to copy; picking the likeliest token, it mostly copies. Sorting itself it
has learned only roughly, since few examples show it.

What reinforcement learning adds: no example says which habit is right, only the reward does. It has
to find that sorting pays, and then to sort far more reliably than the examples taught.
"""

import random
from collections.abc import Callable, Sequence

import torch
from torch.nn import functional
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from millrace.demo.task import NUM_DIGITS, make_tasks

CARE = 0.3
IGNORED = -100  # label of prompt tokens, which are not predicted

Example = tuple[str, str]  # prompt, answer


def careless_examples(
    num: int, seed: int, *, num_digits: Sequence[int] = NUM_DIGITS
) -> list[Example]:
    """The teacher's examples: some numbers sorted, more of them left as they were."""
    rng = random.Random(seed)
    examples = []
    for task in make_tasks(num, seed=seed, num_digits=num_digits):
        unsorted = task["prompt"].removeprefix("sort ").removesuffix("=")
        examples.append((task["prompt"], task["answer"] if rng.random() < CARE else unsorted))
    return examples


def warm_start(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    *,
    examples: Sequence[Example],
    batch_size: int = 32,
    learning_rate: float = 1e-3,
    on_step: Callable[[int, float], None] | None = None,
) -> None:
    """Train in place, once through the examples; `on_step` gets each step's number and loss."""
    num_steps = len(examples) // batch_size
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, learning_rate, total_steps=num_steps, pct_start=0.1, anneal_strategy="linear"
    )
    model.train()
    for step in range(num_steps):
        batch = examples[step * batch_size : (step + 1) * batch_size]
        loss = _imitation_loss(model, tokenizer, batch)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if on_step is not None:
            on_step(step + 1, loss.item())
    model.eval()


def _imitation_loss(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, batch: Sequence[Example]
) -> torch.Tensor:
    """Mean cross-entropy of the answers and the end token, given the prompts."""
    sequences = [
        (tokenizer.encode(prompt), tokenizer.encode(f"{answer}{tokenizer.eos_token}"))
        for prompt, answer in batch
    ]
    length = max(len(prompt) + len(answer) for prompt, answer in sequences)
    tokens_BL = torch.zeros(len(batch), length, dtype=torch.int64)
    labels_BL = torch.full((len(batch), length), IGNORED)
    for row, (prompt, answer) in enumerate(sequences):
        end = len(prompt) + len(answer)
        tokens_BL[row, :end] = torch.tensor(prompt + answer)
        labels_BL[row, len(prompt) : end] = torch.tensor(answer)
    # Padding is on the right, which causal attention never sees, so it needs no mask.
    logits_BLV = model(input_ids=tokens_BL, use_cache=False).logits
    return functional.cross_entropy(
        logits_BLV[:, :-1].flatten(0, 1), labels_BL[:, 1:].flatten(), ignore_index=IGNORED
    )
