"""Truncated sampling with and without the kept ids: error of the ratio, and its cost.

    python benchmarks/truncation.py --json truncation.json

The demo's task, strictly on policy, sampled with top-p 0.9 or top-k 3. The engine draws from the
tokens that survive. With "kept" the trainer computes probabilities among the same tokens, so the
ratio is 1 before any update. With "lost" the trainer does not get the kept ids, and computes
probabilities over the whole vocabulary.

Losses: "default" is `clipped`, for which a ratio of 0.96 is as good as 1. "rejecting" is the same,
but rejects rollouts whose mean ratio per token is off by more than 0.01, as a guard against engines
that compute something else than the trainer.
"""

import argparse
import dataclasses
import itertools
import json
import tempfile
from pathlib import Path
from typing import Any

from lockstep import QUICK, Setting, train, warm_started

from millrace.core.records import Rollout, Sampling

SAMPLINGS = {
    "top-p 0.9": Sampling(max_new_tokens=10, top_p=0.9),
    "top-k 3": Sampling(max_new_tokens=10, top_k=3),
}
LOSSES: dict[str, dict[str, Any]] = {
    "default": {"type": "clipped"},
    "rejecting": {
        "type": "clipped",
        "correction": "reject",
        "correction_level": "geometric",
        "correction_low": 0.99,
        "correction_high": 1.01,
    },
}
COLUMNS = (
    *("loss", "sampling", "ids", "seed"),
    *("ratio_mean", "ratio_first", "kl_k3", "masked_share", "accuracy"),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--losses", nargs="+", choices=LOSSES, default=list(LOSSES))
    parser.add_argument("--quick", action="store_true", help="a few steps of each, to try it out")
    args = parser.parse_args()
    rows: list[dict[str, Any]] = []
    print(*(f"{name:<12}" for name in COLUMNS))
    with tempfile.TemporaryDirectory() as folder:
        for seed in range(args.seeds):
            model = warm_started(Path(folder), seed=seed, quick=args.quick)
            for loss, sampling, ids in itertools.product(args.losses, SAMPLINGS, ("kept", "lost")):
                setting = Setting(
                    loss=LOSSES[loss],
                    sampling=SAMPLINGS[sampling],
                    seed=seed,
                    **(QUICK if args.quick else {"steps": args.steps}),
                )
                names = {"loss": loss, "sampling": sampling, "ids": ids, "seed": seed}
                rows.append({**names, **measure(model, setting, ids=ids)})
                print(*(f"{rows[-1][name]!s:<12}" for name in COLUMNS), flush=True)
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1) + "\n")


def measure(model: Path, setting: Setting, *, ids: str) -> dict[str, float]:
    outcome = train(model, setting, alter=without_kept if ids == "lost" else lambda r: r)
    return {
        "ratio_mean": round(outcome.mean("ratio/mean"), 6),
        "ratio_first": round(outcome.rows[0]["ratio/mean"], 6),  # before anything was learned
        "kl_k3": round(outcome.mean("mismatch/kl_k3"), 6),
        "masked_share": round(outcome.mean("mask_ratio"), 4),  # of tokens; nothing is learned
        "accuracy": outcome.accuracy,
    }


def without_kept(rollout: Rollout) -> Rollout:
    return dataclasses.replace(rollout, kept=None)


if __name__ == "__main__":
    main()
