r"""Tenants of the training API of `millrace serve --train`: latencies, fairness and samples/s.

    python benchmarks/training_api_load.py                       # 32 tenants, CPU, a tiny model
    python benchmarks/training_api_load.py --unequal             # unequal passes
    python benchmarks/training_api_load.py --adapters 1 4 8 --model qwen3-1.7b --device cuda \
        --batch 4 --tokens 128 --rank 32 --seconds 20

Each tenant has a key and a model of its own, and repeats forward_backward and optim_step against a
real server. Without --adapters it also samples from its current weights. The command ends with an
error if a request fails. Jain's index of x is (sum x)^2 / (n sum x^2): 1 if all tenants get the
same number of tokens, 1 / n if one of them gets all.

With --unequal, tenants only train, each of them 16 models at once, and the passes of every fourth
tenant are four times as large. If passes of all tenants always wait (--tenants 8 --batch 8), the
fair share of each is the same, and x is what a tenant gets of it: served in the order of arrival,
some tenants would get four times as much as the others.
"""

import argparse
import asyncio
import contextlib
import json
import re
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import torch

from millrace.bench.workloads import make_model
from millrace.models.attention.packed import PACKED
from millrace.models.devices import resolve_device, resolve_dtype
from millrace.serving.tinker import protobuf

NUM_IDS = 16  # tokens of the data are below this


class LoadTenant:
    """One model of a key. `latencies`: seconds, by operation; `num_tokens`: since they were
    cleared."""

    def __init__(
        self, http: aiohttp.ClientSession, number: int, args: argparse.Namespace, *, scale: int = 1
    ) -> None:
        """`number`: of the key. `scale`: of the passes."""
        self._http, self._headers = http, {"X-API-Key": key_of(number)}
        self._rng, self._args = np.random.default_rng(number), args
        self.number, self._batch = number, scale * args.batch
        self.latencies: dict[str, list[float]] = defaultdict(list)
        self.num_tokens = self.num_samples = 0
        self._model, self._session, self._seq = "", "", 0

    async def _post(self, path: str, body: Any) -> Any:
        how: dict[str, Any] = {"json": body, "headers": self._headers}
        if isinstance(body, bytes):
            kind = {"Content-Type": "application/x-protobuf"}
            how = {"data": body, "headers": {**self._headers, **kind}}
        async with self._http.post(f"/api/v1/{path}", **how) as reply:
            is_json = reply.content_type == "application/json"
            result: Any = await (reply.json() if is_json else reply.read())
        if reply.status != 200 or (is_json and "error" in result):
            raise RuntimeError(f"{path}: {reply.status} {result}")
        return result

    async def _future(self, path: str, body: Any) -> Any:
        started = time.perf_counter()
        asked = {"request_id": (await self._post(path, body))["request_id"]}
        while True:
            result = await self._post("retrieve_future", asked)
            if isinstance(result, bytes) or result.get("type") != "try_again":
                self.latencies[path].append(time.perf_counter() - started)
                return result

    def _turn(self, **more: Any) -> dict[str, Any]:
        self._seq += 1
        return {"model_id": self._model, "seq_id": self._seq, **more}

    async def start(self) -> None:
        self._session = (await self._post("create_session", {}))["session_id"]
        body = {"session_id": self._session, "model_seq_id": 0, "base_model": "model"}
        created = await self._future(
            "create_model", {**body, "lora_config": {"rank": self._args.rank}}
        )
        self._model = created["model_id"]

    async def loop(self, until_s: float, *, samples: bool) -> None:
        while time.perf_counter() < until_s:
            # As the client does: the step is sent before the result of the pass is there.
            passed = asyncio.create_task(self._future("forward_backward", self._data()))
            await asyncio.sleep(0)
            step = self._turn(adam_params={"learning_rate": 1e-4})
            stepped = asyncio.create_task(self._future("optim_step", step))
            await asyncio.gather(passed, stepped)
            if time.perf_counter() > until_s:
                return
            self.num_samples += self._batch
            self.num_tokens += self._batch * self._args.tokens
            if samples:
                await self._sample()

    async def _sample(self) -> None:
        saved = await self._future("save_weights_for_sampler", self._turn())
        prompt = self._rng.integers(2, NUM_IDS, 16).tolist()
        body = {
            "sampling_session_id": saved["sampling_session_id"],
            "seq_id": 0,
            "prompt": {"chunks": [{"tokens": prompt}]},
            "sampling_params": {"max_tokens": 16},
        }
        sampled = protobuf.read(await self._future("asample", body))
        (sequence,) = protobuf.messages(sampled, 1)
        tokens = protobuf.message(protobuf.read(sequence), 2)
        self.num_tokens += len(prompt) + len(tokens) // 4

    def _data(self) -> bytes:
        """A ForwardBackwardRequest with random tokens."""
        turn = self._turn()
        data: list[tuple[int, Any]] = []
        for _ in range(self._batch):
            tokens = self._rng.integers(2, NUM_IDS, self._args.tokens + 1)
            chunk = protobuf.write([(1, tokens[:-1].astype("<i4").tobytes())])
            targets = protobuf.write([(1, tokens[1:].astype("<i8").tobytes()), (3, 2)])
            weights = np.ones(self._args.tokens, "<f4").tobytes()
            inputs = {"target_tokens": targets, "weights": protobuf.write([(1, weights), (3, 1)])}
            entries = [(2, protobuf.write([(1, n), (2, t)])) for n, t in inputs.items()]
            data.append((3, protobuf.write([(1, protobuf.write([(1, chunk)])), *entries])))
        head = [(1, turn["model_id"]), (2, turn["seq_id"])]
        return protobuf.write([*head, *data, (4, "cross_entropy")])


def key_of(number: int) -> str:
    return f"tml-{number}"


@contextlib.contextmanager
def served(folder: Path, *, num_keys: int, args: argparse.Namespace) -> Iterator[str]:
    device = resolve_device(args.device)
    dtype = resolve_dtype("auto", device)
    model, tokenizer = make_model(args.model, dtype=dtype, device=device, attention=PACKED)
    model.save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    del model
    torch.cuda.empty_cache()
    (folder / "keys").write_text("\n".join(map(key_of, range(num_keys))))
    command = [sys.executable, "-m", "millrace", "serve", str(folder / "model"), "--train"]
    command += ["--train-dir", str(folder / "states"), "--log-dir", str(folder / "logs")]
    command += ["--api-key-file", str(folder / "keys"), "--port", "0", "--name", "model"]
    command += ["--placement.engines", args.device, "--max-rate", "100000"]
    command += ["--engine.max_context", str(args.tokens + 1)]
    if device.type == "cpu":
        command += ["--cluster.threads=1"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        found = re.search(r"http://[^/]+", process.stdout.readline())
        assert found, "the server did not start"
        yield found[0]
    finally:
        process.terminate()
        process.wait(30)


async def measure(
    url: str, tenants: int, args: argparse.Namespace, *, samples: bool
) -> dict[str, Any]:
    limits = {"connector": aiohttp.TCPConnector(limit=0), "timeout": aiohttp.ClientTimeout(600)}
    async with aiohttp.ClientSession(url, **limits) as http:
        all_tenants = [
            LoadTenant(http, number, args, scale=4 if args.unequal and number % 4 == 0 else 1)
            for number in range(tenants)
            for _ in range(16 if args.unequal else 1)
        ]
        await asyncio.gather(*(tenant.start() for tenant in all_tenants))
        warm_until_s = time.perf_counter() + args.seconds / 4
        await asyncio.gather(
            *(tenant.loop(warm_until_s, samples=samples) for tenant in all_tenants)
        )
        for tenant in all_tenants:
            tenant.latencies.clear()
            tenant.num_tokens = tenant.num_samples = 0
        started = time.perf_counter()
        loops = (each.loop(started + args.seconds, samples=samples) for each in all_tenants)
        await asyncio.gather(*loops)
    latencies: dict[str, list[float]] = defaultdict(list)
    for tenant in all_tenants:
        for operation, own in tenant.latencies.items():
            latencies[operation] += own
    numbers = [tenant.number for tenant in all_tenants]
    tokens = np.bincount(numbers, [tenant.num_tokens for tenant in all_tenants])
    return {
        "tenants": tenants,
        "samples_per_s": round(sum(each.num_samples for each in all_tenants) / args.seconds, 2),
        "tokens_per_s": round(tokens.sum() / args.seconds, 1),
        "least_and_most": [round(float(x), 3) for x in np.sort(tokens / tokens.mean())[[0, -1]]],
        "jain": round(float(tokens.sum() ** 2 / (tenants * (tokens**2).sum())), 4),
        "latency_ms": {
            operation: {
                "p50": round(float(np.percentile(own, 50)) * 1e3, 1),
                "p95": round(float(np.percentile(own, 95)) * 1e3, 1),
                "requests": len(own),
            }
            for operation, own in sorted(latencies.items())
        },
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add = parser.add_argument
    add("--tenants", type=int, default=32, help="(32)")
    add("--adapters", type=int, nargs="+", help="only train, with these numbers of tenants")
    add("--unequal", action="store_true", help="only train, with passes of unequal sizes")
    add("--model", default="tiny", help="a shape of `millrace bench engine`, or a directory")
    add("--device", default="cpu", help="(cpu)")
    add("--seconds", type=float, default=60.0, help="of each measurement (60)")
    add("--batch", type=int, default=2, help="sequences of a forward_backward (2)")
    add("--tokens", type=int, default=32, help="of a sequence (32)")
    add("--rank", type=int, default=8, help="of the adapters (8)")
    add("--json", type=Path, metavar="FILE", help="write the rows here")
    args = parser.parse_args()
    counts = args.adapters or [args.tenants]
    rows: list[dict[str, Any]] = []
    with (
        tempfile.TemporaryDirectory(prefix="millrace-training-") as folder,
        served(Path(folder), num_keys=max(counts), args=args) as url,
    ):
        for count in counts:
            samples = args.adapters is None and not args.unequal
            rows.append(asyncio.run(measure(url, count, args, samples=samples)))
            print(json.dumps(rows[-1]), flush=True)
    if args.json:
        args.json.write_text(json.dumps(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
