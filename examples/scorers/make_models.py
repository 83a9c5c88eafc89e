"""Make the models and tasks of the five runs of this folder, in runs/scorers.

    python examples/scorers/make_models.py

The answer to "3414=" is the running sum of the digits, modulo 5: "3+4=2;2+1=3;3+4=2;". The policy
adds carelessly; the other models score or teach it. The task and most models are those of
benchmarks/chains.py. This takes about two minutes on one core.
"""

import argparse
import json
import random
import sys
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional
from transformers import Qwen3ForSequenceClassification

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))

import chains  # noqa: E402

from millrace.demo.model import PAD_ID, build_tokenizer  # noqa: E402

NUM_STEPS = 3


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--folder", type=Path, default=ROOT / "runs" / "scorers")
    parser.add_argument("--examples", type=int, default=25_600, help="for each model (25600)")
    args = parser.parse_args()
    torch.set_num_threads(1)
    make_all(args.folder, num_examples=args.examples)


def make_all(folder: Path, *, num_examples: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    size: dict[str, Any] = {"seed": 0, "num_steps": NUM_STEPS}
    chains.make_policy(
        folder / "policy", num_examples=num_examples // 3, num_hinted=num_examples // 3, **size
    )
    chains.make_policy(
        folder / "teacher", num_examples=num_examples, add=chains.add_correctly, **size
    )
    accuracy = chains.make_process_reward_model(
        folder / "steps", num_examples=num_examples, target_accuracy=0.95, **size
    )
    print(f"process reward model: accuracy {accuracy:.2f} on steps")
    accuracy = make_reward_model(folder / "reward_model", num_examples=num_examples)
    print(f"reward model: accuracy {accuracy:.2f} on answers")
    tasks = chains.make_tasks(2048, **size)
    for task in tasks:
        number = task["prompt"][:-1]
        task["steps"] = chains.write_steps(number, chains.add_correctly, random.Random(0))
    lines = "".join(f"{json.dumps(task)}\n" for task in tasks)
    (folder / "tasks.jsonl").write_text(lines, encoding="utf-8")


def make_reward_model(directory: Path, *, num_examples: int) -> float:
    """Train and save a reward model; returns its accuracy on the last batches."""
    tokenizer = build_tokenizer(chains.PIECES)
    torch.manual_seed(0)
    config = chains.small_config(len(tokenizer))
    config.num_labels = 2
    model = Qwen3ForSequenceClassification(config)
    rng = random.Random(0)
    tasks = chains.make_tasks(num_examples, seed=1, num_steps=NUM_STEPS)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.0)
    accuracies: list[float] = []
    for at in range(0, len(tasks), 64):
        tokens_BL, labels_B = _labelled_answers(tokenizer, tasks[at : at + 64], rng)
        logits_BC = model(input_ids=tokens_BL, attention_mask=tokens_BL != PAD_ID).logits
        loss = functional.cross_entropy(logits_BC, labels_B)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        accuracies.append((logits_BC.argmax(-1) == labels_B).float().mean().item())
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return sum(accuracies[-10:]) / len(accuracies[-10:])


def _labelled_answers(
    tokenizer: Any, tasks: list[dict[str, Any]], rng: random.Random
) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens [B, L], padded at the end, and labels [B]: 1 if the last sum is correct."""
    texts = [chains.write_steps(t["prompt"][:-1], chains.add_variously, rng) for t in tasks]
    rows = [tokenizer.encode(t["prompt"] + text) for t, text in zip(tasks, texts, strict=True)]
    longest = max(map(len, rows))
    padded = [row + [PAD_ID] * (longest - len(row)) for row in rows]
    rewards = chains.outcome_reward(texts, [task["answer"] for task in tasks])
    return torch.tensor(padded), torch.tensor(rewards).long()


if __name__ == "__main__":
    main()
