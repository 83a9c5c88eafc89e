"""Two reward functions: 1 for the correct digits, and 0.2 for the correct length.

python examples/two_rewards.py
"""

from pathlib import Path

import millrace as mr
from millrace.demo.model import make_model
from millrace.demo.task import held_out_tasks, train_tasks

RUN = Path("runs/two_rewards")


def exact(completions, answer, **columns):
    return [float(text == right) for text, right in zip(completions, answer, strict=True)]


async def right_length(completions, answer, **columns):  # async works too
    pairs = zip(completions, answer, strict=True)
    return [0.2 * (len(text) == len(right)) for text, right in pairs]


def main() -> None:
    make_model(RUN / "model", seed=1)
    result = mr.train(
        model=str(RUN / "model"),
        run_dir=str(RUN / "run"),
        tasks=train_tasks(),
        eval_tasks=held_out_tasks(),
        scorers=[exact, right_length],
        sampling={"max_new_tokens": 10},
        trainer={"steps": 60, "groups_per_step": 32},
        optimizer={"learning_rate": 1.5e-4},
    )
    print(f"accuracy {result.accuracy_before:.3f} -> {result.accuracy_after:.3f}")
    print(f"checkpoint in {result.checkpoint}")


if __name__ == "__main__":
    main()
