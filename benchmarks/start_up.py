"""How long a start takes: of a server, of a run, and of an engine that was killed.

    python benchmarks/start_up.py [--repeats 3] [--json FILE]
    python benchmarks/start_up.py --model smollm2-135m

starts `python -m millrace` as a user would, by default on a model of 1M parameters, so that almost
all of the time is process start and imports. `--model` is a model directory, or a shape of
`millrace bench engine` with random weights. A first run has an empty compile cache; what follows,
`--repeats` runs and servers, shares what it compiled. The table has the phases of a run, from the
command to the prompt.

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
import threading
import time
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil
import torch

from millrace.bench import write_result
from millrace.bench.workloads import make_long_tailed_model, make_model
from millrace.models.attention.packed import PACKED

COMMAND = [sys.executable, "-m", "millrace"]
LIMIT_S = 300.0
STEPS = 3
REWARDS = """
def reward(completions, **columns):
    return [len(set(text)) / (len(text) + 1) for text in completions]
"""
SETTINGS = f"""
model = "model"
scorers = [{{ function = "rewards.py:reward" }}]
[tasks]
path = "tasks.jsonl"
[sampling]
max_new_tokens = 8
[trainer]
steps = {STEPS}
[monitoring]
progress = "lines"
"""
# Lines of a run's output, and the events that they report.
LINES = {
    "engine-0: starting the process": "fork_s",
    "engine-0: compiling and warming up": "weights_s",
    "engine-0: ready": "ready_s",
}
EVENTS = {
    "command_s": "the command",
    "fork_s": "the first fork of a worker",
    "weights_s": "the engine has its weights",
    "ready_s": "the engine is ready",
    "first_step_s": "the first step ends",
    "last_step_s": "the last step ends",
    "checkpoint_s": "its checkpoint is on the disk",
    "workers_s": "all workers have ended",
    "prompt_s": "the prompt",
}


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", help="a model directory, or a shape of `millrace bench engine`")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result here")
    args = parser.parse_args(argv)
    measured: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        prepare(folder, model=args.model)
        cold = train(folder, run_dir="cold")
        for repeat in range(args.repeats):
            warm = train(folder, run_dir=f"warm-{repeat}")
            for what, seconds in {**serve(folder), **warm}.items():
                measured.setdefault(what, []).append(seconds)
    warm = {what: statistics.median(each) for what, each in measured.items()}
    print(table({"cold": cold, "warm": warm}))
    print(f"`millrace serve` to its first reply: {warm['serve_to_first_reply_s']:.1f} s")
    print(f"SIGKILL of its engine to the next reply: {warm['kill_to_next_reply_s']:.1f} s")
    result = {"model": args.model, "repeats": args.repeats, "cold": cold, "warm": warm}
    write_result(result, args.json)
    return 0


def prepare(folder: Path, *, model: str | None) -> None:
    """The files of all runs and servers."""
    target = folder / "model"
    if model is None:
        make_long_tailed_model(target, seed=0)
    elif Path(model).is_dir():
        target.symlink_to(Path(model).resolve())
    else:
        cpu = torch.device("cpu")
        found, tokenizer = make_model(model, dtype=torch.bfloat16, device=cpu, attention=PACKED)
        found.save_pretrained(target)
        tokenizer.save_pretrained(target)
    (folder / "rewards.py").write_text(REWARDS)
    (folder / "run.toml").write_text(SETTINGS)
    rows = [json.dumps({"prompt": letter * 4}) for letter in "12345678"]
    (folder / "tasks.jsonl").write_text("\n".join(rows))


def start(folder: Path, *arguments: str, **options: Any) -> subprocess.Popen[str]:
    """A command with a compile cache of its own."""
    caches = {"TORCHINDUCTOR_CACHE_DIR": "inductor", "TRITON_CACHE_DIR": "triton"}
    env = {**os.environ, **{key: str(folder / "cache" / name) for key, name in caches.items()}}
    return subprocess.Popen([*COMMAND, *arguments], cwd=folder, env=env, text=True, **options)


def serve(folder: Path) -> dict[str, float]:
    """Seconds from the command to the first reply, and from SIGKILL of the engine to the next."""
    log = (folder / "serve.log").open("w+")
    started_s = time.perf_counter()
    server = start(folder, "serve", "model", "--port", "0", stdout=log, stderr=log)
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


def train(folder: Path, *, run_dir: str) -> dict[str, float]:
    """When each of EVENTS came, in seconds from the command."""
    found = {"command_s": 0.0}
    files = {
        "first_step_s": lambda: num_rows(folder / run_dir / "metrics.jsonl") >= 1,
        "last_step_s": lambda: num_rows(folder / run_dir / "metrics.jsonl") >= STEPS,
        "checkpoint_s": (folder / run_dir / "checkpoints" / f"step_{STEPS}").is_dir,
        "workers_s": (folder / run_dir / "summary.json").is_file,
    }
    started_s = time.perf_counter()
    pipe = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    run = start(folder, "train", "run.toml", f"--run_dir={run_dir}", **pipe)

    def read() -> None:
        for line in run.stdout or ():
            lines.append(line)
            if event := LINES.get(line.rstrip()):
                found[event] = time.perf_counter() - started_s

    lines: list[str] = []
    reader = threading.Thread(target=read)
    reader.start()
    has_ended = False
    while not has_ended:
        has_ended = run.poll() is not None  # before the files, which an ended run has written
        for event in files.keys() - found.keys():
            if files[event]():
                found[event] = time.perf_counter() - started_s
        time.sleep(0 if has_ended else 0.005)
    found["prompt_s"] = time.perf_counter() - started_s
    reader.join()
    if missing := EVENTS.keys() - found.keys():
        raise RuntimeError(f"The run has no {', '.join(sorted(missing))}:\n{''.join(lines)}")
    return found


def table(columns: Mapping[str, Mapping[str, float]]) -> str:
    """The seconds between consecutive events, then those that a user waits in total."""
    totals = [("command_s", "first_step_s"), ("last_step_s", "prompt_s")]
    lines = [f"{'from':<32}{'to':<32}" + "".join(f"{name:>8}" for name in columns)]
    for first, second in [*pairwise(EVENTS), *totals]:
        seconds = (f"{found[second] - found[first]:>8.1f}" for found in columns.values())
        lines.append(f"{EVENTS[first]:<32}{EVENTS[second]:<32}{''.join(seconds)}")
    return "\n".join(lines)


def num_rows(file: Path) -> int:
    return file.read_text().count("\n") if file.is_file() else 0


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
    body = json.dumps({"model": "model", "prompt": "123", "max_tokens": 1}).encode()
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
    sys.exit(main())
