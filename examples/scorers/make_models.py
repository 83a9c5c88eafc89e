"""Makes what the five runs of this folder need, in runs/scorers: a policy that does its sums
carelessly, models that judge or teach it, and tasks.

    python examples/scorers/make_models.py

"3414=" is to be answered with the running sum of the digits, modulo 5: "3+4=2;2+1=3;3+4=2;". The
task and most of its models are those of benchmarks/chains.py. Takes about two minutes on one core.
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
        folder / "policy", num_examples=num_examples // 3, hints=num_examples // 3, **size
    )
    chains.make_policy(folder / "teacher", num_examples=num_examples, result=chains.right, **size)
    rightly = chains.make_judge(folder / "steps", num_examples=num_examples, enough=0.95, **size)
    print(f"the judge of steps is right about {rightly:.2f} of them")
    rightly = make_reward_model(folder / "reward_model", num_examples=num_examples)
    print(f"the reward model is right about {rightly:.2f} of the answers")
    tasks = chains.make_tasks(2048, **size)
    for task in tasks:
        task["steps"] = chains.written(task["prompt"][:-1], chains.right, random.Random(0))
    lines = "".join(f"{json.dumps(task)}\n" for task in tasks)
    (folder / "tasks.jsonl").write_text(lines, encoding="utf-8")


def make_reward_model(directory: Path, *, num_examples: int) -> float:
    """Trains and saves it; returns the share of the last batches' answers it judged rightly."""
    tokenizer = build_tokenizer(chains.PIECES)
    torch.manual_seed(0)
    config = chains.small_config(len(tokenizer))
    config.num_labels = 2
    model = Qwen3ForSequenceClassification(config)
    rng = random.Random(0)
    tasks = chains.make_tasks(num_examples, seed=1, num_steps=NUM_STEPS)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.0)
    rightly: list[float] = []
    for at in range(0, len(tasks), 64):
        tokens_BL, labels_B = _answered(tokenizer, tasks[at : at + 64], rng)
        logits_BC = model(input_ids=tokens_BL, attention_mask=tokens_BL != PAD_ID).logits
        loss = functional.cross_entropy(logits_BC, labels_B)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        rightly.append((logits_BC.argmax(-1) == labels_B).float().mean().item())
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return sum(rightly[-10:]) / len(rightly[-10:])


def _answered(
    tokenizer: Any, tasks: list[dict[str, Any]], rng: random.Random
) -> tuple[torch.Tensor, torch.Tensor]:
    """[B, L] padded at the end, and [B] whether the last sum is right."""
    texts = [chains.written(task["prompt"][:-1], chains.mixed, rng) for task in tasks]
    rows = [tokenizer.encode(t["prompt"] + text) for t, text in zip(tasks, texts, strict=True)]
    longest = max(map(len, rows))
    padded = [row + [PAD_ID] * (longest - len(row)) for row in rows]
    right = chains.outcome(texts, [task["answer"] for task in tasks])
    return torch.tensor(padded), torch.tensor(right).long()


if __name__ == "__main__":
    main()
