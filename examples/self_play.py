"""Self-play of two roles: a proposer writes a number, a solver sorts its digits.

    python examples/self_play.py
    python examples/self_play.py --policies
    python examples/self_play.py --policies --lora
    python examples/self_play.py --policies --lora --lags 5 15

One policy plays both roles, or with --policies each role is a policy of its own, and with --lora
each policy is an adapter of one model. The proposer is rewarded for numbers that the solver gets
wrong, and the solver for sorting them correctly, so each role makes the other's task harder as it
learns. With --lags, the solver meets a population: in each episode the newest proposer or one of
these earlier versions, which are not trained. Held-out numbers measure the solver alone, before and
after training.
"""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np

import millrace as mr
from millrace.demo.model import NUM_EXAMPLES, make_model
from millrace.demo.task import MAX_DIGITS, MIN_DIGITS, held_out_tasks

WINDOW = 10  # steps that are averaged at the start and at the end of a curve


async def propose_and_solve(
    task: mr.Task, agent: mr.Agent, lags: Sequence[int] = ()
) -> dict[str, float]:
    if "answer" in task.columns:  # a held-out task
        reply = await agent.role("solver").complete(str(task.prompt))
        return {"solver": float(reply.text == task.columns["answer"])}
    proposed, lag = "", int(agent.rng.choice([0, *lags]))
    if lag:
        past = agent.role("past proposer", model="proposer", lag=lag)
        proposed = (await past.complete("sort ")).text
    is_trained = not _is_valid(proposed)
    if is_trained:
        proposed = (await agent.role("proposer").complete("sort ")).text
    if not _is_valid(proposed):
        return {"proposer": -1.0}  # the solver has no turn
    reply = await agent.role("solver").complete(f"sort {proposed}=")
    is_solved = reply.text == "".join(sorted(proposed))
    of_proposer = {"proposer": 1.0 - is_solved} if is_trained else {}
    return {**of_proposer, "solver": float(is_solved)}


def _is_valid(number: str) -> bool:
    return number.isdigit() and MIN_DIGITS <= len(number) <= MAX_DIGITS


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--run-dir", type=Path, default=Path("runs/self_play"))
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--policies", action="store_true", help="train a model for each role")
    parser.add_argument("--lora", action="store_true", help="train adapters of one model")
    parser.add_argument("--lags", type=int, nargs="+", default=[], help="earlier proposers, too")
    warm_up = "sorted numbers that the model sees before the run"
    parser.add_argument("--examples", type=int, default=NUM_EXAMPLES, help=warm_up)
    args = parser.parse_args()
    make_model(args.run_dir / "model", args.seed, num_examples=args.examples)

    async def play(task: mr.Task, agent: mr.Agent) -> dict[str, float]:
        return await propose_and_solve(task, agent, args.lags)

    result = mr.train(
        model=str(args.run_dir / "model"),
        run_dir=str(args.run_dir / "run"),
        seed=args.seed,
        tasks=[{"prompt": "sort "}],
        eval_tasks=held_out_tasks(),
        environment={"function": play, "max_turns": 3},
        sampling={"max_new_tokens": 10},
        rollout={"group_size": 16},
        trainer={"steps": args.steps, "groups_per_step": 16},
        policies={"solver": {}, "proposer": {"lags": args.lags}} if args.policies else {},
        lora={"rank": 16} if args.lora else None,
        optimizer={"learning_rate": 1e-3 if args.lora else 1.5e-4},
        engine={"max_sequences": 128},
        scoring={"workers": 1},
    )
    print(f"solver, held out: {result.accuracy_before:.3f} -> {result.accuracy_after:.3f}")
    rows = [json.loads(line) for line in (result.run_dir / "metrics.jsonl").open()]
    for name in ("environment.proposer", "environment.solver"):
        key = f"rewards/{name}/mean"
        curve = [row[key] for row in rows if key in row]
        print(f"{name}: {np.mean(curve[:WINDOW]):.3f} -> {np.mean(curve[-WINDOW:]):.3f}")


if __name__ == "__main__":
    main()
