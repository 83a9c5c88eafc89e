"""A trainer of two ranks: a rank that is killed, stopped or short of memory costs a restart and
nothing else."""

import re
import signal

import pytest
from killable_run import KillableRun

from millrace.monitoring.files.metrics import read_metrics

# From the third step of a process, rank 1 has memory for two sequences.
SHORT_OF_MEMORY = """
import itertools
from dataclasses import dataclass

import torch
from millrace.training.losses.policy_loss import PolicyLoss

calls = itertools.count()

@dataclass(frozen=True)
class ShortOfMemory:
    def __call__(self, tokens):
        is_short = torch.distributed.get_rank() == 1 and next(calls) >= 2
        if is_short and len(tokens.sequences.lengths) > 2:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return PolicyLoss()(tokens)
"""


@pytest.fixture
def make_run(tmp_path):
    runs = []

    def make(*, steps=8, **sections) -> KillableRun:
        run = KillableRun(
            tmp_path,
            steps=steps,
            trainer={"steps": steps, "groups_per_step": 2, "ranks": 2},
            supervision={"max_restarts": 20, "hang_timeout_s": 5.0},
            cluster={"threads": 1},
            **sections,
        )
        runs.append(run)
        return run

    yield make
    for run in runs:
        run.close()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("killed", "stopped"), [("trainer-1", "trainer-0"), ("trainer-0", "trainer-1")]
)
def test_run_survives_a_killed_and_a_stopped_rank(make_run, killed, stopped):
    run = make_run()
    run.start()
    run.until(lambda: run.step >= 3)
    first = run.worker(stopped)
    run.worker(killed).send_signal(signal.SIGKILL)
    run.until(lambda: run.step >= 5)
    assert not first.is_running()  # it ended with the other
    run.worker(stopped).send_signal(signal.SIGSTOP)
    assert run.summary()["restarts"] == {"trainer": 2}  # the engine served throughout
    # Whichever is noticed first: the death of the one, or the broken connection of the other.
    reasons = (f"'{killed}' was killed by SIGKILL", f"'{stopped}' lost its connection to another")
    assert any(f"Worker {reason}" in run.output for reason in reasons)
    assert f"Worker '{stopped}' made no progress for" in run.output


@pytest.mark.slow
def test_run_splits_microbatches_after_a_rank_ran_out_of_memory(make_run):
    """The other rank waits for it in the middle of a pass, so both start again."""
    run = make_run(steps=4, loss={"type": "memory.py:ShortOfMemory"})
    (run.project / "memory.py").write_text(SHORT_OF_MEMORY)
    run.start()
    assert run.summary()["restarts"] == {"trainer": 1}
    assert "Worker 'trainer-1' ran out of memory: A microbatch of" in run.output
    rows = read_metrics(run.path / "metrics.jsonl")
    assert all(0.5 <= row["trainer/balance"] <= 1.0 for row in rows)  # 0.5: one rank has all work
    splits = [row["batch/microbatch_splits"] for row in rows]
    assert splits[:2] == [0, 0]
    assert min(splits[2:]) > 0


NEVER_FITS = SHORT_OF_MEMORY.replace("> 2:", "> 0:")


@pytest.mark.slow
def test_run_ends_with_a_remedy_if_a_single_sequence_does_not_fit_on_a_rank(make_run):
    run = make_run(steps=4, loss={"type": "memory.py:ShortOfMemory"})
    (run.project / "memory.py").write_text(NEVER_FITS)
    run.start()
    assert run.finish() == 1
    assert re.search(
        r"A sequence of \d+ tokens does not fit into the trainer's memory; set"
        r" trainer\.gradient_checkpointing to true",
        run.output,
    )
    assert run.step < run.steps
