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
@pytest.mark.parametrize(
    ("killed", "stopped"), [("trainer-1", "trainer-0"), ("trainer-0", "trainer-1")]
)
def test_run_survives_a_killed_and_a_stopped_rank(run, killed, stopped):
    run.start()
    run.until(lambda: run.step >= 3)
    first = run.worker(stopped)
    run.worker(killed).send_signal(signal.SIGKILL)
    run.until(lambda: run.step >= 5)
    assert not first.is_running()  # it ended with the other
    run.worker(stopped).send_signal(signal.SIGSTOP)
    assert run.summary()["restarts"] == {"trainer": 2}  # the engine served throughout
    assert f"Worker '{killed}' was killed by SIGKILL" in run.output
    assert f"Worker '{stopped}' made no progress for" in run.output
