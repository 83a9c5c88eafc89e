"""benchmarks/crash_and_resume.py: what it counts in the files of recorded trainings."""

import json

import crash_and_resume
import pytest
from crash_and_resume import Training


def recorded(folder, *, steps, handed_out, num_kills=1, wall_s=30.0):
    """`steps`: (step, prompts) in the order in which they ended, also those that a kill undid."""
    folder.mkdir()
    training = Training(side="ours", folder=folder, steps=max(step for step, _ in steps))
    training.num_kills, training.wall_s, training.first_step_s = num_kills, wall_s, [3.0, 1.0, 2.0]
    rows = [json.dumps({"step": step, "prompts": prompts}) for step, prompts in steps]
    (folder / "steps.jsonl").write_text("\n".join([*rows, ""]))
    (folder / "handed_out.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in handed_out))
    return training


@pytest.fixture
def undisturbed(tmp_path):
    steps = [(1, [0, 1]), (2, [2, 3]), (3, [4, 5])]
    return recorded(
        tmp_path / "undisturbed",
        steps=steps,
        handed_out=[{"numbers": [*range(6)]}],
        num_kills=0,
        wall_s=10.0,
    )


def test_training_that_continues_where_it_was_killed_skips_and_repeats_nothing(
    tmp_path, undisturbed
):
    steps = [(1, [0, 1]), (2, [2, 3]), (2, [2, 3]), (3, [4, 5])]  # step 2 was undone and redone
    handed_out = [{"numbers": [*range(8)], "pending": [6, 7]}]
    killed = recorded(tmp_path / "killed", steps=steps, handed_out=handed_out, num_kills=2)
    assert killed.result(undisturbed) == {
        "side": "ours",
        "kills": 2,
        "steps": 3,
        "prompts_trained": 6,
        "prompts_skipped": 0,
        "prompts_repeated": 0,
        "steps_redone": 1,
        "undisturbed_s": 10.0,
        "wall_s": 30.0,
        "lost_s_per_kill": 10.0,
        "start_to_first_step_s": 2.0,
    }


def test_prompts_of_an_undone_step_are_skipped_unless_a_later_step_trains_them(
    tmp_path, undisturbed
):
    steps = [(1, [0, 1]), (2, [2, 3]), (2, [4, 5]), (3, [6, 7])]  # 2 and 3 never come again
    handed_out = [{"numbers": numbers} for numbers in ([0, 1], [2, 3], [4, 5], [6, 7])]
    killed = recorded(tmp_path / "killed", steps=steps, handed_out=handed_out).result(undisturbed)
    assert (killed["prompts_trained"], killed["prompts_skipped"]) == (6, 2)
    assert (killed["prompts_repeated"], killed["steps_redone"]) == (0, 1)


def test_prompts_of_two_steps_of_the_final_model_are_repeated(tmp_path, undisturbed):
    steps = [(1, [0, 1]), (2, [2, 3]), (3, [1, 2])]  # the data started again
    handed_out = [{"numbers": [0, 1, 2, 3]}, {"numbers": [1, 2]}]
    killed = recorded(tmp_path / "killed", steps=steps, handed_out=handed_out).result(undisturbed)
    assert (killed["prompts_trained"], killed["prompts_repeated"]) == (4, 2)
    assert (killed["prompts_skipped"], killed["steps_redone"]) == (0, 0)


def test_step_that_the_final_model_lacks_is_an_error(tmp_path, undisturbed):
    killed = recorded(tmp_path / "killed", steps=[(1, [0]), (3, [1])], handed_out=[{"numbers": []}])
    with pytest.raises(AssertionError, match="each step is in the final model"):
        killed.result(undisturbed)


@pytest.mark.parametrize("cut", ['{"st', '{"step": 2, "prompts": [1, 2'])
def test_row_that_a_kill_cut_off_does_not_count_and_does_not_spoil_the_next(tmp_path, cut):
    file = tmp_path / "steps.jsonl"
    file.write_text(f'{{"step": 1}}\n{cut}')
    assert crash_and_resume._rows(file) == [{"step": 1}]
    crash_and_resume._append(file, {"step": 2})
    assert crash_and_resume._rows(file) == [{"step": 1}, {"step": 2}]
