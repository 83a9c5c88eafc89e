import json
import math

import pytest
from fakes import make_group

from millrace.core.errors import RunFailed
from millrace.monitoring.files.episodes import SkippedSteps

METRICS = {"loss": math.nan, "grad_norm": math.inf}


def test_input_of_a_skipped_update_is_saved(tmp_path):
    groups = [make_group(4), make_group(7, size=3)]
    path = SkippedSteps(tmp_path / "skipped").write(9, groups)
    assert path == tmp_path / "skipped" / "step_9.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert [(row["group"], row["episode"]) for row in rows] == [
        *((4, 0), (4, 1)),
        *((7, 0), (7, 1), (7, 2)),
    ]
    rollout = groups[0].rollouts[1]
    row = rows[1]
    assert row["tokens"] == rollout.tokens.tolist()
    assert row["sampled"] == rollout.mask.tolist()
    assert row["engine_logprobs"] == pytest.approx(rollout.engine_logprobs.tolist())
    assert (row["score"], row["advantage"], row["completion"]) == (1.0, 1.0, "c")


def test_three_skipped_steps_in_a_row_end_the_run_and_name_their_files(tmp_path):
    skipped = SkippedSteps(tmp_path)
    for step in (1, 2, 4, 5):
        if step == 4:
            skipped.reset_streak()
        skipped.write(step, [make_group()])
        skipped.check(METRICS)
    skipped.write(6, [make_group()])
    with pytest.raises(RunFailed, match=r"Steps 4, 5, 6 .* loss nan .* norm inf.*step_5\.jsonl"):
        skipped.check(METRICS)
    assert skipped.num_steps == 5
