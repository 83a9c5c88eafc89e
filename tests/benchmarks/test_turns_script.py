"""benchmarks/turns.py with few turns."""

import torch
import turns

torch.set_num_threads(1)

BLOCK = 16


def test_turns_cost_the_same_only_while_kv_is_kept():
    plain, keeps, recomputes, _ = (turns.measure(case, num_turns=3) for case in turns.CASES)
    assert plain == {**keeps, "case": plain["case"]}
    first, second, third = plain["computed"]
    assert first < second == third <= turns.NEW_TOKENS + BLOCK
    assert plain["fork"] <= BLOCK
    assert recomputes["computed"] == [(2 * turn + 1) * turns.NEW_TOKENS for turn in range(3)]
    assert recomputes["fork"] > plain["tokens"] - turns.NEW_TOKENS
    assert "turn 2" in turns.table([plain, recomputes])
