"""What one client of `millrace serve` can do to the others: a real server on the CPU, a tiny model.

    python benchmarks/serving_load.py stalls     # /health while a client sends hostile requests
    python benchmarks/serving_load.py fairness   # small requests beside large ones
    python benchmarks/serving_load.py clients    # 200 streams, most of which are cut off

`clients` ends with an error if the server still holds something when all clients have left:
requests, sequences or KV blocks in the engine, or 64 MiB more memory than before.
"""

import argparse
import asyncio
import contextlib
import gzip
import http.client
import json
import random
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import psutil
from transformers import AutoTokenizer

from millrace.bench.workloads import make_long_tailed_model

MANY = 100_000
JSON = {"Content-Type": "application/json"}
CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "12"}]}
# Its reply has 640,000 logprobs.
LARGE_REPLY = {"prompt": [[2, 3] * 240] * 64, "max_tokens": 0, "echo": True, "logprobs": 20}
MAX_GROWTH = 64 * 2**20  # bytes


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("part", choices=["stalls", "fairness", "clients"])
    seconds = "for each kind of request, or until the first one is answered (5)"
    parser.add_argument("--seconds", type=float, default=5.0, help=seconds)
    parser.add_argument("--clients", type=int, default=200, help="streams at a time (200)")
    rounds = "streams of each client, or small requests of each kind (5)"
    parser.add_argument("--rounds", type=int, default=5, help=rounds)
    parser.add_argument("--json", metavar="FILE", help="write the result here")
    args = parser.parse_args()
    with (
        tempfile.TemporaryDirectory(prefix="millrace-serving-") as folder,
        served(folder) as server,
    ):
        part = {"stalls": stalls, "fairness": fairness, "clients": clients}[args.part]
        result = asyncio.run(part(server, args))
    print(json.dumps(result, indent=2))
    if args.json:
        Path(args.json).write_text(json.dumps(result))
    return 0


class Server:
    def __init__(self, process: subprocess.Popen[str], port: int) -> None:
        self.process = psutil.Process(process.pid)
        self.port = port
        self.url = f"http://127.0.0.1:{port}"

    def post(self, path: str, data: bytes, headers: dict[str, str]) -> int:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=300)
        connection.request("POST", path, body=data, headers=headers)
        response = connection.getresponse()
        response.read()
        return response.status

    async def gauges(self, client: aiohttp.ClientSession) -> dict[str, float]:
        async with client.get(f"{self.url}/metrics") as response:
            rows = re.findall(r"^millrace_(\w+)\S* (\S+)$", await response.text(), re.MULTILINE)
        return {name: float(value) for name, value in rows}

    def memory(self) -> dict[str, int]:
        """Bytes of the server and of its engine."""
        engine = max(self.process.children(recursive=True), key=lambda p: p.memory_info().rss)
        return {"server": self.process.memory_info().rss, "engine": engine.memory_info().rss}


@contextlib.contextmanager
def served(folder: str) -> Iterator[Server]:
    model = Path(folder) / "model"
    make_long_tailed_model(model, seed=0)
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    tokenizer.save_pretrained(model)
    options = [
        "--port",
        "0",
        "--name",
        "tiny",
        "--log-dir",
        f"{folder}/logs",
        "--cluster.threads=1",
    ]
    process = subprocess.Popen(
        [sys.executable, "-m", "millrace", "serve", str(model), *options],
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        found = re.search(r":(\d+)/v1", process.stdout.readline())
        assert found, "the server did not start"
        yield Server(process, int(found[1]))
    finally:
        process.terminate()
        process.wait(30)


def hostile_requests() -> dict[str, tuple[str, bytes, dict[str, str]]]:
    def row(body: dict[str, Any], path: str = "/v1/chat/completions"):
        return path, json.dumps(body).encode(), JSON

    schema = {"enum": [f"value {i}" for i in range(MANY)]}
    enum = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    bomb = gzip.compress(json.dumps({**CHAT, "user": " " * 200_000_000}).encode())
    return {
        "wrong list items": row({**CHAT, "messages": [0] * MANY}),
        "unknown fields": row({**CHAT, "stream_options": {str(i): 0 for i in range(MANY)}}),
        "enum": row({**CHAT, "response_format": enum}),
        "gzip bomb": ("/v1/chat/completions", bomb, {**JSON, "Content-Encoding": "gzip"}),
        "objects": row({**CHAT, "metadata": [{}] * 65_000, "seed": -1.5}),
        "strings": row({**CHAT, "metadata": ["ab"] * 65_000, "seed": -1.5}),
        "tokens": row({"model": "tiny", "prompt": [2] * 500_000}, "/v1/completions"),
        "wrong token": row({"model": "tiny", "prompt": [2] * 500_000 + [-1]}, "/v1/completions"),
        "long text": row({"model": "tiny", "prompt": "12ab" * 970_000}, "/v1/completions"),
        "large reply": row({"model": "tiny", **LARGE_REPLY}, "/v1/completions"),
        "long message": row({**CHAT, "messages": [{"role": "user", "content": "1" * 3_900_000}]}),
    }


async def stalls(server: Server, args: argparse.Namespace) -> dict[str, Any]:
    """Latencies of /health in ms, by kind of request that one client repeats meanwhile."""
    result: dict[str, Any] = {}
    async with aiohttp.ClientSession() as client:
        rest = ("", b"", {})
        kinds = {"nothing": rest, **hostile_requests(), "nothing, at the end": rest}
        for name, (path, data, headers) in kinds.items():
            statuses: list[int] = []

            async def attack(path=path, data=data, headers=headers, statuses=statuses) -> None:
                while path:
                    statuses.append(await asyncio.to_thread(server.post, path, data, headers))

            attacking = asyncio.create_task(attack())
            times: list[float] = []
            end_s = time.monotonic() + args.seconds
            while time.monotonic() < end_s or (path and not statuses):
                start_s = time.perf_counter()
                async with client.get(f"{server.url}/health") as response:
                    await response.read()
                times.append(1000 * (time.perf_counter() - start_s))
                await asyncio.sleep(0.005)
            attacking.cancel()
            await asyncio.gather(attacking, return_exceptions=True)
            result[name] = {
                **percentiles(times),
                "requests": len(statuses),
                "statuses": sorted(set(statuses)),
            }
    return result


async def fairness(server: Server, args: argparse.Namespace) -> dict[str, Any]:
    """Seconds of small requests alone and beside large ones, medians, and their ratios; and the
    ratio of the slowest request of several tokens, which may have waited for a whole large one."""
    long = {"prompt": [[2, 3 + i % 50] * 240 for i in range(256)]}
    large = {
        "256 prompts": {"prompt": ["12"] * 256, "max_tokens": 500},
        "2 prompts x 128": {"prompt": ["12", "34"], "n": 128, "max_tokens": 500},
        "long prompts": {**long, "max_tokens": 1},
        "long prompts, 30 tokens each": {**long, "max_tokens": 30},
        "scored prompts": {**long, "max_tokens": 0, "echo": True, "logprobs": 1},
        "large reply": LARGE_REPLY,
    }
    async with aiohttp.ClientSession() as client:

        async def complete(**body: Any) -> None:
            body = {"model": "tiny", **body}
            async with client.post(f"{server.url}/v1/completions", json=body) as response:
                assert response.status == 200, await response.text()
                await response.read()

        async def small_s() -> dict[int, list[float]]:
            """By number of tokens."""
            times: dict[int, list[float]] = {8: [], 32: [], 128: [], 1: []}
            for seed in range(args.rounds):
                for max_tokens in times:
                    start_s = time.perf_counter()
                    await complete(prompt="12a34", max_tokens=max_tokens, seed=seed, temperature=0)
                    times[max_tokens].append(time.perf_counter() - start_s)
            return times

        await complete(prompt="12", max_tokens=8)
        result: dict[str, Any] = {}
        for name, body in large.items():
            alone_s = medians(await small_s())

            async def repeat(body: dict[str, Any] = body) -> None:
                while True:
                    await complete(**body)

            asking = asyncio.create_task(repeat())
            await asyncio.sleep(1.0)
            times = await small_s()
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)
            await settled(server, client)
            beside_s = medians(times)
            ratio = {size: beside_s[size] / alone_s[size] for size in alone_s}
            slowest = max(max(times[size]) / alone_s[size] for size in alone_s if size > 1)
            print(f"{name}: {ratio}, slowest {slowest}", file=sys.stderr, flush=True)
            result[name] = {"alone_s": alone_s, "beside_s": beside_s, "ratio": ratio}
            result[name]["slowest_ratio"] = slowest
    return result


async def clients(server: Server, args: argparse.Namespace) -> dict[str, Any]:
    draw = random.Random(0)
    first_ms: list[float] = []
    gaps_ms: list[float] = []
    counts = {"whole": 0, "cut off": 0}
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector) as client:

        async def stream(number: int) -> None:
            leaves_after = draw.choice([0, 1, 3, 10, 30, 10**6])
            body = {"model": "tiny", "prompt": f"{number}a", "n": draw.choice([1, 1, 2, 4])}
            body |= {"max_tokens": 64, "stream": True}
            start_s, num_read = time.perf_counter(), 0
            async with client.post(f"{server.url}/v1/completions", json=body) as response:
                assert response.status == 200, await response.text()
                async for line in response.content:
                    if line.startswith(b"data: {"):
                        now_s = time.perf_counter()
                        (gaps_ms if num_read else first_ms).append(1000 * (now_s - start_s))
                        start_s, num_read = now_s, num_read + 1
                        if num_read > leaves_after:
                            counts["cut off"] += 1
                            response.close()
                            return
            counts["whole"] += 1

        async def one_client(number: int) -> None:
            for turn in range(args.rounds):
                await stream(number * args.rounds + turn)

        async def all_clients() -> None:
            await asyncio.gather(*(one_client(number) for number in range(args.clients)))
            await settled(server, client)

        await all_clients()  # buffers and caches reach their size
        before, fds = server.memory(), server.process.num_fds()
        free_blocks = (await server.gauges(client))["engine_free_blocks"]
        first_ms.clear(), gaps_ms.clear(), counts.update({"whole": 0, "cut off": 0})
        start_s = time.perf_counter()
        await all_clients()
        wall_s = time.perf_counter() - start_s
        after, gauges = server.memory(), await server.gauges(client)
        grown = {name: after[name] - before[name] for name in after}
    held = {name: gauges[name] for name in ("requests_running", "engine_running", "engine_waiting")}
    held["kv_blocks"] = free_blocks - gauges["engine_free_blocks"]
    if any(held.values()) or max(grown.values()) > MAX_GROWTH or gauges["engine_preemptions_total"]:
        raise SystemExit(f"The server leaks: {held}, memory {grown}, {gauges}.")
    return {
        "streams": counts,
        "wall_s": wall_s,
        "first_token_ms": percentiles(first_ms),
        "next_token_ms": percentiles(gaps_ms),
        "held": held,
        "memory_growth_bytes": grown,
        "file_descriptors": [fds, server.process.num_fds()],
    }


async def settled(server: Server, client: aiohttp.ClientSession) -> None:
    """Wait until the server has noticed that all clients have left."""
    names = ("requests_running", "engine_running", "engine_waiting")
    end_s = time.monotonic() + 60
    while True:
        gauges = await server.gauges(client)
        if not any(gauges[name] for name in names):
            return
        if time.monotonic() > end_s:
            raise SystemExit(f"The server still works for clients that have left: {gauges}.")
        await asyncio.sleep(0.1)


def medians(times: dict[int, list[float]]) -> dict[int, float]:
    return {size: statistics.median(each) for size, each in times.items()}


def percentiles(values: list[float]) -> dict[str, float]:
    ordered = sorted(values)
    shares = {"p50": 0.5, "p99": 0.99, "max": 1.0}
    found = {name: ordered[int(share * (len(ordered) - 1))] for name, share in shares.items()}
    return {**found, "count": len(ordered)}


if __name__ == "__main__":
    raise SystemExit(main())
