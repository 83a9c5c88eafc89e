"""Callbacks: the user's own code, called while `mr.train` runs.

A callback is any object with some hooks of Callback. Promise: hooks are called one after the other,
on the controller's event loop, so a hook that blocks holds up the run. An exception of a hook ends
the run with its own traceback; StopTraining ends it with a checkpoint.
"""

import contextlib
import inspect
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from millrace.config import RunConfig
from millrace.core.errors import ConfigError, suggestion
from millrace.core.records import Group


class StopTraining(Exception):
    """Raised by a hook to end the run: it finishes its step and writes a checkpoint, and `mr.train`
    returns with this message as RunResult.stopped."""


class Callback:
    """Base class of callbacks; its hooks do nothing."""

    def on_start(self, config: RunConfig) -> None:
        """The settings are checked and the run directory exists; workers start next."""

    def on_step(self, metrics: Mapping[str, Any]) -> None:
        """A step is done; `metrics` is its row of metrics.jsonl without null values."""

    def on_group(self, group: Group) -> None:
        """A step has trained on this group; called before on_step, once for each group."""

    def on_evaluation(self, metrics: Mapping[str, Any]) -> None:
        """An evaluation is over; `metrics` has its eval/accuracy and eval/step."""

    def on_checkpoint(self, path: Path) -> None:
        """A checkpoint is complete on the disk."""

    def on_end(self, error: BaseException | None) -> None:
        """All workers have ended; `error` is None if the run has finished or was stopped."""


HOOKS = tuple(name for name in vars(Callback) if name.startswith("on_"))


def check_callback(callback: Any) -> None:
    """Raise for an object that no hook would ever reach, or that has a misspelled one."""
    name = type(callback).__name__
    found = [hook for hook in dir(callback) if hook.startswith("on_")]
    if isinstance(callback, type) or not found:
        raise ConfigError(f"callbacks: {callback!r} is not an object with hooks (mr.Callback).")
    for hook in found:
        if hook not in HOOKS:
            raise ConfigError(f"callbacks: {name}.{hook} is not a hook; {suggestion(hook, HOOKS)}")
        if inspect.iscoroutinefunction(getattr(callback, hook)):
            raise ConfigError(f"callbacks: {name}.{hook} is asynchronous; make it a function.")


@dataclass(frozen=True)
class CallbackList:
    """Calls the hooks of all callbacks; `stop` is called with the message of a StopTraining."""

    callbacks: Sequence[Any] = ()
    stop: Callable[[str], None] = lambda reason: None

    def call(self, hook: str, *arguments: Any) -> None:
        for callback in self.callbacks:
            method = getattr(callback, hook, None)
            try:
                if method is not None:
                    method(*arguments)
            except StopTraining as stop:
                self.stop(str(stop) or f"{type(callback).__name__} raised StopTraining")

    @contextlib.contextmanager
    def ending(self) -> Iterator[None]:
        """Call on_end with what ends the context."""
        try:
            yield
        except BaseException as error:
            self.call("on_end", error)
            raise
        self.call("on_end", None)


class EarlyStopping(Callback):
    """Stops a run whose metric has not improved for `patience` values, or has reached `threshold`.

    Metrics of evaluations (`eval/accuracy`) have a value per evaluation, others one per step.
    """

    def __init__(
        self,
        metric: str,
        *,
        patience: int | None = None,
        min_delta: float = 0.0,
        mode: Literal["max", "min"] = "max",
        threshold: float | None = None,
    ) -> None:
        """A value counts as improved if it is better than the best one by more than `min_delta`;
        with `mode="min"`, lower is better."""
        if (patience is None and threshold is None) or (patience is not None and patience < 1):
            raise ConfigError("EarlyStopping needs a patience of at least 1, a threshold, or both.")
        self._metric, self._min_delta = metric, min_delta
        self._patience, self._threshold = patience or math.inf, threshold
        self._sign = {"max": 1.0, "min": -1.0}[mode]
        self.on_start()

    def on_start(self, config: RunConfig | None = None) -> None:
        self._best = -math.inf  # times the sign
        self._num_worse = 0  # values since the best one

    def on_step(self, metrics: Mapping[str, Any]) -> None:
        if not self._metric.startswith("eval/"):
            self._read(metrics)

    def on_evaluation(self, metrics: Mapping[str, Any]) -> None:
        if self._metric.startswith("eval/"):
            self._read(metrics)

    def _read(self, metrics: Mapping[str, Any]) -> None:
        value = metrics.get(self._metric)
        if value is None:
            if self._best == -math.inf:
                known = suggestion(self._metric, metrics)
                raise ConfigError(f"EarlyStopping: there is no metric {self._metric!r}; {known}")
            return  # some metrics are not in every row
        signed = self._sign * value
        is_better = signed > self._best + self._min_delta
        self._num_worse = 0 if is_better else self._num_worse + 1
        self._best = signed if is_better else self._best
        if self._threshold is not None and signed >= self._sign * self._threshold:
            raise StopTraining(f"{self._metric} = {value:g} has reached {self._threshold:g}")
        if self._num_worse >= self._patience:
            raise StopTraining(f"{self._metric} has not improved for {self._num_worse} values")
