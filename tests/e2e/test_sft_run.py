"""Supervised fine-tuning with real processes: runs, stops, kills, ranks, and runs that follow."""

import asyncio
import json
import os
import signal
import threading

import pytest
import tomli_w
import torch
from metrics_page import unknown_metrics
from project import Command, steps_in
from safetensors.torch import load_file
from tiny_model import make_tiny_model

import millrace as mr
from millrace.monitoring.files.metrics import read_metrics

ROWS = [{"prompt": f"{a}+{b}=", "completion": str(a + b)} for a in range(8) for b in range(8)]


def settings_of(folder, **more) -> dict:
    return {
        "model": str(folder / "model"),
        "run_dir": str(folder / "run"),
        "tasks": {"epochs": 1.5},
        "trainer": {"groups_per_step": 8, "microbatch_tokens": 32},
        "optimizer": {"learning_rate": 1e-2},
        "checkpoint": {"every_steps": 3, "keep": 10},
        "evaluate": {"every_steps": 4},
        "cluster": {"threads": 1},
        "monitoring": {"progress": "lines"},
        **more,
    }


class StopAfter(mr.Callback):
    def __init__(self, step: int) -> None:
        self._step = step

    def on_step(self, metrics) -> None:
        if metrics["step"] == self._step:
            raise mr.StopTraining


def tensors_of(checkpoint, *, name: str = "model") -> dict[str, torch.Tensor]:
    files = checkpoint.glob(f"{name}*.safetensors")  # several ranks write several
    return {key: tensor for file in files for key, tensor in load_file(file).items()}


def learned(run_dir) -> list[tuple]:
    names = ("step", "loss", "grad_norm", "eval/loss")
    return [
        tuple(row.get(name) for name in names) for row in read_metrics(run_dir / "metrics.jsonl")
    ]


def test_fine_tuning_lowers_the_held_out_loss_and_describes_its_metrics(tmp_path):
    make_tiny_model(tmp_path / "model")
    result = mr.sft(settings_of(tmp_path), tasks=ROWS[:48], eval_tasks=ROWS[48:])
    (before, *_, after) = [loss for loss in result.history["eval/loss"] if loss is not None]
    assert after < before - 0.3
    assert (result.steps, result.episodes, result.checkpoint.name) == (9, 72, "step_9")
    assert result.history["eval/step"][-1] == 9
    assert unknown_metrics(result.history) == []


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_stopped_run_resumes_to_the_weights_of_one_that_was_not_stopped(tmp_path):
    make_tiny_model(tmp_path / "model")
    settings = settings_of(tmp_path)
    data = {"tasks": ROWS[:48], "eval_tasks": ROWS[48:]}
    stopped = mr.sft(settings, **data, callbacks=[StopAfter(5)])
    assert (stopped.steps, stopped.checkpoint.name) == (5, "step_5")
    whole = mr.sft(settings, **data, resume=True)
    other = mr.sft(settings, **data, run_dir=str(tmp_path / "other"))
    assert whole.steps == other.steps == 9
    assert learned(tmp_path / "run") == learned(tmp_path / "other")
    weights, same = tensors_of(whole.checkpoint), tensors_of(other.checkpoint)
    assert all(torch.equal(weights[name], same[name]) for name in weights)


@pytest.mark.slow
def test_run_with_more_epochs_continues_after_a_short_last_batch(tmp_path):
    make_tiny_model(tmp_path / "model")
    settings = settings_of(tmp_path)
    for epochs, steps in ((1.0, 2), (2.0, 3)):
        result = mr.sft(settings, tasks=ROWS[:12], resume=epochs > 1, **{"tasks.epochs": epochs})
        assert (result.steps, result.episodes) == (steps, 12)


class CtrlC(mr.Callback):
    """As a user who interrupts the kernel of a notebook, whose event loop runs in this thread."""

    def on_step(self, metrics) -> None:
        if metrics["step"] == 2:
            signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)


@pytest.fixture
def ctrl_c_interrupts():
    """As in a notebook. A command in the background of a shell ignores Ctrl-C."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.slow
@pytest.mark.usefixtures("ctrl_c_interrupts")
def test_ctrl_c_in_a_notebook_stops_a_fine_tuning_with_a_checkpoint(tmp_path):
    make_tiny_model(tmp_path / "model")
    settings = settings_of(tmp_path, tasks={"epochs": 25.0})

    async def cell() -> None:
        mr.sft(settings, tasks=ROWS, callbacks=[CtrlC()])

    loop = asyncio.new_event_loop()
    with pytest.raises(KeyboardInterrupt):
        loop.run_until_complete(cell())
    loop.close()
    (*_, last) = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert last["step"] < 200
    assert (tmp_path / "run" / "checkpoints" / f"step_{last['step']}").is_dir()


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_killed_run_resumes_with_every_example_exactly_once(tmp_path):
    make_tiny_model(tmp_path / "model")
    for name, rows in (("examples", ROWS[:48]), ("held_out", ROWS[48:])):
        (tmp_path / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    settings = settings_of(tmp_path)
    settings |= {
        "tasks": {"path": "examples.jsonl", "epochs": 20.0},
        "evaluate": {"path": "held_out.jsonl", "every_steps": 4},
    }
    (tmp_path / "run.toml").write_text(tomli_w.dumps(settings))
    metrics = tmp_path / "run" / "metrics.jsonl"
    for kill, lines in enumerate((1, 25, 70)):
        command = Command("sft", "run.toml", *(["--resume"] if kill else []), folder=tmp_path)
        command.wait_for(metrics, lines=lines)
        os.killpg(os.getpgid(command.process.pid), signal.SIGKILL)
        command.process.communicate()
    code, stdout, stderr = Command("sft", "run.toml", "--resume", folder=tmp_path).finish()
    assert code == 0, stderr
    assert "held-out loss" in stdout
    assert steps_in(metrics) == list(range(1, 121))
    command = Command("sft", "run.toml", "--run_dir", "other", folder=tmp_path)
    assert command.finish()[0] == 0
    assert learned(tmp_path / "run") == learned(tmp_path / "other")
    weights, same = (
        tensors_of(tmp_path / name / "checkpoints" / "step_120") for name in ("run", "other")
    )
    assert all(torch.equal(weights[name], same[name]) for name in weights)


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("lora", [None, {"rank": 4}])
def test_two_ranks_learn_what_one_learns(tmp_path, lora):
    make_tiny_model(tmp_path / "model")
    settings = settings_of(tmp_path, lora=lora, optimizer={"learning_rate": 1e-4})
    found = {}
    for ranks in (1, 2):
        run_dir = str(tmp_path / f"ranks-{ranks}")
        trainer = {"ranks": ranks}
        data = {"tasks": ROWS[:48], "eval_tasks": ROWS[48:]}
        found[ranks] = mr.sft(settings, **data, run_dir=run_dir, trainer=trainer)
    one, two = learned(tmp_path / "ranks-1"), learned(tmp_path / "ranks-2")
    for row, same in zip(one, two, strict=True):
        numbers = [(a, b) for a, b in zip(row, same, strict=True) if a is not None]
        assert max(abs(a - b) for a, b in numbers) < 1e-5
    name = "adapter_model" if lora else "model"
    weights, same = (tensors_of(found[ranks].checkpoint, name=name) for ranks in (1, 2))
    for key, weight in weights.items():
        assert (weight - same[key]).abs().max() < 1e-5, key


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_run_starts_from_the_checkpoint_of_a_fine_tuned_adapter(tmp_path):
    make_tiny_model(tmp_path / "model")
    lora = {"rank": 4, "export_merged": True}
    tuned = mr.sft(settings_of(tmp_path, lora=lora), tasks=ROWS)
    result = mr.train(
        model=str(tuned.checkpoint / "merged"),
        run_dir=str(tmp_path / "after"),
        tasks=[{"prompt": row["prompt"], "answer": row["completion"]} for row in ROWS],
        scorers=["exact"],
        sampling={"max_new_tokens": 4},
        rollout={"group_size": 2},
        trainer={"steps": 1, "groups_per_step": 2},
        cluster={"threads": 1},
        monitoring={"progress": "off"},
    )
    assert result.steps == 1
