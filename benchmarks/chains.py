"""A task of several steps, a careless policy, and a process reward model for its steps.

The answer to "34142=" is the running sum of the digits, modulo 5, with one step for each digit
after the first: "3+4=2;2+1=3;3+4=2;2+2=4;". The policy is warm-started on careless examples, which
mostly repeat the digit instead of adding it. The process reward model is a token classifier of
transformers, trained on correct, wrong and corrupted steps. Its score of a step is read at the ";".
"""

import random
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional
from transformers import Qwen3Config, Qwen3ForCausalLM, Qwen3ForTokenClassification

from millrace.demo.model import EOS_ID, IGNORED, PAD_ID, Example, build_tokenizer, warm_start

BASE = 5
DIGITS = "01234"
PIECES = (*DIGITS, "+", "=", ";")
STEP = ";"
CAREFUL = 0.4  # probability that a step of a careless example is correct
CORRECT_LABEL = 1  # of the process reward model
EVAL_EVERY_BATCHES = 50  # while the process reward model is trained

Add = Callable[[int, int, random.Random], int]  # (running sum, digit, rng) -> sum in the example


def make_tasks(num: int, *, seed: int, num_steps: int, held_out: bool = False) -> list[dict]:
    """One number in eight is held out, for every seed."""
    rng = random.Random(f"{seed}, held out: {held_out}")
    tasks: list[dict[str, Any]] = []
    while len(tasks) < num:
        number = "".join(rng.choices(DIGITS, k=num_steps + 1))
        if (zlib.crc32(number.encode()) % 8 == 0) == held_out:
            tasks.append({"prompt": f"{number}=", "answer": correct_answer(number)})
    return tasks


def correct_answer(number: str) -> str:
    return str(sum(map(int, number)) % BASE)


def write_steps(number: str, add: Add, rng: random.Random) -> str:
    total, text = int(number[0]), ""
    for digit in map(int, number[1:]):
        new_total = add(total, digit, rng)
        text += f"{total}+{digit}={new_total}{STEP}"
        total = new_total
    return text


def add_correctly(total: int, digit: int, rng: random.Random) -> int:
    return (total + digit) % BASE


def careless_add(probability: float = CAREFUL) -> Add:
    """Correct with this probability; otherwise the sum is the digit."""

    def add(total: int, digit: int, rng: random.Random) -> int:
        return (total + digit) % BASE if rng.random() < probability else digit

    return add


def add_variously(total: int, digit: int, rng: random.Random) -> int:
    """Correct, careless and random sums, for the process reward model."""
    return rng.choice([(total + digit) % BASE, (total + digit) % BASE, digit, rng.randrange(BASE)])


def corrupt(text: str, rng: random.Random) -> str:
    """Drop, double or replace some tokens, as a policy does that goes astray."""
    pieces = list(text)
    for _ in range(rng.choice([0, 0, 1, 2, 4])):
        at = rng.randrange(len(pieces))
        pieces[at : at + 1] = rng.choice([[], pieces[at : at + 1] * 2, [rng.choice(PIECES)]])
    return "".join(pieces)


def step_labels(number: str, text: str) -> list[int]:
    """For each step 1 if it starts from the last sum, takes the next digit and adds correctly."""
    total, labels = number[:1], []
    digits = iter(number[1:])
    for step in text.split(STEP)[:-1]:
        digit = next(digits, "")
        is_next = bool(digit) and total.isdigit() and step[:-1] == f"{total}+{digit}="
        labels.append(int(is_next and step[-1] == str((int(total) + int(digit)) % BASE)))
        total = step[-1:]
    return labels


def outcome_reward(completions: list[str], answer: list[str], **columns: Any) -> list[float]:
    """1 if the last sum is correct, otherwise 0; the steps do not count."""
    last = [text.removesuffix(STEP)[-1:] if text.endswith(STEP) else "" for text in completions]
    return [float(found == correct) for found, correct in zip(last, answer, strict=True)]


def make_policy(
    directory: Path,
    *,
    seed: int,
    num_steps: int,
    num_examples: int,
    add: Add | None = None,
    num_hinted: int = 0,
) -> None:
    """`add` makes the sums of the examples; careless_add() by default. `num_hinted`: further
    examples, whose prompt starts with the correct steps, which are also the answer."""
    tokenizer = build_tokenizer(PIECES)
    torch.manual_seed(seed)
    model = Qwen3ForCausalLM(small_config(len(tokenizer)))
    rng = random.Random(seed)
    tasks = make_tasks(num_examples, seed=seed, num_steps=num_steps)
    examples: list[Example] = [
        (task["prompt"], write_steps(task["prompt"][:-1], add or careless_add(), rng))
        for task in tasks
    ]
    for task in make_tasks(num_hinted, seed=seed + 100, num_steps=num_steps):
        steps = write_steps(task["prompt"][:-1], add_correctly, rng)
        examples.append((steps + task["prompt"], steps))
    if num_hinted:
        rng.shuffle(examples)
    warm_start(model, tokenizer, examples=examples, batch_size=64, learning_rate=3e-3)
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)


def make_process_reward_model(
    directory: Path,
    *,
    seed: int,
    num_steps: int,
    num_examples: int,
    target_accuracy: float = 1.0,
    hidden_size: int = 64,
    num_layers: int = 2,
) -> float:
    """Train and save a process reward model; return its accuracy on steps of held-out numbers.

    Training ends early when the accuracy reaches `target_accuracy`."""
    tokenizer = build_tokenizer(PIECES)
    torch.manual_seed(seed)
    config = small_config(len(tokenizer), hidden_size=hidden_size, num_layers=num_layers)
    config.num_labels = 2
    model = Qwen3ForTokenClassification(config)
    numbers, unseen = (
        [task["prompt"][:-1] for task in make_tasks(num, seed=of, num_steps=num_steps, held_out=h)]
        for num, of, h in ((num_examples, seed + 1, False), (256, seed, True))
    )
    rng, accuracy = random.Random(f"judge {seed}"), 0.0
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=0.02, total_iters=50)
    for at in range(0, num_examples, 64):
        loss = _step_loss(model.train(), tokenizer, numbers[at : at + 64], rng)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        is_last = at + 64 >= num_examples
        if is_last or (at // 64 + 1) % EVAL_EVERY_BATCHES == 0:
            accuracy = _step_accuracy(model.eval(), tokenizer, unseen, random.Random(seed))
            if accuracy >= target_accuracy:
                break
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return accuracy


def small_config(vocab_size: int, *, hidden_size: int = 64, num_layers: int = 2) -> Qwen3Config:
    return Qwen3Config(
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=4 * hidden_size,
        num_hidden_layers=num_layers,
        num_attention_heads=4,
        num_key_value_heads=4,
        head_dim=hidden_size // 4,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=EOS_ID,
        pad_token_id=PAD_ID,
    )


def _step_loss(
    model: Any, tokenizer: Any, numbers: Sequence[str], rng: random.Random
) -> torch.Tensor:
    tokens_BL, labels_BL = _labelled_steps(tokenizer, numbers, rng)
    logits = model(input_ids=tokens_BL).logits
    return functional.cross_entropy(logits.flatten(0, 1), labels_BL.flatten(), ignore_index=IGNORED)


@torch.no_grad()
def _step_accuracy(model: Any, tokenizer: Any, numbers: Sequence[str], rng: random.Random) -> float:
    tokens_BL, labels_BL = _labelled_steps(tokenizer, numbers, rng)
    found = model(input_ids=tokens_BL).logits.argmax(-1)
    counts = labels_BL != IGNORED
    return (found == labels_BL)[counts].float().mean().item()


def _labelled_steps(
    tokenizer: Any, numbers: Sequence[str], rng: random.Random
) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens and labels, both [B, L], padded at the end."""
    tokens, labels = [], []
    step_id = tokenizer.convert_tokens_to_ids(STEP)
    for number in numbers:
        text = corrupt(write_steps(number, add_variously, rng), rng)
        ids = tokenizer.encode(f"{number}={text}")
        label_of_step = iter(step_labels(number, text))
        tokens.append(ids)
        labels.append([next(label_of_step) if token == step_id else IGNORED for token in ids])
    longest = max(map(len, tokens))
    for row, row_labels in zip(tokens, labels, strict=True):
        row += [PAD_ID] * (longest - len(row))
        row_labels += [IGNORED] * (longest - len(row_labels))
    return torch.tensor(tokens), torch.tensor(labels)
