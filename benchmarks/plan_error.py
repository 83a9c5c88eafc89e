"""Error of `millrace plan` on this machine: predicted and measured runs, none of which
calibrated it.

    python benchmarks/plan_error.py --folder plan_error
    python benchmarks/plan_error.py --folder plan_error --only 4
    python benchmarks/plan_error.py --folder plan_error --jobs 4
    python benchmarks/plan_error.py --folder plan_error_gpu --device cuda

Each configuration is a run of a model whose lengths have a long tail: one of 1M parameters on a
CPU, and one with the layers of SmolLM2-135M on a GPU, which engine and trainer share. The machine
is calibrated once with other settings (`millrace plan --calibrate`). With `--jobs`, several runs
are made at a time, each on its own cores, which have a calibration of their own. The prediction
gets the lengths that the run had, so its error is that of costs and simulation, not of a guess
about lengths. The policy learns nothing, or its completions would grow longer during the run. Rates
and staleness are means of 16 (CPU) or 48 (GPU) steps, after those in which kernels are tuned, CUDA
graphs are captured and the buffer fills. Memory is that of all processes together, on the GPU if
there is one.

Rows in FOLDER/rows.json are not measured again, so the script may be stopped at any time.
"""

import argparse
import json
import os
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

from resumable_sweep import sweep

from millrace.bench.workloads import make_long_tailed_model, shape_named
from millrace.compare.runs import side_by_side, train_process
from millrace.config import load_config, settings_table
from millrace.monitoring.run_dir import RunDir
from millrace.plan.calibrate import calibrate, microbatch_tokens, predict, read_calibration
from millrace.plan.command import measured
from millrace.plan.lengths import read_lengths
from millrace.plan.model_costs import Calibration, ModelShape

# Steps that count, and steps before them, to which the staleness limit is added.
STEPS, WARM_UP = {"cpu": 16, "cuda": 48}, {"cpu": 3, "cuda": 16}
# Groups per step, episodes per group, sequences per engine, staleness limit, engines. Those of the
# CPU are held out: no version of the model was fitted to one of them, or compared with it, before
# the table of docs/how-to/plan.md was made.
CONFIGURATIONS = {
    "cpu": [
        *product((4, 6), (5, 8), (12, 32), (1, 3), (1,)),
        (5, 5, 20, 0, 1),
        (6, 4, 48, 6, 1),
        (5, 6, 12, 2, 2),
        (4, 8, 8, 4, 2),
    ],
    "cuda": [
        *product((8, 16), (8,), (64, 256), (1, 4), (1,)),
        (8, 8, 128, 0, 1),
        (12, 16, 256, 8, 1),
    ],
}
SIZES = (
    *("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
    *("num_key_value_heads", "head_dim", "max_position_embeddings"),
)
SMOLLM2 = shape_named("smollm2-135m")
MODEL = {"cpu": {}, "cuda": {name: getattr(SMOLLM2, name) for name in SIZES}}
SETTINGS = {
    "cpu": "max_new_tokens = 128\n[cluster]\nthreads = 1\n",
    "cuda": "max_new_tokens = 512\n[engine]\noptions = {kv_bytes = 4_000_000_000}\n",
}
KEYS = ("groups", "size", "sequences", "staleness", "engines")
REWARD = "def distinct(completions, **columns):\n    return [len(set(c)) for c in completions]\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--folder", type=Path, default=Path("plan_error"))
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--only", type=int, help="the first N")
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time, on cores of their own")
    args = parser.parse_args()
    folder, device = args.folder.resolve(), args.device
    toml, found = prepare(folder, device), CONFIGURATIONS[device]
    # Spread over the list, so that a few differ in everything.
    order = sorted(range(len(found)), key=lambda i: i * 7 % len(found))
    rows = sweep(
        [found[i] for i in order[: args.only]],
        lambda *v: measure(toml, dict(zip(KEYS, v, strict=True)), device),
        key=KEYS,
        file=folder / "rows.json",
        pool=side_by_side(args.jobs),
    )
    print(table(rows))


def prepare(folder: Path, device: str) -> Path:
    """The settings that all runs share."""
    toml = folder / "run.toml"
    if not toml.is_file():
        folder.mkdir(parents=True, exist_ok=True)
        make_long_tailed_model(folder / "model", seed=0, **MODEL[device])
        (folder / "reward.py").write_text(REWARD)
        tasks = [json.dumps({"prompt": f"task{number:04}"}) for number in range(512)]
        (folder / "tasks.jsonl").write_text("\n".join(tasks) + "\n")
        toml.write_text(
            'model = "model"\nscorers = ["reward.py:distinct"]\n'
            '[tasks]\npath = "tasks.jsonl"\n[scoring]\nworkers = 1\n'
            f"[optimizer]\nlearning_rate = 1e-12\n[sampling]\n{SETTINGS[device]}"
        )
    return toml


def calibrated(toml: Path) -> Calibration:
    """The measurement of the cores of this thread."""
    cores = "_".join(map(str, sorted(os.sched_getaffinity(0))))
    file = toml.parent / f"calibration_{cores}.json"
    if not file.is_file():
        print(f"calibrating cores {cores} ...", flush=True)
        calibrate(settings_table(toml), file=file)
    return read_calibration(file)


def measure(toml: Path, values: dict[str, int], device: str) -> dict[str, Any]:
    found = calibrated(toml)
    warm_up = WARM_UP[device] + values["staleness"]
    steps = STEPS[device] + warm_up
    run_dir = toml.parent / "_".join(str(value) for value in values.values())
    options = {
        "run_dir": str(run_dir),
        "trainer.steps": steps,
        "trainer.groups_per_step": values["groups"],
        "rollout.group_size": values["size"],
        "engine.max_sequences": values["sequences"],
        "buffer.max_staleness": values["staleness"],
        "engine.count": values["engines"],
        "checkpoint.every_steps": 0,
    }
    given = [f"--{key}={json.dumps(value)}" for key, value in options.items()]
    command = ["train", str(toml), "--auto-resume", *given]
    ended = train_process(command, log=run_dir.with_suffix(".log"))
    assert ended.error is None, ended.error
    config = load_config(toml, overrides=options)
    shape = ModelShape.read(config.model.path)
    lengths = read_lengths(str(run_dir), max_new_tokens=1)
    predicted = predict(found, config, shape, lengths, steps=steps, warm_up=warm_up)
    real = measured(RunDir(run_dir), warm_up=warm_up)
    return {
        **values,
        "samples_per_s": real["samples_per_s"],
        "predicted_samples_per_s": predicted.samples_per_s,
        "staleness_mean": real["staleness_mean"],
        "predicted_staleness_mean": predicted.staleness_mean,
        "memory_mib": ended.peak_mib if device == "cpu" else ended.peak_gpu_mib,
        "predicted_memory_mib": found.run_mib(
            config, shape, tokens=microbatch_tokens(config, lengths)
        ),
    }


def table(rows: list[dict[str, Any]]) -> str:
    lines = [
        "| groups x size, sequences, limit, engines | samples/s | predicted | error"
        " | staleness | predicted | memory, MiB | error |",
        "|---" * 8 + "|",
    ]
    for row in rows:
        name = "{groups} x {size}, {sequences}, {staleness}, {engines}".format(**row)
        lines.append(
            f"| {name} | {row['samples_per_s']:.1f} | {row['predicted_samples_per_s']:.1f}"
            f" | {_error(row, 'samples_per_s'):+.0%} | {row['staleness_mean']:.2f}"
            f" | {row['predicted_staleness_mean']:.2f} | {row['memory_mib']:.0f}"
            f" | {_error(row, 'memory_mib'):+.0%} |"
        )
    rates = [abs(_error(row, "samples_per_s")) for row in rows]
    memory = [abs(_error(row, "memory_mib")) for row in rows]
    ages = [abs(row["predicted_staleness_mean"] - row["staleness_mean"]) for row in rows]
    lines.append(
        f"\n{len(rows)} runs. Samples/s: median error {median(rates):.0%}, worst {max(rates):.0%}."
        f" Staleness: median {median(ages):.2f} versions, worst {max(ages):.2f}."
        f" Memory: median {median(memory):.0%}, worst {max(memory):.0%}."
    )
    return "\n".join(lines)


def _error(row: dict[str, Any], key: str) -> float:
    return row[f"predicted_{key}"] / row[key] - 1


if __name__ == "__main__":
    main()
