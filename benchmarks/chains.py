"""A task of several steps, a policy that does it carelessly, and a model that judges its steps.

The answer to "34142=" is the running sum of the digits, modulo 5, with one step for each digit
after the first: "3+4=2;2+1=3;3+4=2;2+2=4;". The policy starts from examples of a teacher who mostly
writes the digit to be added instead of the sum. The judge is a token-classification model of
transformers, trained on right, wrong and mangled steps; its score is read at the ";" of each step.
"""

import random
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional
from transformers import Qwen3Config, Qwen3ForCausalLM, Qwen3ForTokenClassification

from millrace.demo.model import EOS_ID, PAD_ID, build_tokenizer
from millrace.demo.warm_start import IGNORED, Example, warm_start

BASE = 5
DIGITS = "01234"
PIECES = (*DIGITS, "+", "=", ";")
STEP = ";"
CARE = 0.4  # of the teacher, at each step
GOOD = 1  # the judge's label of a right step
EXAMINED_EVERY = 50  # batches of the judge's training

Result = Callable[[int, int, random.Random], int]  # running sum, digit -> what is written down


def make_tasks(num: int, *, seed: int, num_steps: int, held_out: bool = False) -> list[dict]:
    """One number in eight is held out, whatever the seed."""
    rng = random.Random(f"{seed}, held out: {held_out}")
    tasks: list[dict[str, Any]] = []
    while len(tasks) < num:
        number = "".join(rng.choices(DIGITS, k=num_steps + 1))
        if (zlib.crc32(number.encode()) % 8 == 0) == held_out:
            tasks.append({"prompt": f"{number}=", "answer": right_answer(number)})
    return tasks


def right_answer(number: str) -> str:
    return str(sum(map(int, number)) % BASE)


def written(number: str, result: Result, rng: random.Random) -> str:
    """All steps, with the sums that `result` gives."""
    total, text = int(number[0]), ""
    for digit in map(int, number[1:]):
        found = result(total, digit, rng)
        text += f"{total}+{digit}={found}{STEP}"
        total = found
    return text


def careless(total: int, digit: int, rng: random.Random) -> int:
    return (total + digit) % BASE if rng.random() < CARE else digit


def right(total: int, digit: int, rng: random.Random) -> int:
    return (total + digit) % BASE


def mixed(total: int, digit: int, rng: random.Random) -> int:
    """For the judge: right sums, careless ones, and anything."""
    return rng.choice([(total + digit) % BASE, (total + digit) % BASE, digit, rng.randrange(BASE)])


def mangled(text: str, rng: random.Random) -> str:
    """Some tokens lost, doubled or replaced, as a policy on a wrong way would write."""
    pieces = list(text)
    for _ in range(rng.choice([0, 0, 1, 2, 4])):
        at = rng.randrange(len(pieces))
        pieces[at : at + 1] = rng.choice([[], pieces[at : at + 1] * 2, [rng.choice(PIECES)]])
    return "".join(pieces)


def labels_of(number: str, text: str) -> list[int]:
    """Of each step: 1 if it goes on from the last with the next digit and adds correctly."""
    total, labels = number[:1], []
    digits = iter(number[1:])
    for step in text.split(STEP)[:-1]:
        digit = next(digits, "")
        is_next = bool(digit) and total.isdigit() and step[:-1] == f"{total}+{digit}="
        labels.append(int(is_next and step[-1] == str((int(total) + int(digit)) % BASE)))
        total = step[-1:]
    return labels


def outcome(completions: list[str], answer: list[str], **columns: Any) -> list[float]:
    """1 if the last sum is right, otherwise 0; how it came about does not count."""
    ends = [text.removesuffix(STEP)[-1:] if text.endswith(STEP) else "" for text in completions]
    return [float(end == right) for end, right in zip(ends, answer, strict=True)]


def make_policy(
    directory: Path,
    *,
    seed: int,
    num_steps: int,
    num_examples: int,
    result: Result = careless,
    hints: int = 0,
) -> None:
    """`result`: what its examples write down. `hints`: further examples where the right steps stand
    before the prompt, and are repeated."""
    tokenizer = build_tokenizer(PIECES)
    torch.manual_seed(seed)
    model = Qwen3ForCausalLM(small_config(len(tokenizer)))
    rng = random.Random(seed)
    tasks = make_tasks(num_examples, seed=seed, num_steps=num_steps)
    examples: list[Example] = [
        (task["prompt"], written(task["prompt"][:-1], result, rng)) for task in tasks
    ]
    for task in make_tasks(hints, seed=seed + 100, num_steps=num_steps):
        steps = written(task["prompt"][:-1], right, rng)
        examples.append((steps + task["prompt"], steps))
    if hints:
        rng.shuffle(examples)
    warm_start(model, tokenizer, examples=examples, batch_size=64, learning_rate=3e-3)
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)


def make_judge(
    directory: Path,
    *,
    seed: int,
    num_steps: int,
    num_examples: int,
    enough: float = 1.0,
    hidden_size: int = 64,
    num_layers: int = 2,
) -> float:
    """Trains the judge on as many examples, or until it judges `enough` of the steps of held-out
    numbers rightly, and saves it; returns that share."""
    tokenizer = build_tokenizer(PIECES)
    torch.manual_seed(seed)
    config = small_config(len(tokenizer), hidden_size=hidden_size, num_layers=num_layers)
    config.num_labels = 2
    model = Qwen3ForTokenClassification(config)
    numbers, unseen = (
        [task["prompt"][:-1] for task in make_tasks(num, seed=of, num_steps=num_steps, held_out=h)]
        for num, of, h in ((num_examples, seed + 1, False), (256, seed, True))
    )
    rng, rightly = random.Random(f"judge {seed}"), 0.0
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=0.02, total_iters=50)
    for at in range(0, num_examples, 64):
        loss = _judge_loss(model.train(), tokenizer, numbers[at : at + 64], rng)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        is_last = at + 64 >= num_examples
        if is_last or (at // 64 + 1) % EXAMINED_EVERY == 0:
            rightly = _accuracy(model.eval(), tokenizer, unseen, random.Random(seed))
            if rightly >= enough:
                break
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return rightly


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


def _judge_loss(
    model: Any, tokenizer: Any, numbers: Sequence[str], rng: random.Random
) -> torch.Tensor:
    tokens_BL, labels_BL = _labelled(tokenizer, numbers, rng)
    logits = model(input_ids=tokens_BL).logits
    return functional.cross_entropy(logits.flatten(0, 1), labels_BL.flatten(), ignore_index=IGNORED)


@torch.no_grad()
def _accuracy(model: Any, tokenizer: Any, numbers: Sequence[str], rng: random.Random) -> float:
    tokens_BL, labels_BL = _labelled(tokenizer, numbers, rng)
    found = model(input_ids=tokens_BL).logits.argmax(-1)
    counts = labels_BL != IGNORED
    return (found == labels_BL)[counts].float().mean().item()


def _labelled(
    tokenizer: Any, numbers: Sequence[str], rng: random.Random
) -> tuple[torch.Tensor, torch.Tensor]:
    """[B, L] of both, padded at the end, where causal attention never looks."""
    tokens, labels = [], []
    step = tokenizer.convert_tokens_to_ids(STEP)
    for number in numbers:
        text = mangled(written(number, mixed, rng), rng)
        ids = tokenizer.encode(f"{number}={text}")
        of_steps = iter(labels_of(number, text))
        tokens.append(ids)
        labels.append([next(of_steps) if token == step else IGNORED for token in ids])
    longest = max(map(len, tokens))
    for row, of_row in zip(tokens, labels, strict=True):
        row += [PAD_ID] * (longest - len(row))
        of_row += [IGNORED] * (longest - len(of_row))
    return torch.tensor(tokens), torch.tensor(labels)
