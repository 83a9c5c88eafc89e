"""Truncated sampling with and without the kept ids: error of the ratio, and what it costs.

    python benchmarks/truncation.py --json truncation.json

The task is the demo's, strictly on-policy, sampled with top-p 0.9 or top-k 3. With "kept", the
trainer computes probabilities over the token ids that survived truncation in the engine, so the
ratio is 1 before any update. With "lost", it does not get these ids and computes probabilities over
the whole vocabulary.

"default" is the loss `clipped`, which treats a ratio of 0.96 like 1. "rejecting" also rejects
rollouts whose mean ratio per token is off by more than 0.01, to guard against engines that compute
other probabilities than the trainer.
"""

import argparse
import dataclasses
import itertools
import json
import tempfile
from pathlib import Path
from typing import Any

from lockstep import QUICK, LockstepSettings, train, warm_start_model

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
            model = warm_start_model(Path(folder), seed=seed, quick=args.quick)
            for loss, sampling, ids in itertools.product(args.losses, SAMPLINGS, ("kept", "lost")):
                settings = LockstepSettings(
                    loss=LOSSES[loss],
                    sampling=SAMPLINGS[sampling],
                    seed=seed,
                    **(QUICK if args.quick else {"steps": args.steps}),
                )
                names = {"loss": loss, "sampling": sampling, "ids": ids, "seed": seed}
                rows.append({**names, **measure(model, settings, ids=ids)})
                print(*(f"{rows[-1][name]!s:<12}" for name in COLUMNS), flush=True)
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1) + "\n")


def measure(model: Path, settings: LockstepSettings, *, ids: str) -> dict[str, float]:
    result = train(model, settings, transform=without_kept if ids == "lost" else lambda r: r)
    return {
        "ratio_mean": round(result.mean("ratio/mean"), 6),
        "ratio_first": round(result.rows[0]["ratio/mean"], 6),  # before the first update
        "kl_k3": round(result.mean("mismatch/kl_k3"), 6),
        "masked_share": round(result.mean("mask_ratio"), 4),  # share of tokens without gradient
        "accuracy": result.accuracy,
    }


def without_kept(rollout: Rollout) -> Rollout:
    return dataclasses.replace(rollout, kept=None)


if __name__ == "__main__":
    main()
