"""Thousands of live episodes with tools: the lag of the controller's event loop, and throughput.

    python benchmarks/episodes.py --episodes 10000 --workers 0 2

Engines and tools are simulated: a reply takes --sample-s and a tool call --tool-s, each from half
to one and a half times that, and neither uses the CPU. Everything else is real: prompts are
rendered and tokenised, tool calls parsed, tokens recorded, and with workers all of it happens in
processes behind the run's socket. As soon as a group has finished, another one starts. The lag is
how much later than asked a sleep of 10 ms ends on the controller's event loop, while the episodes
are live.
"""

import argparse
import asyncio
import contextlib
import itertools
import json
import random
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from millrace.cluster.event_loop import run_on_own_loop
from millrace.cluster.fork_server import PRELOAD
from millrace.cluster.hub import Hub
from millrace.cluster.supervision.pool import WorkerPool
from millrace.config import load_config
from millrace.core.records import Completion, Request, Sampling, Task
from millrace.environments.function_environment import (
    EpisodeHost,
    FunctionEnvironment,
    LoadedEnvironment,
    play_in_thread,
)
from millrace.environments.rollouts.partial_rollouts import Attempt
from millrace.environments.rollouts.player import Player
from millrace.environments.rollouts.renderer import Renderer
from millrace.environments.threads import LoopThread
from millrace.run.environment import build_workers

THIS_FILE = Path(__file__).absolute()
GROUP_SIZE = 8
LAG_S = 0.01
TEMPLATE = (
    "{% if tools %}system: {{ tools | tojson }}\n{% endif %}{% for m in messages %}{{ m.role }}:"
    " {{ m.content }}\n{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
)
CALL = '<tool_call>\n{"name": "look", "arguments": {"key": "k%d"}}\n</tool_call>'


async def play(task: Any, agent: Any) -> float:
    """Call a tool in each turn; the task says how often and how long it takes."""

    async def look(key: str) -> str:
        """Wait for a service.

        Args:
            key: what to look for.
        """
        await asyncio.sleep(task.columns["tool_s"] * (0.5 + agent.rng.random()))
        return f"The value of {key} is {'x' * 200}."

    messages: list[Any] = [{"role": "user", "content": task.prompt}]
    for _ in range(task.columns["turns"]):
        reply = await agent.chat(messages, tools=[look])
        messages += [reply, *await agent.call_tools(reply)]
    return float(len(messages))


class SimulatedEngine:
    """Replies with a tool call after a while."""

    def __init__(self, tokenizer: Any, *, sample_s: float) -> None:
        self._sample_s = sample_s
        self._replies = [
            (CALL % i, np.array(tokenizer.encode(CALL % i), np.int32)) for i in range(10)
        ]
        self.num_turns = 0

    async def generate(
        self, request: Request, on_tokens: Any = None, on_completion: Any = None
    ) -> list[Completion]:
        text, tokens = self._replies[self.num_turns % 10]
        await asyncio.sleep(self._sample_s * (0.5 + random.random()))
        self.num_turns += 1
        return [
            Completion(
                tokens=tokens,
                logprobs=np.full(len(tokens), -0.5, np.float32),
                versions=np.zeros(len(tokens), np.int32),
                finish="length",
                text=text,
            )
        ]


def save_tokenizer(folder: Path) -> PreTrainedTokenizerFast:
    """A tokenizer with a token per ASCII character."""
    vocab = {chr(i) if i in (9, 10) or i >= 32 else f"<{i}>": i for i in range(128)}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="<0>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    made = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<1>", pad_token="<0>")
    made.chat_template = TEMPLATE
    made.save_pretrained(folder)
    (folder / "config.json").write_text('{"model_type": "qwen3"}')
    return made


@contextlib.asynccontextmanager
async def episode_host(
    num_workers: int, tokenizer: Any, folder: Path
) -> AsyncIterator[EpisodeHost]:
    if num_workers == 0:
        loaded = LoadedEnvironment(function=play, renderer=Renderer(tokenizer), others={})
        with LoopThread("environments") as thread:
            yield partial(play_in_thread, loaded, thread)
        return
    environment = {"function": f"{THIS_FILE}:play", "workers": num_workers}
    config = load_config({"model": str(folder), "environment": environment})
    async with (
        Hub(log_dir=folder / "logs", on_event=lambda *_: None, preload=PRELOAD) as hub,
        WorkerPool(hub.launch) as pool,
    ):
        workers = build_workers(
            config, None, worker_pool=pool, hub=hub, launcher=hub.local, private=folder
        )
        await workers.start()
        try:
            yield workers.play
        finally:
            await workers.close()


async def measure(num_workers: int, args: argparse.Namespace, folder: Path) -> dict[str, float]:
    tokenizer = save_tokenizer(folder)
    engine = SimulatedEngine(tokenizer, sample_s=args.sample_s)
    renderer = Renderer(tokenizer)
    columns = {"turns": args.turns, "tool_s": args.tool_s}
    numbers, num_finished = itertools.count(), 0

    async def keep_one_group_live(player: Player) -> None:
        nonlocal num_finished
        while True:
            number = next(numbers)
            task = Task(prompt=f"Look up the keys of task {number}.", columns=columns)
            await player.play_for_training(task, attempt=Attempt(number), group_size=GROUP_SIZE)
            num_finished += GROUP_SIZE

    async with episode_host(num_workers, tokenizer, folder) as host:
        player = Player(
            environment=FunctionEnvironment(host, renderer=renderer, tool_format="hermes"),
            engine=engine,  # pyright: ignore[reportArgumentType]
            renderer=renderer,
            sampling=Sampling(),
            max_context=16384,
            seed=0,
        )
        lanes = [
            asyncio.create_task(keep_one_group_live(player))
            for _ in range(args.episodes // GROUP_SIZE)
        ]
        await asyncio.sleep(args.warm_up_s)
        before, turns_before, start_s = num_finished, engine.num_turns, time.monotonic()
        processes = [psutil.Process(), *psutil.Process().children(recursive=True)]
        cpu_before_s = [sum(process.cpu_times()[:2]) for process in processes]
        lags = await measured_lags(args.measure_s)
        seconds = time.monotonic() - start_s
        cpu_s = [
            sum(process.cpu_times()[:2]) - before_s
            for process, before_s in zip(processes, cpu_before_s, strict=True)
        ]
        memory = [process.memory_full_info().uss / 2**20 for process in processes]
        failed = [lane for lane in lanes if lane.done()]
        for lane in lanes:
            lane.cancel()
        await asyncio.gather(*lanes, return_exceptions=True)
        for lane in failed:
            lane.result()
    return {
        "workers": num_workers,
        "episodes": args.episodes,
        "lag_p50_ms": float(np.percentile(lags, 50)),
        "lag_p99_ms": float(np.percentile(lags, 99)),
        "lag_max_ms": float(np.max(lags)),
        "episodes_per_s": (num_finished - before) / seconds,
        "turns_per_s": (engine.num_turns - turns_before) / seconds,
        "controller_cpu": cpu_s[0] / seconds,
        "other_cpu": sum(cpu_s[1:]) / seconds,
        "controller_mib": memory[0],
        "other_mib": sum(memory[1:]),
    }


async def measured_lags(seconds: float) -> list[float]:
    """Milliseconds by which sleeps on this event loop end too late."""
    lags: list[float] = []
    end_s = time.monotonic() + seconds
    while (begin_s := time.monotonic()) < end_s:
        await asyncio.sleep(LAG_S)
        lags.append(1000 * (time.monotonic() - begin_s - LAG_S))
    return lags


def table(rows: Sequence[dict[str, float]]) -> str:
    heads = "workers | lag p50 | p99 | max | episodes/s | turns/s | controller | workers"
    lines = [f"| {heads} |", "|" + "---:|" * 8]
    for row in rows:
        used = (
            f"{row[f'{part}_cpu']:.2f} cores, {row[f'{part}_mib']:,.0f} MiB"
            for part in ("controller", "other")
        )
        lag = (f"{row[f'lag_{name}_ms']:,.1f} ms" for name in ("p50", "p99", "max"))
        rates = (f"{row['episodes_per_s']:,.0f}", f"{row['turns_per_s']:,.0f}")
        number = f"{row['workers']:.0f}"
        lines.append(f"| {' | '.join([number, *lag, *rates, *used])} |")
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add = parser.add_argument
    add("--episodes", type=int, default=10_000, help="live at a time (default: 10000)")
    add("--workers", type=int, nargs="+", default=[0, 2], help="numbers to compare (default: 0 2)")
    add("--turns", type=int, default=4, help="of an episode (default: 4)")
    add("--sample-s", type=float, default=15.0, help="of a reply (default: 15)")
    add("--tool-s", type=float, default=5.0, help="of a tool call (default: 5)")
    add("--warm-up-s", type=float, default=60.0, help="before the measurement (default: 60)")
    add("--measure-s", type=float, default=60.0, help="(default: 60)")
    add("--json", type=Path)
    args = parser.parse_args(argv)
    rows: list[dict[str, float]] = []
    for num_workers in args.workers:
        with tempfile.TemporaryDirectory() as folder:
            made = run_on_own_loop(lambda n=num_workers, f=folder: measure(n, args, Path(f)))
        rows.append(made)
        print(table(rows[-1:]), flush=True)
    print(table(rows))
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
