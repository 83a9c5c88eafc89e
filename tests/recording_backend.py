"""The embedded engine, which also writes down what weight updates do to its requests.

It appends a line to the file `engine.options.recording` for each update, with totals so far. So a
test of a whole run sees which requests were in flight, paused, interrupted or prefilled again.
"""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from millrace.core.plugins import plugin
from millrace.core.records import Request
from millrace.inference.backend import EmbeddedBackend, EngineSpec, FinishedCompletions


@dataclass
class Recording:
    """Totals of one engine."""

    updates: int = 0  # versions that it began to serve
    in_flight: int = 0  # of these, updates that changed the weights under running sequences
    held: int = 0  # announcements that held back new sequences while some were running
    draining: int = 0  # passes while new sequences were held back
    paused: int = 0  # running sequences that an announcement has paused
    interrupted: int = 0  # requests that were returned unfinished
    resumed: int = 0  # requests that begin with sampled tokens
    prompt_tokens: int = 0  # of the other requests, once for each completion
    prefill_tokens: int = 0


@plugin
class RecordingBackend(EmbeddedBackend):
    recording: str

    def load(self, spec: EngineSpec) -> Any:
        return RecordingEngine(super().load(spec), file=Path(self.recording))


class RecordingEngine:
    def __init__(self, engine: Any, *, file: Path) -> None:
        self._engine, self._file = engine, file
        self._total = Recording()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def add_request(self, request: Request, *, stream: bool = False) -> None:
        if request.partial is not None:
            self._total.resumed += 1
        else:
            self._total.prompt_tokens += len(request.prompt) * request.n
        self._engine.add_request(request, stream=stream)

    def hold_new(self) -> None:
        self._total.held += self._engine.has_work
        self._engine.hold_new()

    def step(self, **options: Any) -> list[FinishedCompletions]:
        self._total.draining += self._engine.has_held
        return self._engine.step(**options)

    def preempt_all(self) -> list[FinishedCompletions]:
        self._total.paused += self._engine.stats().running
        return self._engine.preempt_all()

    def interrupt(self) -> list[FinishedCompletions]:
        interrupted = self._engine.interrupt()
        self._total.interrupted += len(interrupted)
        return interrupted

    def commit(self, prepared: Any) -> None:
        self._total.updates += 1
        self._total.in_flight += self._engine.stats().running > 0
        self._engine.commit(prepared)
        self._total.prefill_tokens = self._engine.stats().prefill_tokens
        with self._file.open("a") as file:
            file.write(json.dumps(asdict(self._total)) + "\n")


def read_recording(file: Path) -> Recording:
    return Recording(**json.loads(file.read_text().splitlines()[-1]))
