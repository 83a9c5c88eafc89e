"""How long a start takes: of a server, of a run, and of an engine that was killed.

`python benchmarks/start_up.py [--repeats 3] [--json FILE]` starts `python -m millrace` as a user
would, on a model of 1M parameters, so that almost all of the time is process start and imports.
It measures the millrace that Python finds: to compare two checkouts, run it once per checkout with
PYTHONPATH=CHECKOUT/src.
"""

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

from millrace.bench.workloads import make_long_tailed_model

COMMAND = [sys.executable, "-m", "millrace"]
LIMIT_S = 300.0
REWARDS = """
def reward(completions, **columns):
    return [len(set(text)) / (len(text) + 1) for text in completions]
"""
SETTINGS = """
model = "model"
run_dir = "run"
scorers = [{ function = "rewards.py:reward" }]
[tasks]
path = "tasks.jsonl"
[sampling]
max_new_tokens = 8
[trainer]
steps = 1
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result here")
    args = parser.parse_args()
    measured: dict[str, list[float]] = {}
    for repeat in range(args.repeats):
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            make_long_tailed_model(folder / "model", seed=repeat)
            for what, seconds in {**serve(folder), "train_to_first_step_s": train(folder)}.items():
                measured.setdefault(what, []).append(seconds)
    result = {what: round(statistics.median(each), 2) for what, each in measured.items()}
    print(json.dumps(result, indent=2))
    if args.json is not None:
        args.json.write_text(json.dumps({**result, "repeats": args.repeats}, indent=2))


def serve(folder: Path) -> dict[str, float]:
    """Seconds from the command to the first reply, and from SIGKILL of the engine to the next."""
    log = (folder / "serve.log").open("w+")
    started_s = time.perf_counter()
    server = subprocess.Popen(
        [*COMMAND, "serve", "model", "--port", "0"], cwd=folder, stdout=log, stderr=log
    )
    try:
        url = until(lambda: find_url(folder / "serve.log"))
        until(lambda: ask(url))
        first_s = time.perf_counter() - started_s
        killed_s = time.perf_counter()
        os.kill(find_engine(server.pid), signal.SIGKILL)
        until(lambda: ask(url))
        return {
            "serve_to_first_reply_s": first_s,
            "kill_to_next_reply_s": time.perf_counter() - killed_s,
        }
    finally:
        server.terminate()
        server.wait()


def train(folder: Path) -> float:
    """Seconds from the command to the first row in metrics.jsonl."""
    (folder / "rewards.py").write_text(REWARDS)
    (folder / "run.toml").write_text(SETTINGS)
    rows = [json.dumps({"prompt": letter * 4}) for letter in "abcdefgh"]
    (folder / "tasks.jsonl").write_text("\n".join(rows))
    metrics = folder / "run" / "metrics.jsonl"
    started_s = time.perf_counter()
    with (folder / "train.log").open("w") as log:
        run = subprocess.Popen([*COMMAND, "train", "run.toml"], cwd=folder, stdout=log, stderr=log)
        try:
            until(lambda: metrics.is_file() and "\n" in metrics.read_text())
            return time.perf_counter() - started_s
        finally:
            run.wait()


def find_url(log: Path) -> str | None:
    words = log.read_text().split()
    return next((word.rstrip(".,") for word in words if word.startswith("http://")), None)


def find_engine(server: int) -> int:
    """The process id of the server's engine."""
    for child in psutil.process_iter(["cmdline", "ppid"]):
        if child.info["ppid"] == server and "engine-0" in (child.info["cmdline"] or []):
            return child.pid
    raise RuntimeError(f"Process {server} has no engine.")


def ask(url: str) -> bool:
    body = json.dumps({"model": "model", "prompt": "abc", "max_tokens": 1}).encode()
    address = f"{url.removesuffix('/').removesuffix('/v1')}/v1/completions"
    request = urllib.request.Request(address, body, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=LIMIT_S) as reply:
            return reply.status == 200
    except OSError:  # it does not serve yet
        return False


def until(check: Callable[[], Any]) -> Any:
    """Call `check` every 10 ms until it returns something; return that."""
    deadline_s = time.perf_counter() + LIMIT_S
    while not (found := check()):
        if time.perf_counter() > deadline_s:
            raise TimeoutError(f"Nothing happened within {LIMIT_S:.0f} s.")
        time.sleep(0.01)
    return found


if __name__ == "__main__":
    main()
