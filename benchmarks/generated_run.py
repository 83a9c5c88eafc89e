"""Writes the run directory of a long run without running it, to measure whatever reads one.

    python benchmarks/generated_run.py runs/synthetic --steps 10000 --spans 1000000

It has every file that a reader may open: settings, metrics, a trace, sampled tokens, times of
groups, a journal, a log and a summary. The second step has episodes with hostile text. The numbers
are made up from a fixed seed.
"""

import argparse
import json
import math
import random
import time
from contextlib import closing
from pathlib import Path
from typing import Any

from millrace.config import load_config
from millrace.core.spans import GroupLife, TurnLife
from millrace.journal.database import FORMAT_VERSION, open_writer
from millrace.monitoring.files.episodes import StepFiles, StepLife
from millrace.monitoring.files.metrics import MetricsLog
from millrace.monitoring.files.samples import SampledEpisode, SampledRollout
from millrace.monitoring.files.trace import TraceWriter
from millrace.monitoring.run_dir import RunDir

STEP_S = 2.0
START_S = 1_700_000_000.0
GROUPS, EPISODES, TOKENS = 8, 4, 48  # per step, per group, per sampled episode
WORDS = ("the", "model", "sorts", "digits", "and", "checks", "whether", "it", "is", "<b>", "4", "7")
HOSTILE = {
    "markup": "</script><script>document.title='owned'</script><img src=x onerror=alert(1)>",
    "escapes": "\x1b[31mred\x1b[0m \x1b]0;title\x07 \r\n\t\0",
    "direction": "\u202eright to left\u202c \u2066isolated\u2069 \u05e9\u05dc\u05d5\u05dd",
    "long line": "x" * 1_000_000,
    "unicode": "e\u0301\u0301\u0301 \U0001f469\u200d\U0001f467 \u2028 \ufffd",
}


def write_run(
    path: Path, *, steps: int = 10_000, spans: int = 1_000_000, finished: bool = True
) -> RunDir:
    """`finished=False`: killed in the middle of a row and of a span, without a summary."""
    run_dir = RunDir(path)
    run_dir.open(
        load_config({"model": "some/model", "run_dir": str(path), "trainer": {"steps": steps}})
    )
    write_metrics(run_dir, steps)
    write_trace(run_dir, spans, seconds=steps * STEP_S)
    write_step_files(run_dir, steps)
    write_journal(run_dir, steps)
    (run_dir.logs / "engine-0.log").write_text("loading the model\nready\n" * 50)
    (run_dir.checkpoints / f"step_{steps}").mkdir(exist_ok=True)
    if finished:
        run_dir.write_summary(
            {
                "accuracy_before": 0.17,
                "accuracy_after": 0.93,
                "seconds": steps * STEP_S,
                "samples_per_s": GROUPS * EPISODES / STEP_S,
                "tokens_per_s": 500.0,
                "episodes": steps * GROUPS * EPISODES,
                "steps": steps,
                "checkpoint": str(run_dir.checkpoints / f"step_{steps}"),
                "run_dir": str(path),
                "restarts": {},
            }
        )
    else:
        for file, cut in ((run_dir.metrics, '{"step": 4'), (run_dir.trace, ',\n{"name": "st')):
            with file.open("a") as unfinished:
                unfinished.write(cut)
    run_dir.close()
    return run_dir


def write_metrics(run_dir: RunDir, steps: int) -> None:
    log = MetricsLog(run_dir.metrics)
    log.close()
    with run_dir.metrics.open("a") as file:
        file.writelines(json.dumps(metrics_row(n, steps)) + "\n" for n in range(1, steps + 1))


def metrics_row(step: int, steps: int) -> dict[str, Any]:
    noise = random.Random(step).gauss(0, 0.02)
    progress = 1 / (1 + math.exp(-10 * (step / steps - 0.4)))
    reward = 0.15 + 0.75 * progress + noise
    row: dict[str, Any] = {
        "step": step,
        "version": step,
        "time_s": step * STEP_S,
        "reward/mean": reward,
        "reward/std": 0.3 - 0.2 * progress,
        "rewards/exact/mean": reward,
        "loss": 0.01 * noise,
        "entropy": 1.6 - 1.2 * progress + noise,
        "grad_norm": 0.4 + noise,
        "learning_rate": 1e-5,
        "ratio/mean": 1 + noise / 50,
        "ratio/max": 1.2 + abs(noise),
        "ratio/min": 0.8 - abs(noise),
        "ratio/effective_sample_size": 0.98,
        "mismatch/kl_k3": 1e-4 * (1 + abs(noise)),
        "mismatch/logprob": 0.004,
        "staleness/mean": 1.1 + noise,
        "staleness/max": 2,
        "staleness/share/0": 0.3,
        "staleness/share/1": 0.5,
        "staleness/share/2": 0.2,
        "throughput/samples_per_s": GROUPS * EPISODES / STEP_S + 10 * noise,
        "throughput/tokens_per_s": 500.0 + 1000 * noise,
        "throughput/samples": GROUPS * EPISODES * step,
        "throughput/tokens": 1000 * step,
        "throughput/time_s": step * STEP_S,
        "busy/engine": 0.9 + noise,
        "busy/trainer": 0.5 + noise,
        "waiting/engine-0/buffer_full": 0.1,
        "waiting/trainer/generation": 0.5,
        "buffer/depth": 5 + step % 7,
        "buffer/wait_s": 0.8,
        "groups/running": 12,
        "dropped/zero_variance": step // 5,
        "tokens/wasted/zero_variance": 40 * (step // 5),
        "batch/trained_tokens": 1000,
    }
    if step % 100 == 0:
        row |= {"eval/accuracy": reward, "eval/step": step}
    return row


def write_trace(run_dir: RunDir, spans: int, *, seconds: float) -> None:
    """Eight engines and a trainer in a rhythm; the first lines are those of a real writer."""
    workers = [*(f"engine-{index}" for index in range(8)), "trainer", "scorer-0"]
    TraceWriter(run_dir.trace, start_s=START_S).close()
    head = run_dir.trace.read_text().rstrip().removesuffix("]").rstrip()
    names = {
        "engine": ("generate", "swap", "buffer full"),
        "trainer": ("step", "publish", "generation"),
    }
    per_worker = spans // len(workers)
    length_us = 1e6 * seconds / max(1, per_worker)
    with run_dir.trace.open("w") as file:
        file.write(head)
        for track, worker in enumerate(workers, start=1):
            event = {"ph": "M", "pid": 1, "tid": track, "name": "thread_name"}
            file.write(",\n" + json.dumps({**event, "args": {"name": worker}}))
            own = names.get(worker.split("-")[0], ("score", "score", "no work"))
            lines: list[str] = []
            for index in range(per_worker):
                is_busy = index % 3 < 2
                name = own[index % 3]
                args = '"count":1' if is_busy else f'"count":1,"reason":"{name}"'
                kind = "busy" if is_busy else "waiting"
                shown = name if is_busy else f"waiting: {name}"
                colour = "thread_state_running" if is_busy else "grey"
                lines.append(
                    f',\n{{"name":"{shown}","cat":"{kind}","ph":"X","ts":{index * length_us:.1f},'
                    f'"dur":{length_us:.1f},"pid":1,"tid":{track},"cname":"{colour}",'
                    f'"args":{{{args}}}}}'
                )
            file.writelines(lines)


def write_step_files(run_dir: RunDir, steps: int) -> None:
    samples, lives = StepFiles(run_dir.rollouts), StepFiles(run_dir.lifecycle)
    for step in range(1, steps + 1):
        texts = list(HOSTILE.values()) if step == 2 else [None, None]
        samples.write(step, [episode(step, index, text) for index, text in enumerate(texts)])
        lives.write(step, [life(step)])


def episode(step: int, index: int, text: str | None) -> SampledEpisode:
    rng = random.Random(1000 * step + index)
    prompt = ["sort", " 4", "7", "9", " ="]
    words = [f" {rng.choice(WORDS)}" for _ in range(TOKENS)] if text is None else [text]
    count = len(prompt) + len(words)
    trained = [0] * len(prompt) + [1] * len(words)
    if text is None:  # an environment speaks in between
        for place in range(count // 2, count // 2 + 6):
            trained[place] = 0
    first, last = max(0, step - 3), max(0, step - 1)
    logprobs = [-rng.expovariate(1.5) for _ in range(count)]

    def column(values: list[float]) -> list[float | None]:
        return [round(v, 6) if t else None for v, t in zip(values, trained, strict=True)]

    versions = [first + (last - first) * i // count for i in range(count)]
    rollout = SampledRollout(
        num_tokens=count,
        agent="",
        policy="policy",
        temperature=1.0,
        ids=[rng.randrange(30_000) for _ in range(count)],
        texts=[*prompt, *words],
        trained=trained,
        versions=[v if t else -1 for v, t in zip(versions, trained, strict=True)],
        engine_logprobs=[round(v, 6) if t else 0.0 for v, t in zip(logprobs, trained, strict=True)],
        trainer_logprobs=column([v + rng.gauss(0, 0.02) for v in logprobs]),
        entropies=column([rng.expovariate(1.0) for _ in range(count)]),
        advantages=column([0.5 - index] * count),
        kept=[rng.randrange(1, 40) if t else 0 for t in trained],
    )
    completion = "".join(words)
    return SampledEpisode(
        prompt="".join(prompt) if text is None else [{"role": "user", "content": text}],
        completion=completion,
        finish="stop",
        group=(step - 1) * GROUPS + index,
        score=float(index == 0),
        parts={"exact": float(index == 0), "style": None},
        advantage=0.5 - index,
        versions=[first, last],
        tokens=len(words),
        columns={"answer": "479"},
        step=step,
        episode=0,
        group_scores=[float(index == 0), 0.0, 1.0, 0.0],
        turns=[{"agent": "", "completion": completion, "finish": "stop"}],
        rollouts=[rollout],
    )


def life(step: int) -> StepLife:
    end_s = step * STEP_S
    groups = [group_life((step - 1) * GROUPS + n, step, end_s - 1) for n in range(GROUPS)]
    lost = []
    if step % 5 == 0:
        lost = [group_life(step * GROUPS, step, end_s - 1, outcome="expired", reason="generating")]
    return StepLife(
        step=step,
        begin_s=end_s - 1,
        end_s=end_s,
        unix_s=START_S + end_s,
        groups=groups,
        replayed=[],
        lost=lost,
    )


def group_life(
    number: int, step: int, ready_s: float, *, outcome: Any = "buffered", reason: str = ""
) -> GroupLife:
    rng = random.Random(number)
    start_s = max(0.0, ready_s - 3 - rng.random())
    turns: dict[int, list[TurnLife]] = {}
    for index in range(EPISODES):
        middle_s = start_s + 1 + rng.random() / 2
        turns[index] = [
            TurnLife(start_s, middle_s, 20, max(0, step - 3), max(0, step - 2)),
            TurnLife(middle_s + 0.3, middle_s + 0.8, 12, max(0, step - 2), max(0, step - 1)),
        ]
    generated_s = max(turn.end_s for own in turns.values() for turn in own)
    return GroupLife(
        number=number,
        tries=0,
        started_s=start_s,
        generated_s=generated_s,
        scored_s=generated_s + 0.1,
        ended_s=generated_s + 0.12,
        outcome=outcome,
        reason=reason,
        turns=turns,
        scores=[1.0, 0.0, 1.0, 0.0],
    )


def write_journal(run_dir: RunDir, steps: int) -> None:
    """All tasks are closed, except for a few of the next step."""
    closed: list[tuple[Any, ...]] = [
        (number, "trained", None, number // GROUPS + 1)
        if number % 97
        else (number, "dropped", "zero_variance", None)
        for number in range(steps * GROUPS)
    ]
    running = [(steps * GROUPS + index, "running", None, None) for index in range(GROUPS)]
    meta = {"format_version": FORMAT_VERSION, "position": len(closed), "covered_version": steps}
    with closing(open_writer(run_dir.journal)) as db:
        db.execute("BEGIN")
        db.executemany("INSERT INTO meta VALUES (?, ?)", meta.items())
        sql = "INSERT INTO tasks (number, status, reason, version) VALUES (?, ?, ?, ?)"
        db.executemany(sql, [*closed, *running])
        db.commit()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--spans", type=int, default=1_000_000)
    parser.add_argument("--killed", action="store_true", help="as a killed run leaves it")
    args = parser.parse_args()
    start_s = time.monotonic()
    write_run(args.run_dir, steps=args.steps, spans=args.spans, finished=not args.killed)
    num_bytes = sum(path.stat().st_size for path in args.run_dir.rglob("*") if path.is_file())
    print(f"{args.run_dir}: {num_bytes / 2**20:.0f} MiB in {time.monotonic() - start_s:.1f} s")


if __name__ == "__main__":
    main()
