from millrace.config import load_config
from millrace.demo.run import SETTINGS
from millrace.demo.task import (
    MAX_DIGITS,
    MIN_DIGITS,
    exact,
    held_out_tasks,
    is_held_out,
    make_tasks,
    train_tasks,
)


def _number(task: dict[str, str]) -> str:
    return task["prompt"].removeprefix("sort ").removesuffix("=")


def test_the_answer_holds_the_digits_of_the_prompt_in_ascending_order() -> None:
    for task in make_tasks(200, seed=1):
        assert list(task["answer"]) == sorted(_number(task))


def test_every_number_of_digits_turns_up_and_no_other() -> None:
    lengths = {len(task["answer"]) for task in make_tasks(200, seed=1)}
    assert lengths == set(range(MIN_DIGITS, MAX_DIGITS + 1))


def test_the_same_seed_gives_the_same_tasks_and_another_seed_others() -> None:
    assert make_tasks(50, seed=1) == make_tasks(50, seed=1)
    assert make_tasks(50, seed=1) != make_tasks(50, seed=2)


def test_no_held_out_number_is_trained_on_whatever_the_seeds() -> None:
    trained = {task["prompt"] for seed in range(5) for task in make_tasks(2000, seed=seed)}
    held_out = {task["prompt"] for task in make_tasks(2000, seed=3, held_out=True)}
    assert trained.isdisjoint(held_out)
    assert {task["prompt"] for task in train_tasks()}.isdisjoint(
        task["prompt"] for task in held_out_tasks()
    )


def test_about_one_number_in_eight_is_held_out() -> None:
    share = sum(is_held_out(f"{number:04}") for number in range(10_000)) / 10_000
    assert 0.11 < share < 0.14


def test_the_reward_is_one_for_exactly_the_right_digits() -> None:
    completions = ["0125", "0152", "012", "01255", ""]
    assert exact(completions, answer=["0125"] * 5) == [1.0, 0.0, 0.0, 0.0, 0.0]


def test_the_reward_ignores_columns_it_does_not_need() -> None:
    assert exact(["12"], answer=["12"], prompts=["sort 21="], completion_ids=[[3, 4]]) == [1.0]


def test_max_new_tokens_fits_the_longest_answer_and_its_end() -> None:
    settings = load_config(SETTINGS)
    assert settings.sampling.max_new_tokens > MAX_DIGITS


def test_a_run_never_repeats_a_training_task() -> None:
    trainer = load_config(SETTINGS).trainer
    assert trainer.steps * trainer.groups_per_step <= len(train_tasks())
