from pathlib import Path

import pytest

import millrace as mr
from millrace.core.errors import ConfigError
from millrace.monitoring.callbacks import CallbackList, check_callback


class Recorder:
    """Has two hooks only, and derives from nothing."""

    def __init__(self) -> None:
        self.calls: list[tuple] = []

    def on_step(self, metrics):
        self.calls.append(("on_step", metrics["step"]))

    def on_end(self, error):
        self.calls.append(("on_end", error))


class StopAt(mr.Callback):
    def __init__(self, step: int, message: str = "") -> None:
        self.step, self.message = step, message

    def on_step(self, metrics):
        if metrics["step"] == self.step:
            raise mr.StopTraining(self.message) if self.message else mr.StopTraining


def test_stop_training_stops_with_its_message_and_later_callbacks_still_hear_of_the_step():
    stops: list[str] = []
    recorder = Recorder()
    callbacks = CallbackList([StopAt(2, "enough"), StopAt(3), recorder], stop=stops.append)
    for step in (1, 2, 3):
        callbacks.call("on_step", {"step": step})
        callbacks.call("on_checkpoint", Path("step"))
    assert stops == ["enough", "StopAt raised StopTraining"]
    assert recorder.calls == [("on_step", 1), ("on_step", 2), ("on_step", 3)]


def test_on_end_gets_what_ended_the_run():
    recorder = Recorder()
    callbacks = CallbackList([recorder], stop=print)
    error = ValueError("no")
    with pytest.raises(ValueError, match="no"), callbacks.ending():
        raise error
    with callbacks.ending():
        pass
    assert recorder.calls == [("on_end", error), ("on_end", None)]


class Misspelled(mr.Callback):
    def on_steps(self, metrics): ...


class Asynchronous:
    async def on_step(self, metrics): ...


@pytest.mark.parametrize(
    ("callback", "message"),
    [
        (Misspelled(), r"Misspelled\.on_steps is not a hook; did you mean 'on_step'\?"),
        (Asynchronous(), "on_step is asynchronous"),
        (print, "is not an object with hooks"),
        (Recorder, "is not an object with hooks"),
    ],
)
def test_callback_that_would_never_be_called_is_refused(callback, message):
    check_callback(Recorder())
    with pytest.raises(ConfigError, match=message):
        mr.Run({"model": "m"}, callbacks=[Recorder(), callback])


def values_until_stop(stopping: mr.EarlyStopping, values, *, name="reward/mean") -> int | None:
    """The number of values after which it stops."""
    stopping.on_start(mr.load_config({"model": "m"}))
    for number, value in enumerate(values, start=1):
        try:
            if name.startswith("eval/"):
                stopping.on_evaluation({name: value})
                stopping.on_step({name: value})  # the next row repeats it
            else:
                stopping.on_step({name: value})
        except mr.StopTraining:
            return number
    return None


def test_early_stopping_waits_for_its_patience_and_starts_anew_with_each_run():
    stopping = mr.EarlyStopping("reward/mean", patience=2, min_delta=0.05)
    assert values_until_stop(stopping, [0.1, 0.2, 0.24, 0.3, 0.3, 0.34, 0.9]) == 6
    assert values_until_stop(stopping, [0.0, 0.1, 0.2]) is None


def test_early_stopping_can_minimise_and_has_a_threshold():
    falling = mr.EarlyStopping("kl", patience=1, mode="min")
    assert values_until_stop(falling, [3.0, 2.0, 2.5], name="kl") == 3
    solved = mr.EarlyStopping("eval/accuracy", threshold=0.9)
    assert values_until_stop(solved, [0.1, 0.95], name="eval/accuracy") == 2


def test_values_of_evaluations_count_once():
    stopping = mr.EarlyStopping("eval/accuracy", patience=1)
    assert values_until_stop(stopping, [0.1, 0.2, 0.3], name="eval/accuracy") is None


def test_unknown_metric_of_early_stopping_names_the_nearest():
    stopping = mr.EarlyStopping("rewards/mean", patience=1)
    with pytest.raises(ConfigError, match="did you mean 'reward/mean'"):
        stopping.on_step({"reward/mean": 0.1, "loss": 0.2})


def test_early_stopping_needs_a_condition():
    with pytest.raises(ConfigError, match="a patience of at least 1, a threshold, or both"):
        mr.EarlyStopping("reward/mean")
    with pytest.raises(ConfigError, match="a patience of at least 1"):
        mr.EarlyStopping("reward/mean", patience=0)
