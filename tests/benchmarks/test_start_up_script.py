"""benchmarks/start_up.py on a tiny model: the phases of a run, from the command to the prompt."""

import pytest
import start_up


@pytest.mark.slow
def test_phases_of_a_run_follow_each_other(tmp_path):
    start_up.prepare(tmp_path, model="tiny")
    found = start_up.train(tmp_path, run_dir="run")
    assert found.keys() == start_up.EVENTS.keys()
    seconds = [found[event] for event in start_up.EVENTS]
    assert seconds == sorted(seconds)
    assert 0 < found["fork_s"] < found["first_step_s"] < found["prompt_s"]


def test_table_has_each_phase_and_what_a_user_waits_for():
    seconds = [0, 11, 14.5, 20.5, 22, 60, 62.5, 63.75, 65.5]
    cold = dict(zip(start_up.EVENTS, seconds, strict=True))
    warm = {event: seconds / 2 for event, seconds in cold.items()}
    _, *rows = start_up.table({"cold": cold, "warm": warm}).splitlines()
    found = [tuple(map(float, row.split()[-2:])) for row in rows]
    assert [cold for cold, _ in found] == [11, 3.5, 6, 1.5, 38, 2.5, 1.2, 1.8, 22, 5.5]
    assert found[-2:] == [(22, 11), (5.5, 2.8)]
    assert rows[-1].startswith("the last step ends")
    assert "the prompt" in rows[-1]
