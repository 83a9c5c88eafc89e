"""A short soak test: in one run, a process of each role is killed at a random moment.

Only `millrace bench chaos` itself, with many steps, checks the accuracy and the lost time.
"""

import pytest

from millrace.bench.chaos import ObservedRun, check_kills, check_work
from millrace.bench.faults.injector import ROLES
from millrace.bench.faults.target_run import NUM_DIGITS
from millrace.demo.model import make_model


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_run_survives_a_kill_of_each_role(tmp_path):
    make_model(tmp_path / "model", 0, num_examples=64, num_digits=NUM_DIGITS)
    run = ObservedRun(tmp_path / "disturbed", model=tmp_path / "model", steps=16, seed=0)
    run.run(len(ROLES), step_s=0.1)
    assert {kill.role for kill in run.injector.kills} == set(ROLES)
    promises = [
        check_kills(run.injector.kills, wanted=len(ROLES)),
        *check_work(run.target, run.checker, summary=run.summary),
        run.leftovers,
    ]
    assert [promise for promise in promises if not promise.holds] == []
