"""Many viewers of one run: how soon each sees a new step, and what the dashboard costs.

    python benchmarks/dashboard_load.py runs/demo --viewers 50 --seconds 20

Copies the settings and metrics of RUN_DIR, starts `millrace dashboard` over the copy, and appends a
step every second. Each viewer does what the page does: it listens for events and then fetches the
overview and its curves. Prints delays from the write of a step to its arrival at a viewer, and the
CPU time of the server.
"""

import argparse
import asyncio
import json
import os
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import aiohttp

KEYS = "reward/mean,reward/std,throughput/samples_per_s,staleness/mean,staleness/max,entropy"


def start_dashboard(run_dir: Path) -> tuple[subprocess.Popen[str], str]:
    """The process, and the URL that it prints."""
    command = [sys.executable, "-m", "millrace", "dashboard", str(run_dir), "--port", "0"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    found = re.search(r"http://\S+", process.stdout.readline())
    assert found is not None, "the dashboard did not start"
    return process, found[0]


async def view(url: str, written: dict[int, float], delays: list[float], ready: asyncio.Event):
    token = url.partition("token=")[2]
    headers = {"Authorization": f"Bearer {token}"}
    base = url.partition("?")[0]
    timeout = aiohttp.ClientTimeout(total=None)
    async with (
        aiohttp.ClientSession(base, headers=headers, timeout=timeout) as session,
        session.get("/events") as events,
    ):
        async for line in events.content:
            if not line.startswith(b"data: ") or b"runs" not in line:
                continue
            ready.set()
            async with session.get("/runs/0/overview") as response:
                step = (await response.json())["step"]
            async with session.get(f"/runs/0/curves?keys={KEYS}&points=600") as response:
                await response.read()
            if step in written:
                delays.append(time.monotonic() - written[step])


async def measure(url: str, metrics: Path, last: dict[str, Any], *, viewers: int, seconds: int):
    """Returns the delays. `last`: the newest row of `metrics`."""
    written: dict[int, float] = {}
    delays: list[float] = []
    ready = [asyncio.Event() for _ in range(viewers)]
    tasks = [asyncio.create_task(view(url, written, delays, event)) for event in ready]
    await asyncio.gather(*(event.wait() for event in ready))
    for step in range(last["step"] + 1, last["step"] + 1 + seconds):
        row = {**last, "step": step, "version": step, "time_s": last["time_s"] + step}
        with metrics.open("a") as file:
            file.write(json.dumps(row) + "\n")
        written[step] = time.monotonic()
        await asyncio.sleep(1.0)
    await asyncio.sleep(2.0)
    for task in tasks:
        task.cancel()
    return delays


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("--viewers", type=int, default=50)
    parser.add_argument("--seconds", type=int, default=20)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "run"
        copy.mkdir()
        for name in ("config.toml", "metrics.jsonl"):
            shutil.copyfile(args.run_dir / name, copy / name)
        process, url = start_dashboard(copy)
        metrics = copy / "metrics.jsonl"
        last = json.loads(metrics.read_text().splitlines()[-1])
        delays = asyncio.run(
            measure(url, metrics, last, viewers=args.viewers, seconds=args.seconds)
        )
        process.send_signal(signal.SIGTERM)
        _, _, usage = os.wait4(process.pid, 0)
    delays.sort()
    cpu_s = usage.ru_utime + usage.ru_stime
    expected = args.viewers * args.seconds
    print(f"{len(delays)} of {expected} steps seen by {args.viewers} viewers")
    slow = delays[len(delays) * 95 // 100]
    print(f"delay: median {statistics.median(delays):.2f} s, 95 % {slow:.2f} s")
    print(f"CPU of the server: {cpu_s:.1f} s in {args.seconds} s, with its start")
    print(f"memory of the server: {usage.ru_maxrss / 1024:.0f} MiB at most")


if __name__ == "__main__":
    main()
