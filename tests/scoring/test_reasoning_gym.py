"""Tasks and scores of the real package; skipped if it is not installed."""

import sys

import pytest

from millrace.config import load_config
from millrace.core.errors import ConfigError
from millrace.scoring.verifiers import ReasoningGym
from millrace.tasks.loading import Puzzles, load_section, load_tasks

LEGS = {"type": "reasoning_gym", "dataset": "leg_counting", "size": 3, "seed": 5}


def tasks_of(**changes):
    config = load_config({"model": "m", "tasks": {"generator": {**LEGS, **changes}}})
    return load_section(config.tasks, None, section="tasks")


def test_missing_package_error_names_the_extra(monkeypatch):
    for name in [name for name in sys.modules if name.startswith("reasoning_gym.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    with pytest.raises(ConfigError, match=r"which is not installed; install millrace\[reasoning-"):
        ReasoningGym()
    with pytest.raises(ConfigError, match=r"install millrace\[reasoning-gym\]"):
        tasks_of()


def test_generator_yields_puzzles_of_its_dataset_seed_and_config():
    gym = pytest.importorskip("reasoning_gym")
    tasks = tasks_of(config={"max_animals": 3})
    expected = gym.create_dataset("leg_counting", size=3, seed=5, max_animals=3)
    assert [task.columns["answer"] for task in tasks] == [entry["answer"] for entry in expected]
    system, user = tasks[0].prompt
    assert "<answer>" in system["content"]
    assert user == {"role": "user", "content": expected[0]["question"]}
    (bare, *_) = tasks_of(config={"max_animals": 3}, system="", chat=False)
    assert bare.prompt == expected[0]["question"]


def test_answers_are_scored_by_the_dataset_of_their_task():
    pytest.importorskip("reasoning_gym")
    right, other, *_ = tasks_of()
    answer = right.columns["answer"]
    completions = [
        f"<answer>1</answer> no: <answer> {answer}\n</answer>",
        answer,
        "<answer>x</answer>",
    ]
    puzzles = [right.columns["puzzle"]] * 2 + [other.columns["puzzle"]]
    assert ReasoningGym()(completions, puzzle=puzzles) == [1.0, 0.0, 0.0]
    assert ReasoningGym(tag="")([answer], puzzle=[right.columns["puzzle"]]) == [1.0]
    assert ReasoningGym()([answer], puzzle=[None]) == [None]


# Entries of these datasets hold tuples or numpy scalars, or differ between processes. The last one
# raises for an answer that is not a number.
@pytest.mark.parametrize("name", ["rearc", "knights_knaves", "word_ladder", "prime_factorization"])
def test_entries_survive_serialisation(name):
    pytest.importorskip("reasoning_gym")
    (task,) = load_tasks(Puzzles(dataset=name, size=1))
    said = [f"<answer>{task.columns['answer']}</answer>", "<answer>no idea</answer>"]
    right, wrong = ReasoningGym()(said, puzzle=[task.columns["puzzle"]] * 2)
    assert right == 1.0
    assert wrong < 0.1


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"dataset": "legs"}, "reasoning_gym has no dataset 'legs'; the datasets are: .*ab, "),
        (
            {"config": {"max_legs": 3}},
            r"'leg_counting' of reasoning_gym does not accept .*max_legs",
        ),
        ({"size": 0}, "size' = 0: input should be greater than 0"),
        ({"sized": 3}, "Unknown setting 'tasks.generator.sized' of 'reasoning_gym'; did you mean"),
        ({"type": "gym"}, "Setting 'tasks.generator.type' = 'gym' is not known"),
    ],
)
def test_invalid_generators_are_refused(changes, sentence):
    pytest.importorskip("reasoning_gym")
    with pytest.raises(ConfigError, match=sentence):
        tasks_of(**changes)
