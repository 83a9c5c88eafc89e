"""The soak in short: one run, in which a process of each kind is killed at a random moment.

What depends on how busy the machine is (accuracies after few steps, where the time went) is left to
`millrace bench chaos` itself.
"""

import json
import subprocess
import sys

import pytest

from millrace.bench.mayhem.monkey import ROLES

UNSURE = ("accuracies differ", "the cause of all")


@pytest.mark.timeout(300)
def test_a_run_outlives_a_kill_of_each_kind(tmp_path):
    result = tmp_path / "result.json"
    asked = ["--kills", str(len(ROLES)), "--steps", "16", "--json", str(result)]
    done = subprocess.run(
        [sys.executable, "-m", "millrace.bench.chaos", *asked, "--keep", str(tmp_path / "runs")],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert result.exists(), done.stdout
    found = json.loads(result.read_text())
    assert {kill["role"] for kill in found["struck"]} == set(ROLES)
    counts = {"kills": len(ROLES), "groups_lost": 0, "groups_trained_twice": 0}
    assert {name: found[name] for name in counts} == counts
    assert found["steps_completed"] == 16
    sure = [one for one in found["promises"] if not one["what"].startswith(UNSURE)]
    assert len(sure) == len(found["promises"]) - len(UNSURE)
    assert [one for one in sure if not one["holds"]] == []
