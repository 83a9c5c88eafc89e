"""A trainer of two ranks: a rank that is killed or stopped costs a restart and nothing else."""

import signal

import pytest
from killable_run import KillableRun


@pytest.fixture
def run(tmp_path):
    run = KillableRun(
        tmp_path,
        steps=8,
        trainer={"steps": 8, "groups_per_step": 2, "ranks": 2},
        supervision={"max_restarts": 20, "hang_timeout_s": 5.0},
        cluster={"threads": 1},
    )
    yield run
    run.close()


@pytest.mark.slow
def test_run_survives_a_killed_and_a_stopped_rank(run):
    run.start()
    run.until(lambda: run.step >= 3)
    first = run.worker("trainer-0")
    run.worker("trainer-1").send_signal(signal.SIGKILL)
    run.until(lambda: run.step >= 5)
    assert not first.is_running()  # it ended with the other
    engine = run.worker("engine-0")
    run.worker("trainer-0").send_signal(signal.SIGSTOP)
    summary = run.summary()
    assert not engine.is_running()  # only now: the run is over
    assert summary["restarts"] == {"trainer": 2}
    assert "Worker 'trainer-1' was killed by SIGKILL" in run.output
    assert "Worker 'trainer-0' made no progress for" in run.output
