"""What rollouts/ and lifecycle/ cost: samples/s of a short CPU run with and without them.

    python benchmarks/recording_cost.py --pairs 5 --steps 24
    python benchmarks/recording_cost.py --pairs 5 --steps 60 --dashboard

Pairs alternate, so that a machine that becomes slower does not count against one side. Each run is
the demo's, with a process of its own. `monitoring.samples_per_step = 0` turns both records off. The
last line is the time of the writing thread for one step of long episodes, without a run. With
--dashboard, all runs have records, and one of each pair has `millrace dashboard` and a viewer.
"""

import argparse
import asyncio
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

import numpy as np
from dashboard_load import start_dashboard, view

from millrace.config import load_config
from millrace.core.records import Episode, Group, Rollout, Sampling, Score, Task, Turn
from millrace.demo.model import make_model
from millrace.demo.run import SETTINGS
from millrace.models.directory import load_tokenizer
from millrace.monitoring.files.episodes import StepLife, StepRecorder
from millrace.monitoring.run_dir import RunDir


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--samples", type=int, default=4, help="monitoring.samples_per_step")
    parser.add_argument("--dashboard", action="store_true", help="measure the dashboard instead")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "model"
        make_model(model, 0)
        losses: list[float] = []
        for pair in range(args.pairs):
            rates: dict[bool, float] = {}
            for is_with in (False, True) if pair % 2 else (True, False):
                samples = args.samples if is_with or args.dashboard else 0
                watched = is_with and args.dashboard
                rates[is_with] = measure(
                    Path(folder), model, steps=args.steps, samples=samples, watched=watched
                )
            losses.append(1 - rates[True] / rates[False])
            print(
                f"pair {pair + 1}: {rates[False]:.1f} samples/s without,"
                f" {rates[True]:.1f} with, loss {losses[-1]:+.1%}",
                flush=True,
            )
        print(f"median loss of samples/s: {median(losses):+.1%}")
        if args.dashboard:
            return
        seconds = asyncio.run(write_seconds(Path(folder), model, samples=args.samples))
        print(f"writing one step of {args.samples} episodes of 1024 tokens: {1e3 * seconds:.1f} ms")


def measure(folder: Path, model: Path, *, steps: int, samples: int, watched: bool) -> float:
    """Samples/s of a run, without its start; `watched` by a viewer of the dashboard."""
    run_dir = folder / f"run_{time.monotonic_ns()}"
    overrides = {
        "model": str(model),
        "run_dir": str(run_dir),
        "trainer.steps": steps,
        "evaluate.every_steps": 0,
        "checkpoint.every_steps": 0,
        "monitoring.progress": "off",
        "monitoring.samples_per_step": samples,
    }
    config = load_config(SETTINGS, overrides=overrides)
    file = folder / "config.json"
    file.write_text(config.model_dump_json())
    code = "import json, sys, millrace; millrace.train(json.load(open(sys.argv[1])))"
    run = subprocess.Popen([sys.executable, "-c", code, str(file)])
    written = RunDir(run_dir)
    if watched:
        while not written.metrics.exists() and run.poll() is None:
            time.sleep(0.1)
        asyncio.run(watch(run_dir, run))
    assert run.wait() == 0
    assert written.lifecycle.exists() == bool(samples)
    return json.loads(written.summary.read_text())["samples_per_s"]


async def watch(run_dir: Path, run: subprocess.Popen[bytes]) -> None:
    """Show the run to a viewer until it ends."""
    dashboard, url = start_dashboard(run_dir)
    seen: list[float] = []
    steps = dict.fromkeys(range(1_000_000), 0.0)
    viewer = asyncio.create_task(view(url, steps, seen, asyncio.Event()))
    await asyncio.to_thread(run.wait)
    viewer.cancel()
    dashboard.terminate()
    dashboard.wait()
    assert len(seen) > 2, "the viewer saw no steps"


async def write_seconds(folder: Path, model: Path, *, samples: int) -> float:
    """The median time for the files of one step, in the thread that writes them."""
    rng = np.random.default_rng(0)
    tokenizer = load_tokenizer(str(model), trust_remote_code=False)
    config = load_config(
        {"model": str(model), "monitoring": {"samples_per_step": samples, "progress": "off"}}
    )
    recorder = StepRecorder(config, RunDir(folder), decode=lambda ids: tokenizer.decode(ids))
    mask = np.arange(1024) >= 128
    episodes = tuple(
        Episode(
            turns=(Turn(prompt="sort", completion="x" * 900, finish="stop"),),
            rollouts=(
                Rollout(
                    tokens=rng.integers(3, 14, 1024).astype(np.int32),
                    mask=mask,
                    engine_logprobs=np.where(mask, -rng.random(1024), 0).astype(np.float32),
                    versions=np.where(mask, 7, -1).astype(np.int32),
                    sampling=Sampling(),
                ),
            ),
        )
        for _ in range(samples)
    )
    group = Group(
        number=0,
        task=Task(prompt="sort"),
        episodes=episodes,
        scores=tuple(Score(total=1.0, parts={"exact": 1.0}) for _ in episodes),
        advantages=np.zeros(samples, np.float32),
    )
    numbers = {n: rng.random((3, int(mask.sum()))).astype(np.float32) for n in range(samples)}
    times: list[float] = []
    for step in range(1, 21):
        life = StepLife(step=step, begin_s=0, end_s=1, unix_s=1, groups=[], replayed=[], lost=[])
        start_s = time.monotonic()
        recorder.write(life, [group], numbers)
        await recorder.written()
        times.append(time.monotonic() - start_s)
    return median(times)


if __name__ == "__main__":
    main()
