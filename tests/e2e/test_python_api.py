"""Callbacks, the handle of a run and its asynchronous variant, with real processes."""

import asyncio
import traceback
from pathlib import Path

import psutil
import pytest
from digits import TASKS, share_of_digits

import millrace as mr

pytestmark = pytest.mark.slow


def settings_of(model: Path, run_dir: Path, *, steps: int) -> dict:
    return {
        "model": str(model),
        "run_dir": str(run_dir),
        "sampling": {"max_new_tokens": 8},
        "rollout": {"group_size": 2},
        "trainer": {"steps": steps, "groups_per_step": 2},
        "cluster": {"threads": 1},
        "scoring": {"workers": 1},
        "monitoring": {"progress": "off"},
    }


def workers_of_this_process() -> list[str]:
    lines = [" ".join(child.cmdline()) for child in psutil.Process().children(recursive=True)]
    return [line for line in lines if ".worker" in line]


class Broken(mr.Callback):
    """Raises in one hook, and records what on_end gets."""

    def __init__(self, hook: str) -> None:
        self.ended_by: list[BaseException | None] = []
        setattr(self, hook, self.fail)

    def fail(self, *arguments) -> None:
        raise ZeroDivisionError("a bug of the user's")

    def on_end(self, error) -> None:
        self.ended_by.append(error)


@pytest.mark.parametrize("hook", ["on_start", "on_step", "on_checkpoint"])
def test_exception_of_a_callback_ends_the_run_with_its_traceback(model, tmp_path, hook):
    callback = Broken(hook)
    settings = settings_of(model, tmp_path / "run", steps=1000)
    with pytest.raises(ZeroDivisionError, match="a bug of the user's") as raised:
        mr.train(
            settings,
            tasks=TASKS,
            scorers=share_of_digits,
            checkpoint={"every_steps": 1},
            callbacks=[callback],
        )
    functions = [frame.name for frame in traceback.extract_tb(raised.value.__traceback__)]
    assert functions[-1] == "fail"
    assert callback.ended_by == [raised.value]
    assert workers_of_this_process() == []


def test_run_can_be_watched_scaled_stopped_and_resumed(model, tmp_path):
    settings = settings_of(model, tmp_path / "run", steps=1000)
    run = mr.Run(settings, tasks=TASKS, scorers=share_of_digits).start()
    seen = []
    for metrics in run:
        seen.append(metrics["step"])
        if len(seen) == 2:
            assert run.engines == ["engine-0"]
            assert run.scale(add=1) == ["engine-0", "engine-1"]
            assert run.scale(remove=["engine-0"]) == ["engine-1"]
            run.stop()
    stopped = run.result()
    assert seen == list(range(1, stopped.steps + 1))
    assert stopped.stopped == "Run.stop()"
    assert stopped.checkpoint.name == f"step_{stopped.steps}"
    assert workers_of_this_process() == []
    last = stopped.steps + 2
    longer = mr.Run(settings, tasks=TASKS, scorers=share_of_digits, trainer={"steps": last})
    finished = longer.resume().result()
    assert finished.stopped is None
    assert finished.history["step"] == list(range(1, last + 1))


def test_early_stopping_ends_a_run_that_can_resume(model, tmp_path):
    result = mr.train(
        settings_of(model, tmp_path / "run", steps=1000),
        tasks=TASKS,
        eval_tasks=TASKS[:4],
        scorers=share_of_digits,
        callbacks=[mr.EarlyStopping("eval/step", patience=1000, threshold=2)],
        evaluate={"every_steps": 1},
    )
    assert result.stopped is not None
    assert "eval/step" in result.stopped
    assert 2 <= result.steps < 1000
    assert (result.before is not None, result.after) == (True, None)
    assert result.checkpoint == tmp_path / "run" / "checkpoints" / f"step_{result.steps}"


class StopAt(mr.Callback):
    def __init__(self, step: int) -> None:
        self.step = step

    def on_step(self, metrics) -> None:
        if metrics["step"] == self.step:
            raise mr.StopTraining("enough")


def test_stop_in_the_last_step_is_the_end_of_a_whole_run(model, tmp_path):
    result = mr.train(
        settings_of(model, tmp_path / "run", steps=2),
        tasks=TASKS,
        eval_tasks=TASKS[:4],
        scorers=share_of_digits,
        callbacks=[StopAt(2)],
    )
    assert (result.steps, result.stopped) == (2, None)
    assert result.after is not None
    assert (tmp_path / "run" / "summary.json").is_file()


async def test_event_loop_of_the_caller_goes_on_while_a_run_trains(model, tmp_path):
    settings = settings_of(model, tmp_path / "run", steps=2)
    training = asyncio.create_task(mr.train_async(settings, tasks=TASKS, scorers=share_of_digits))
    num_turns = 0
    while not training.done():
        await asyncio.sleep(0.01)
        num_turns += 1
    assert training.result().steps == 2
    assert num_turns > 20
    run = mr.Run(settings, tasks=TASKS, scorers=share_of_digits, trainer={"steps": 4})
    assert [metrics["step"] async for metrics in run.resume()] == [3, 4]
    # mr.train blocks the loop, as it does in a cell of a notebook.
    again = mr.train(
        settings, tasks=TASKS, scorers=share_of_digits, trainer={"steps": 5}, resume=True
    )
    assert again.history["step"] == [1, 2, 3, 4, 5]
