"""A model learns to use a tool by reinforcement, because only the tool knows the answer.

    python examples/tool_use/run.py

A key has a different value in each task, so the model cannot guess it. After its warm start the
model mostly guesses and sometimes calls the tool. Only the reward tells it which is better.
"""

import argparse
import random
import zlib
from pathlib import Path

from model import DIGITS, LETTERS, make_model

import millrace as mr


def make_tasks(num: int, *, seed: int, held_out: bool) -> list[dict[str, str]]:
    """Keys of training tasks and of held-out tasks are disjoint, for every seed."""
    rng = random.Random(f"{seed}, held out: {held_out}")
    tasks: list[dict[str, str]] = []
    while len(tasks) < num:
        key = "".join(rng.choices(LETTERS, k=3))
        if (zlib.crc32(key.encode()) % 8 == 0) == held_out:
            tasks.append({"prompt": key, "value": "".join(rng.choices(DIGITS, k=3))})
    return tasks


async def ask(task: mr.Task, agent: mr.Agent) -> float:
    """One turn to call the tool, and one to answer."""

    def lookup(key: str) -> str:
        """Look up the value of a key."""
        if key == task.prompt:
            return task.columns["value"]
        return "".join(random.Random(f"{task.prompt} is not {key}").choices(DIGITS, k=3))

    messages = [{"role": "user", "content": task.prompt}]
    reply = await agent.chat(messages, tools=[lookup])
    if reply.tool_calls:
        messages += [reply, *await agent.call_tools(reply)]
        reply = await agent.chat(messages, tools=[lookup])
    return float(reply.text == task.columns["value"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--run-dir", type=Path, default=Path("runs/tool_use"))
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    make_model(args.run_dir / "model", seed=args.seed)
    result = mr.train(
        model=str(args.run_dir / "model"),
        run_dir=str(args.run_dir / "run"),
        seed=args.seed,
        tasks=make_tasks(4096, seed=args.seed, held_out=False),
        eval_tasks=make_tasks(128, seed=args.seed, held_out=True),
        environment={"function": ask, "max_turns": 2},
        sampling={"max_new_tokens": 8},
        trainer={"steps": args.steps, "groups_per_step": 16},
        optimizer={"learning_rate": 1.5e-4},
        evaluate={"every_steps": 20},
        scoring={"workers": 1},
    )
    print(f"held-out accuracy {result.accuracy_before:.3f} -> {result.accuracy_after:.3f}")
    print(f"{result.episodes} episodes, {result.seconds:.0f} s; checkpoint in {result.checkpoint}")


if __name__ == "__main__":
    main()
