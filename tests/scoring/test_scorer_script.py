"""Reward functions of a plain script: in __main__, closures, and modules next to it."""

import subprocess
import sys

SCRIPT = """
import asyncio, sys, tempfile
from pathlib import Path

import numpy as np
from beside import SCALE, imported

from millrace.cluster.hub import Hub
from millrace.cluster.supervision.pool import WorkerPool
from millrace.core.records import Episode, Group, Rollout, Sampling, Task, Turn
from millrace.scoring.advantages import GroupAdvantages
from millrace.scoring.pool import build_scorer_pool
from millrace.scoring.pool import function_scorer

def in_main(completions):
    return [SCALE * value for value in helper(completions)]

def helper(completions):
    return [len(c) for c in completions]

async def in_main_async(completions):
    await asyncio.sleep(0)
    return helper(completions)

def make(bonus):
    return lambda completions: [bonus for _ in completions]

def group():
    rollout = Rollout(tokens=np.arange(2, dtype=np.int32), mask=np.array([False, True]),
        engine_logprobs=np.zeros(2, np.float32), versions=np.array([-1, 0], np.int32),
        sampling=Sampling())
    turn = Turn(prompt="a", completion="bcd", finish="stop")
    episode = Episode(turns=(turn,), rollouts=(rollout,))
    return Group(number=0, task=Task(prompt="a"), episodes=(episode,))

async def main(folder):
    async with Hub(log_dir=folder, on_event=lambda *_: None) as hub, WorkerPool(hub.launch) as pool:
        scorers = build_scorer_pool(
            [function_scorer(f) for f in (in_main, in_main_async, make(0.25), imported)],
            advantages=GroupAdvantages(), num_workers=1, private=folder / "rewards",
            folder=folder / "scorers", worker_pool=pool)
        async with scorers:
            print((await scorers.score(group())).scores[0].parts)

asyncio.run(main(Path(sys.argv[1])))
"""


def test_functions_of_a_script_and_of_neighbouring_modules_are_scorers(tmp_path):
    script = tmp_path / "code" / "script.py"
    script.parent.mkdir()
    script.write_text(SCRIPT)
    beside = "SCALE = 10.0\ndef imported(completions):\n    return [-1.0 for _ in completions]\n"
    (tmp_path / "code" / "beside.py").write_text(beside)
    command = [sys.executable, str(script), str(tmp_path)]
    # From another directory, so that only the script has its own directory on the path.
    done = subprocess.run(command, capture_output=True, text=True, cwd="/", timeout=60)
    assert done.returncode == 0, done.stderr
    parts = {"in_main": 30.0, "in_main_async": 3.0, "lambda": 0.25, "imported": -1.0}
    assert done.stdout.strip() == repr(parts)
