"""A run with one engine on the trainer's device and one elsewhere, as if on another host."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from overlap import first_halves, generating_in, overlap, steps_of
from project import Command, make_project, steps_in

from millrace.cli.main import main
from millrace.monitoring.files.metrics import read_metrics
from millrace.monitoring.files.trace import read_trace

pytestmark = pytest.mark.slow


@pytest.fixture
def train(tmp_path: Path, commands: list[Command]) -> Callable[..., Path]:
    def train(**sections: dict[str, Any]) -> Path:
        """Returns the folder of a finished run; batches are so large that the trace records spans
        in order."""
        project = make_project(
            tmp_path / "controller",
            sampling={"max_new_tokens": 48},
            rollout={"group_size": 8},
            weights={"transport": "disk"},
            cluster={
                "address": "tcp://127.0.0.1:0",
                "ticket": "secret/ticket.json",
                "share_gpu": "sleep",
                "threads": 1,
            },
            **{"engine": {"count": 1, "remote": 1}, **sections},
        )
        ticket = project / "secret" / "ticket.json"
        run = Command("train", "run.toml", folder=project)
        commands.append(run)
        run.wait_for(ticket)
        host = Command("join", ticket, folder=tmp_path / "elsewhere")
        commands.append(host)
        code, _, stderr = run.finish()
        assert code == 0, stderr
        assert main(["inspect", str(project / "run"), "--ledger"]) == 0  # no group is lost
        return project / "run"

    return train


def test_lent_engine_generates_between_steps_only_and_the_other_all_the_time(train):
    run_dir = train(trainer={"steps": 6, "groups_per_step": 8})
    spans = read_trace(run_dir / "trace.json")
    steps = steps_of(spans)
    lent = [span for span in generating_in(spans) if span.worker == "engine-0"]
    other = [span for span in generating_in(spans) if span.worker == "engine-1"]
    assert sum(span.end_s - span.start_s for span in lent) > 0.1
    assert overlap(first_halves(steps), lent) < 0.02
    assert overlap(steps, other) > 0.1
    paused = {span.worker for span in spans if span.name in ("paused", "sleep")}
    assert paused == {"engine-0"}
    assert steps_in(run_dir / "metrics.jsonl") == [*range(1, 7)]
    assert read_metrics(run_dir / "metrics.jsonl")[-1]["lending/lent"] >= 2


SLOW_SLEEPER = """
import time
from dataclasses import dataclass

from millrace.inference.backend import EmbeddedBackend


@dataclass(frozen=True, kw_only=True)
class SlowSleeper(EmbeddedBackend):
    def load(self, spec):
        engine = super().load(spec)
        engine.wake = lambda: time.sleep(0.5)
        return engine
"""


def test_engine_stays_asleep_while_the_trainer_does_not_wait(train, tmp_path):
    """Steps of many epochs take so long that the other engine always has the next batch ready, and
    a wake takes half a second, as with a large model on a GPU."""
    backend = tmp_path / "slow_sleeper.py"
    backend.write_text(SLOW_SLEEPER)
    trainer = {"steps": 10, "groups_per_step": 4, "epochs": 8}
    engine = {"type": f"{backend}:SlowSleeper", "count": 1, "remote": 1}
    run_dir = train(trainer=trainer, engine=engine, buffer={"max_staleness": 4})
    last = read_metrics(run_dir / "metrics.jsonl")[-1]
    assert last["lending/kept_asleep"] >= 3
    assert steps_in(run_dir / "metrics.jsonl") == [*range(1, 11)]
    spans = read_trace(run_dir / "trace.json")
    num_sleeps = sum(span.name == "sleep" for span in spans)
    assert 1 <= num_sleeps <= 10 - last["lending/kept_asleep"]
