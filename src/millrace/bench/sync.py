"""`millrace bench sync`: what new weights cost, per transport, while an engine decodes.

A trainer's process changes its weights and publishes them every second; real engine processes
decode all the while, on a GPU through MPS as in a run. From the trainer's call to the moment the
last engine holds the version is publish to visible; the gap is the time between two forward passes
that the swap took; the stall is what the call cost the trainer. The floor is one copy of the same
bytes, measured here. "adapter" is a LoRA adapter on all linear layers that the engine applies as it
is, "merged" one that it merges.
"""

import argparse
import asyncio
import contextlib
import itertools
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from millrace.bench import bench_parser, write_result
from millrace.bench.workloads import chosen_device, copy_s, shape_named, shapes
from millrace.cluster import messages
from millrace.cluster.hub import Hub, Worker
from millrace.cluster.mps import below_normal, shared_gpu
from millrace.config import RunConfig, load_config
from millrace.core.microbatch import Batch
from millrace.core.records import Request, Sampling, WeightUpdate
from millrace.inference.pool import EnginePool
from millrace.inference.remote import RemoteEngine

WORKER = "millrace.bench.sync_workers"
WARM_UP = 2  # versions that are not measured
PERIOD_S = 1.0
NEW_TOKENS = 128
APPLIED = {"adapter": "unmerged", "merged": "merged"}  # lora.apply of these payloads
PAYLOADS = ("full", "delta", *APPLIED)


class Case(NamedTuple):
    transport: str
    payload: str  # one of PAYLOADS
    engines: int = 1


ON_CPU = (
    *(Case("shm", payload) for payload in ("full", *APPLIED)),
    Case("disk", "full"),
    Case("collective", "full", engines=2),
)
ON_GPU = tuple(Case("ipc", payload) for payload in ("full", *APPLIED))


def main(argv: Sequence[str] | None = None) -> int:
    parser = bench_parser("sync", on_device=True)
    parser.add_argument(
        "--model", help=f"{', '.join(shapes())} or a number of parameters (qwen3-1.7b; CPU 100e6)"
    )
    parser.add_argument("--transports", nargs="+", help="default: what the device is measured by")
    parser.add_argument("--payloads", nargs="+", choices=PAYLOADS)
    parser.add_argument("--engines", type=int, help="of each measurement")
    parser.add_argument("--rank", type=int, default=32, help="of the adapter (32)")
    parser.add_argument("--versions", type=int, default=10, help="published, per row (10)")
    parser.add_argument("--sequences", type=int, help="decoded together (256; on a CPU 4)")
    parser.add_argument("--threads", type=int, default=1, help="of each process on a CPU (1)")
    parser.add_argument("--quantization", choices=["fp8"], help="of the engines' layers")
    args = parser.parse_args(argv)
    device, dtype = chosen_device(args)
    on_gpu = device.type == "cuda"
    args.model = args.model or ("qwen3-1.7b" if on_gpu else "100e6")
    args.dtype = str(dtype).removeprefix("torch.")
    args.sequences = args.sequences or (256 if on_gpu else 4)
    shape_named(args.model)  # fail on a typo before any process starts
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="millrace-bench-") as scratch:
        for case in cases(args, on_gpu=on_gpu):
            config = settings(args, case, scratch=Path(scratch))
            row = asyncio.run(measure(case, config, num_versions=args.versions, device=device))
            rows.append(row)
            print(_line(row), flush=True)
    write_result(rows, args.json)
    return 0


def cases(args: argparse.Namespace, *, on_gpu: bool) -> list[Case]:
    usual = ON_GPU if on_gpu else ON_CPU
    if args.transports is args.payloads is args.engines is None:
        return [*usual]
    transports = args.transports or list(dict.fromkeys(case.transport for case in usual))
    pairs = itertools.product(transports, args.payloads or ["full"])
    return [Case(*pair, engines=args.engines or 1) for pair in pairs]


def settings(args: argparse.Namespace, case: Case, *, scratch: Path) -> RunConfig:
    apply = APPLIED.get(case.payload)
    lora = None if apply is None else {"rank": args.rank, "apply": apply}
    options = {} if args.quantization is None else {"quantization": args.quantization}
    overrides = {
        "model": args.model,
        "run_dir": str(scratch / "run"),
        "engine.count": case.engines,
        "engine.dtype": args.dtype,
        "engine.max_sequences": args.sequences,
        "engine.max_context": 2 * NEW_TOKENS,
        "engine.options": options,
        "cluster.threads": args.threads,
        "placement": {"trainer": args.device, "engines": args.device},
        "lora": lora,
        "weights.transport": case.transport,
        "weights.payload": case.payload if lora is None else "full",
    }
    return load_config(overrides=overrides)


async def measure(
    case: Case, config: RunConfig, *, num_versions: int, device: torch.device
) -> dict[str, Any]:
    def say(what: str) -> None:
        print(f"{case.transport}, {case.payload}: {what}", file=sys.stderr, flush=True)

    bench, logs = Bench(config), Path(config.run_dir).parent / "logs"
    async with (
        shared_gpu(
            config.cluster.share_gpu,
            num_cuda_workers=config.engine.num_local + 1 if device.type == "cuda" else 0,
            log=logs / "mps.log",
            warn=say,
        ) as env,
        Hub(log_dir=logs, on_event=bench.on_event) as hub,
    ):
        say(f"starting {config.engine.num_local} engines and a trainer of {config.model.path}")
        await bench.start(hub, env=env)
        say("warming up")
        async with bench.decoding():
            await bench.publish(WARM_UP)
            bench.times.clear()
            say(f"decoding alone for {num_versions * PERIOD_S:g} s")
            alone = await bench.rate(asyncio.sleep(num_versions * PERIOD_S))
            say(f"publishing {num_versions} versions, one each {PERIOD_S:g} s")
            publishing = await bench.rate(bench.publish(num_versions, period_s=PERIOD_S))
    # The floor: one copy of the same bytes, and the tokens per second that remain if every period
    # loses the time of that copy.
    floor_s = copy_s(bench.num_bytes, device=device, repeats=5)
    return {
        "transport": case.transport,
        "payload": case.payload,
        "bytes": bench.num_bytes,
        **{f"{name}_p50": float(np.median(times)) for name, times in bench.times.items()},
        "decode_gap_ms_p99": float(np.percentile(bench.times["decode_gap_ms"], 99)),
        "tokens_per_s": alone,
        "tokens_per_s_publishing": publishing,
        "engines": config.engine.num_local,
        "versions": num_versions,
        "model": config.model.path,
        "device": config.placement.engine(0),
        "dtype": config.engine.dtype,
        "quantization": config.engine.options.get("quantization"),
        "floor_ms": floor_s * 1000,
        "tokens_share": publishing / alone,
        "tokens_share_minus_copy": publishing / (alone * (1 - floor_s / PERIOD_S)),
    }


class Bench:
    """The processes of one measurement and their reports. Used on one event loop."""

    def __init__(self, config: RunConfig) -> None:
        self._config = config
        self._version = 0
        self._published: asyncio.Queue[WeightUpdate] = asyncio.Queue()
        self._tokens: dict[str, float] = {}  # generated so far, by engine
        self._all_decode = asyncio.Event()
        self.num_bytes = 0
        self.times: dict[str, list[float]] = defaultdict(list)  # by name, in milliseconds

    def on_event(self, worker: str, message: messages.Message) -> None:
        if isinstance(message, messages.WorkerProgress):
            self._tokens[worker] = message.counters["generated_tokens"]
            if len(self._tokens) == self._config.engine.num_local and all(self._tokens.values()):
                self._all_decode.set()
        elif isinstance(message, messages.Published):
            self._published.put_nowait(message.update)

    async def start(self, hub: Hub, *, env: Mapping[str, str]) -> None:
        """`env`: environment of the processes that use a GPU."""
        plain = self._config.model_dump(mode="json")
        names = [f"engine-{i}" for i in range(self._config.engine.num_local)]
        self._engines = [await hub.launch(name, WORKER, env=env) for name in names]
        self._trainer: Worker = await hub.launch("trainer", WORKER, env=below_normal(env))
        start = messages.StartEngine(config=plain, model_path=self._config.model.path, version=0)
        await asyncio.gather(
            self._trainer.call(messages.StartTrainer(config=plain, checkpoint=None)),
            *(engine.call(start) for engine in self._engines),
        )

    @contextlib.asynccontextmanager
    async def decoding(self) -> AsyncIterator[None]:
        """While the context is open, the engines always have sequences to decode."""
        pool = EnginePool([RemoteEngine(engine) for engine in self._engines])
        num_sequences = self._config.engine.max_sequences * len(self._engines)
        async with asyncio.TaskGroup() as feeding:
            feeders = [feeding.create_task(_feed(pool, number)) for number in range(num_sequences)]
            await self._all_decode.wait()
            yield
            for feeder in feeders:
                feeder.cancel()

    async def rate(self, activity: Awaitable[None]) -> float:
        started_s, before = time.monotonic(), sum(self._tokens.values())
        await activity
        return (sum(self._tokens.values()) - before) / (time.monotonic() - started_s)

    async def publish(self, num_versions: int, *, period_s: float = 0.0) -> None:
        for _ in range(num_versions):
            next_s = time.monotonic() + period_s
            await self._publish()
            await asyncio.sleep(max(0.0, next_s - time.monotonic()))

    async def _publish(self) -> None:
        """Publish one version and wait until every engine holds it."""
        self._version += 1
        nothing = Batch(microbatches=(), num_sequences=0, num_trained_tokens=0)
        stepped = await self._trainer.call(messages.TrainStep(batch=nothing, version=self._version))
        assert isinstance(stepped, messages.Stepped)
        update = await self._published.get()
        ready_s = time.monotonic()
        self.num_bytes, swap = update.num_bytes, messages.SwapWeights(update=update)
        swaps = await asyncio.gather(*(engine.call(swap) for engine in self._engines))
        visible_s = time.monotonic()
        await self._trainer.call(messages.Release(version=update.version))
        started_s = stepped.metrics["started_s"]
        self.times["publish_to_ready_ms"].append((ready_s - started_s) * 1000)
        self.times["publish_to_visible_ms"].append((visible_s - started_s) * 1000)
        self.times["trainer_stall_ms"].append(stepped.metrics["stall_ms"])
        for swapped in swaps:
            assert isinstance(swapped, messages.Swapped)
            self.times["stage_ms"].append(swapped.stage_ms)
            self.times["decode_gap_ms"].append(swapped.gap_ms)


async def _feed(pool: EnginePool, number: int) -> None:
    prompt, sampling = np.arange(2, 10, dtype=np.int32), Sampling(max_new_tokens=NEW_TOKENS)
    for turn in itertools.count():
        id = f"{number}.{turn}"
        await pool.generate(Request(id=id, prompt=prompt, sampling=sampling, seed=number))


def _line(row: dict[str, Any]) -> str:
    return (
        f"{row['transport']:<11}{row['payload']:<8}{row['bytes'] / 1e6:7.0f} MB"
        f"  visible {row['publish_to_visible_ms_p50']:.1f} ms"
        f"  gap {row['decode_gap_ms_p50']:.1f} ms (p99 {row['decode_gap_ms_p99']:.1f})"
        f"  stall {row['trainer_stall_ms_p50']:.1f} ms  floor {row['floor_ms']:.1f} ms"
        f"  tokens/s {row['tokens_per_s_publishing']:.0f} of {row['tokens_per_s']:.0f}"
        f" ({row['tokens_share_minus_copy']:.0%} minus the copy)"
    )
