"""`millrace demo`: create a model, warm it up, train it asynchronously, show what changed."""

import time
from pathlib import Path

from rich.console import Console
from rich.table import Table

from millrace.cluster.fork_server import shared_fork_server
from millrace.config import load_config
from millrace.core.records import Group
from millrace.demo.model import make_model
from millrace.monitoring.run_dir import RunDir
from millrace.run.train import RunResult, train

SETTINGS = Path(__file__).with_name("demo.toml")
SAMPLES_SHOWN = 6


def run_demo(run_dir: str | Path = "runs/demo", *, seed: int = 0) -> RunResult:
    """The whole demo; an earlier demo in `run_dir` is replaced."""
    start_s = time.monotonic()
    console = Console(highlight=False)
    directory = RunDir(run_dir)
    directory.remove_run()
    model = directory.path / "model"
    console.print("[bold]Millrace demo[/]: a 1M-parameter model learns to sort digits.\n")
    with shared_fork_server():  # it imports torch for the workers during the warm start
        _warm_up(console, model, seed=seed)
        console.print("[bold]2.[/] Reinforcement learning: generation and training side by side.\n")
        overrides = {"model": str(model), "run_dir": str(run_dir), "seed": seed}
        result = train(load_config(SETTINGS, overrides=overrides))
    seconds = time.monotonic() - start_s
    summary = directory.read_summary()
    directory.write_summary({**summary, "seconds": seconds, "training_seconds": result.seconds})
    _show(console, result, directory, seconds=seconds)
    return result


def _warm_up(console: Console, model: Path, *, seed: int) -> None:
    console.print("[bold]1.[/] Supervised warm start (up to a minute on an idle core) ...")
    with console.status("") as status:
        make_model(
            model,
            seed,
            on_step=lambda step, loss: status.update(
                f"Supervised warm start: step {step}, loss {loss:.3f}"
            ),
        )
    console.print(f"Saved the model to {model}\n")


def _show(console: Console, result: RunResult, directory: RunDir, *, seconds: float) -> None:
    assert result.before is not None
    assert result.after is not None
    table = Table(title="Held-out tasks, likeliest answer", title_justify="left")
    for heading in ("prompt", "before RL", "after RL", "right answer"):
        table.add_column(heading)
    later = {group.number: group for group in result.after.groups}
    pairs = [(g, later[g.number]) for g in result.before.groups if g.number in later]
    pairs.sort(key=lambda pair: _solved(pair[0]) or not _solved(pair[1]))  # changed ones first
    for before, after in pairs[:SAMPLES_SHOWN]:
        task = before.task
        table.add_row(f"{task.prompt}", _answer(before), _answer(after), task.columns["answer"])
    console.print()
    console.print(table)
    console.print(
        f"\n[bold]Held-out accuracy {result.before.accuracy:.3f} → {result.after.accuracy:.3f}[/]"
        f" ({result.after.num_tasks} tasks, never trained on)"
        f" in {seconds:.0f} s: {result.episodes} episodes, {result.steps} steps.\n",
        soft_wrap=True,
    )
    console.print(
        f"checkpoint  {result.checkpoint}   (AutoModelForCausalLM.from_pretrained)\n"
        f"metrics     {directory.metrics}\n"
        f"trace       {directory.trace}   (open in ui.perfetto.dev)\n"
        f"plots       millrace inspect {directory.path}",
        soft_wrap=True,
    )


def _solved(group: Group) -> bool:
    return group.scores[0].total >= 1.0


def _answer(group: Group) -> str:
    mark = "[green]✓[/]" if _solved(group) else "[red]✗[/]"
    return f"{group.episodes[0].turns[0].completion} {mark}"
