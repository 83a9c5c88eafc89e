"""What one controller carries: messages, journal and weights per unit, measured on this machine.

    python benchmarks/controller_costs.py --json costs.json

CPU time of the controller's own code: encoding and decoding of a request and its completion, and
groups that the journal has made durable. Weights: a copy within the memory of the host, which each
engine on it makes once per version, and a broadcast (weights.transport = "collective") to so many
processes on this host, from the first request until the last of them has verified the version.
docs/how-to/plan.md derives from them where one controller ends, and plan/controller_load.py the
load of a plan.
"""

import argparse
import asyncio
import json
import multiprocessing
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch

from millrace.cluster.messages import Generate, GenerateDone
from millrace.cluster.wire import Decoder, encode
from millrace.config import JournalConfig
from millrace.core.records import (
    Completion,
    Episode,
    Group,
    Request,
    Rollout,
    Sampling,
    Score,
    Task,
)
from millrace.journal import Journal, JournalHistory, Ledger
from millrace.weights.transport import make_receiver, make_sender

LENGTHS, PROMPT_TOKENS, GROUP_SIZE = (512, 8192), 256, 8
RECEIVERS, BROADCAST_BYTES = (1, 2, 4), 2**26


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results there, too")
    args = parser.parse_args()
    result: dict[str, Any] = {"messages": [], "journal": [], "broadcasts": []}
    for tokens in LENGTHS:
        seconds = message_s(tokens)
        result["messages"].append({"tokens": tokens, "cpu_s": seconds})
        print(f"request and completion of {tokens} tokens: {1e6 * seconds:.0f} us of CPU")
    for tokens in LENGTHS:
        seconds, cpu_s, size = asyncio.run(journal_s(tokens))
        row = {"tokens": tokens, "seconds": seconds, "cpu_s": cpu_s, "bytes_per_token": size}
        result["journal"].append(row)
        print(
            f"journal, group of {GROUP_SIZE} x {tokens} tokens: {1e3 * seconds:.1f} ms,"
            f" {1e3 * cpu_s:.1f} ms of CPU, {size:.1f} bytes per token"
        )
    result["copy_bytes_per_s"] = copy_rate()
    print(f"copy of weights: {result['copy_bytes_per_s'] / 1e9:.1f} GB/s")
    for count in RECEIVERS:
        seconds = broadcast_s(count)
        rate = BROADCAST_BYTES / seconds  # to each
        result["broadcasts"].append({"receivers": count, "seconds": seconds, "bytes_per_s": rate})
        print(f"broadcast to {count}: {1e3 * seconds:.0f} ms, {rate / 1e9:.2f} GB/s per receiver")
    if args.json is not None:
        args.json.write_text(json.dumps(result, indent=2) + "\n")


def message_s(tokens: int, count: int = 300) -> float:
    """CPU seconds of one request and its reply, at the controller's end."""
    prompt = np.zeros(PROMPT_TOKENS, np.int32)
    request = Request(id="1", prompt=prompt, sampling=Sampling())
    completion = Completion(
        tokens=np.arange(tokens, dtype=np.int32),
        logprobs=np.zeros(tokens, np.float32),
        versions=np.zeros(tokens, np.int32),
        finish="stop",
        text="word " * tokens,
    )
    reply = [bytes(frame) for frame in encode(GenerateDone(completions={0: completion}))]
    decoder = Decoder(GenerateDone)
    began_s = time.process_time()
    for _ in range(count):
        encode(Generate(request=request))
        decoder.decode(reply)
    return (time.process_time() - began_s) / count


async def journal_s(tokens: int, count: int = 60) -> tuple[float, float, float]:
    """Seconds and CPU seconds until a group is durable, and its bytes per sampled token."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        journal = Journal(
            folder,
            history=JournalHistory(ledger=Ledger.begin()),
            task_of=lambda number, draw: Task(prompt=str(number)),
            settings=JournalConfig(),
        )
        began_s, began_cpu_s = time.perf_counter(), time.process_time()
        for number in range(count):
            journal.issue_task(number, draw=None)
        await asyncio.gather(*(journal.admit_group(group(n, tokens)) for n in range(count)))
        seconds = (time.perf_counter() - began_s) / count
        cpu_s = (time.process_time() - began_cpu_s) / count
        await journal.close()
        return seconds, cpu_s, _size(folder) / (count * GROUP_SIZE * tokens)


def _size(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


def group(number: int, tokens: int) -> Group:
    rng, length = np.random.default_rng(number), PROMPT_TOKENS + tokens
    mask = np.arange(length) >= PROMPT_TOKENS
    rollouts = [
        Rollout(
            tokens=rng.integers(0, 150_000, length).astype(np.int32),
            mask=mask,
            engine_logprobs=np.where(mask, -rng.random(length), 0).astype(np.float32),
            versions=np.where(mask, 1, -1).astype(np.int32),
            sampling=Sampling(),
        )
        for _ in range(GROUP_SIZE)
    ]
    return Group(
        number=number,
        task=Task(prompt=str(number)),
        episodes=tuple(Episode(turns=(), rollouts=(rollout,)) for rollout in rollouts),
        scores=tuple(Score(total=0.0, parts={}) for _ in rollouts),
        advantages=np.zeros(GROUP_SIZE, np.float32),
    )


def copy_rate(num_bytes: int = 2**28) -> float:
    """Bytes per second."""
    source, target = np.ones(num_bytes, np.uint8), np.zeros(num_bytes, np.uint8)
    best_s = float("inf")
    for _ in range(5):
        began_s = time.perf_counter()
        np.copyto(target, source)
        best_s = min(best_s, time.perf_counter() - began_s)
    return num_bytes / best_s


def broadcast_s(num_receivers: int, num_versions: int = 9) -> float:
    """Median seconds of a version; the first one, for which the group is formed, does not count."""
    torch.set_num_threads(1)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["millrace.weights.transport"])  # which imports torch
    pipes: list[Connection] = []
    for _ in range(num_receivers):
        own, theirs = context.Pipe()
        context.Process(target=receive, args=(theirs,), daemon=True).start()
        pipes.append(own)
    for pipe in pipes:
        pipe.recv()  # it has started
    weights = {"weights": torch.ones(BROADCAST_BYTES // 4)}
    sender = make_sender("collective", dtype=torch.float32, num_engines=num_receivers)
    seconds: list[float] = []
    for version in range(num_versions + 1):
        update = sender.publish(version, weights)
        began_s = time.perf_counter()
        for pipe in pipes:
            pipe.send(update)
        for pipe in pipes:
            pipe.recv()
        seconds.append(time.perf_counter() - began_s)
        sender.release(version)
    for pipe in pipes:
        pipe.send(None)
    sender.close()
    return median(seconds[1:])


def receive(pipe: Connection) -> None:
    """Stage each update that arrives, until None."""
    torch.set_num_threads(1)
    receiver = make_receiver("collective")
    pipe.send(None)
    while (update := pipe.recv()) is not None:
        receiver.stage(update)
        pipe.send(None)
    receiver.close()


if __name__ == "__main__":
    main()
