"""`millrace bench sync`: what new weights cost, per transport, while an engine decodes.

A trainer's process changes its weights and publishes them every second; real engine processes
decode all the while. From the trainer's call to the moment the last engine holds the version is
publish to visible; the gap is the time between two forward passes that the swap took; the stall is
what the call cost the trainer. The floor is one copy of the same bytes, measured here.
"""

import argparse
import asyncio
import contextlib
import itertools
import json
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, PreTrainedConfig, Qwen3Config

from millrace.bench.shapes import shapes
from millrace.cluster.hub import Hub, Worker
from millrace.cluster.messages import (
    Message,
    Progress,
    Published,
    Release,
    StartEngine,
    StartTrainer,
    Step,
    Stepped,
    Swap,
    Swapped,
)
from millrace.config import RunConfig
from millrace.core.microbatch import Batch
from millrace.core.records import Request, Sampling
from millrace.core.weight_update import WeightUpdate
from millrace.demo.model import EOS_ID, PAD_ID, build_tokenizer
from millrace.engines.pool import EnginePool, RemoteEngine
from millrace.models.loading import resolve_device, without_progress_bars

WARM_UP = 2  # versions that do not count
PERIOD_S = 1.0
NEW_TOKENS = 128


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="millrace bench sync",
        description="Publish to visible, decode gap and trainer stall, per weight transport.",
    )
    parser.add_argument("--parameters", type=float, default=100e6, help="of the model (100e6)")
    parser.add_argument("--model", choices=shapes(), help="a known shape instead")
    parser.add_argument("--transports", nargs="+", help="default: those that work on the device")
    parser.add_argument("--payload", choices=["full", "delta"], default="full")
    parser.add_argument("--engines", type=int, default=1)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], help="of the engines")
    parser.add_argument("--versions", type=int, default=10, help="published, per transport (10)")
    parser.add_argument("--sequences", type=int, help="decoded together (256; on a CPU 4)")
    parser.add_argument("--threads", type=int, default=1, help="of each process on a CPU (1)")
    parser.add_argument("--json", metavar="FILE", help="write the rows here")
    args = parser.parse_args(argv)
    on_gpu = resolve_device(args.device).type == "cuda"
    args.dtype = args.dtype or ("bfloat16" if on_gpu else "float32")
    args.sequences = args.sequences or (256 if on_gpu else 4)
    transports = args.transports or (["ipc", "shm"] if on_gpu else ["shm", "disk", "collective"])
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="millrace-bench-") as scratch:
        model = Path(scratch) / "model"
        make_model(model, shapes()[args.model] if args.model else shape_of(args.parameters))
        for transport in transports:
            config = settings(args, model=model, transport=transport)
            row = asyncio.run(measure(config, num_versions=args.versions, scratch=Path(scratch)))
            row["floor_ms"] = copy_ms(row["bytes"], device=args.device)
            print(_line(row), flush=True)
            rows.append(row)
    if args.json:
        Path(args.json).write_text(json.dumps(rows, indent=2) + "\n")
    return 0


def shape_of(num_parameters: float) -> Qwen3Config:
    """A model of about that many."""
    hidden = 1024 if num_parameters < 1e9 else 2048
    per_layer = 14 * hidden**2  # attention 4, MLP 3 x 3 1/3
    return Qwen3Config(
        vocab_size=2048,
        hidden_size=hidden,
        intermediate_size=hidden * 10 // 3,
        num_hidden_layers=max(1, round((num_parameters - 2048 * hidden) / per_layer)),
        num_attention_heads=hidden // 64,
        num_key_value_heads=hidden // 64,
        head_dim=64,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
    )


def make_model(directory: Path, shape: PreTrainedConfig) -> None:
    shape.eos_token_id, shape.pad_token_id, shape.bos_token_id = EOS_ID, PAD_ID, None
    torch.manual_seed(0)
    with without_progress_bars():
        AutoModelForCausalLM.from_config(shape).save_pretrained(directory)
    build_tokenizer().save_pretrained(directory)


def settings(args: argparse.Namespace, *, model: Path, transport: str) -> RunConfig:
    return RunConfig.model_validate(
        {
            "model": str(model),
            "run_dir": str(model.parent / "run"),
            "engine": {
                "count": args.engines,
                "device": args.device,
                "dtype": args.dtype,
                "threads": args.threads,
                "max_sequences": args.sequences,
                "max_context": 2 * NEW_TOKENS,
            },
            "trainer": {"device": args.device, "threads": args.threads},
            "weights": {"transport": transport, "payload": args.payload},
        }
    )


async def measure(config: RunConfig, *, num_versions: int, scratch: Path) -> dict[str, Any]:
    bench = Bench(config)
    async with Hub(log_dir=scratch / "logs", on_event=bench.heard) as hub:
        await bench.start(hub)
        async with bench.decoding():
            alone = await bench.rate(asyncio.sleep(num_versions * PERIOD_S))
            for _ in range(WARM_UP):
                await bench.publish()
            bench.forget()
            publishing = await bench.rate(bench.publish_regularly(num_versions))
    return {
        "transport": config.weights.transport,
        "payload": config.weights.payload,
        "bytes": bench.num_bytes,
        "publish_to_visible_ms_p50": float(np.percentile(bench.visible_ms, 50)),
        "decode_gap_ms_p50": float(np.percentile(bench.gap_ms, 50)),
        "decode_gap_ms_p99": float(np.percentile(bench.gap_ms, 99)),
        "trainer_stall_ms_p50": float(np.percentile(bench.stall_ms, 50)),
        "stage_ms_p50": float(np.percentile(bench.stage_ms, 50)),
        "tokens_per_s": alone,
        "tokens_per_s_publishing": publishing,
        "engines": config.engine.count,
        "versions": num_versions,
        "device": config.engine.device,
        "dtype": config.engine.dtype,
    }


class Bench:
    """The processes of one measurement, and what they reported. Lives on one event loop."""

    def __init__(self, config: RunConfig) -> None:
        self._config = config
        self._version = 0
        self._published: asyncio.Queue[WeightUpdate] = asyncio.Queue()
        self._tokens: dict[str, float] = {}  # generated so far, by engine
        self._all_decode = asyncio.Event()
        self.num_bytes = 0
        self.forget()

    def forget(self) -> None:
        """Measure from here."""
        self.visible_ms: list[float] = []
        self.stall_ms: list[float] = []
        self.stage_ms: list[float] = []
        self.gap_ms: list[float] = []

    def heard(self, worker: str, message: Message) -> None:
        if isinstance(message, Progress):
            self._tokens[worker] = message.counters["generated_tokens"]
            if len(self._tokens) == self._config.engine.count and all(self._tokens.values()):
                self._all_decode.set()
        elif isinstance(message, Published):
            self._published.put_nowait(message.update)

    async def start(self, hub: Hub) -> None:
        plain = self._config.model_dump(mode="json")
        names = [f"engine-{i}" for i in range(self._config.engine.count)]
        self._engines = [await hub.launch(name, "millrace.workers.engine") for name in names]
        self._trainer: Worker = await hub.launch("trainer", "millrace.bench.publishing")
        start = StartEngine(config=plain, model_path=self._config.model.path, version=0)
        await asyncio.gather(
            self._trainer.call(StartTrainer(config=plain, checkpoint=None)),
            *(engine.call(start) for engine in self._engines),
        )

    @contextlib.asynccontextmanager
    async def decoding(self) -> AsyncIterator[None]:
        """Within it the engines always have sequences to decode."""
        pool = EnginePool([RemoteEngine(engine) for engine in self._engines])
        num_sequences = self._config.engine.max_sequences * len(self._engines)
        async with asyncio.TaskGroup() as feeding:
            feeders = [feeding.create_task(_feed(pool, number)) for number in range(num_sequences)]
            await self._all_decode.wait()
            yield
            for feeder in feeders:
                feeder.cancel()

    async def rate(self, activity: Awaitable[None]) -> float:
        """Tokens per second of all engines while it lasts."""
        started_s, before = time.monotonic(), sum(self._tokens.values())
        await activity
        return (sum(self._tokens.values()) - before) / (time.monotonic() - started_s)

    async def publish_regularly(self, num_versions: int) -> None:
        for _ in range(num_versions):
            next_s = time.monotonic() + PERIOD_S
            await self.publish()
            await asyncio.sleep(max(0.0, next_s - time.monotonic()))

    async def publish(self) -> None:
        """One version, until every engine holds it."""
        self._version += 1
        nothing = Batch(microbatches=(), num_sequences=0, num_trained_tokens=0)
        stepped = await self._trainer.call(Step(batch=nothing, version=self._version))
        assert isinstance(stepped, Stepped)
        update = await self._published.get()
        self.num_bytes = update.num_bytes
        swaps = await asyncio.gather(*(e.call(Swap(update=update)) for e in self._engines))
        visible_s = time.monotonic()
        await self._trainer.call(Release(version=update.version))
        self.visible_ms.append((visible_s - stepped.metrics["started_s"]) * 1000)
        self.stall_ms.append(stepped.metrics["stall_ms"])
        for swapped in swaps:
            assert isinstance(swapped, Swapped)
            self.stage_ms.append(swapped.stage_ms)
            self.gap_ms.append(swapped.gap_ms)


async def _feed(pool: EnginePool, number: int) -> None:
    prompt = np.arange(2, 10, dtype=np.int32)
    sampling = Sampling(max_new_tokens=NEW_TOKENS)
    for turn in itertools.count():
        await pool.generate(
            Request(id=f"{number}.{turn}", prompt=prompt, n=1, sampling=sampling, seed=number)
        )


def copy_ms(num_bytes: int, *, device: str) -> float:
    """The fastest of some copies of as many bytes, in the memory of the device."""
    source = torch.ones(num_bytes, dtype=torch.uint8, device=resolve_device(device))
    target = torch.empty_like(source)
    fastest_s = float("inf")
    for _ in range(5):
        started_s = time.perf_counter()
        target.copy_(source)
        if source.is_cuda:
            torch.cuda.synchronize()
        fastest_s = min(fastest_s, time.perf_counter() - started_s)
    return fastest_s * 1000


def _line(row: dict[str, Any]) -> str:
    return (
        f"{row['transport']:<11}{row['payload']:<6}{row['bytes'] / 1e6:8.0f} MB"
        f"  visible {row['publish_to_visible_ms_p50']:.1f} ms"
        f"  gap {row['decode_gap_ms_p50']:.1f} ms (p99 {row['decode_gap_ms_p99']:.1f})"
        f"  stall {row['trainer_stall_ms_p50']:.1f} ms  floor {row['floor_ms']:.1f} ms"
        f"  tokens/s {row['tokens_per_s_publishing']:.0f} of {row['tokens_per_s']:.0f}"
    )
