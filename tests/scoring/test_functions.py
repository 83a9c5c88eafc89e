import asyncio
import functools
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from millrace.core.errors import ConfigError, ScoreError
from millrace.core.records import Task
from millrace.scoring.functions.user_function import check_rewards, inspect_reward

CALL = {
    "prompts": ["1+1=", "1+1="],
    "completions": ["2", "3"],
    "completion_ids": [[7], [8]],
    "columns": {"answer": ["2", "2"], "level": [1, 1]},
}


def test_a_function_with_kwargs_gets_everything():
    function = inspect_reward(lambda **everything: everything, name="all")
    assert function(**CALL) == {
        "prompts": ["1+1=", "1+1="],
        "completions": ["2", "3"],
        "completion_ids": [[7], [8]],
        "answer": ["2", "2"],
        "level": [1, 1],
    }


def test_function_without_kwargs_gets_only_its_parameters():
    def exact(completions, answer, *, strict=True):
        return [float(c == a) for c, a in zip(completions, answer, strict=strict)]

    assert inspect_reward(exact, name="exact")(**CALL) == [1.0, 0.0]


def test_methods_and_callable_objects_are_functions():
    class Judge:
        def __call__(self, completions):
            return [len(c) for c in completions]

        def method(self, answer):
            return answer

    assert inspect_reward(Judge(), name="object")(**CALL) == [1, 1]
    assert inspect_reward(Judge().method, name="method")(**CALL) == ["2", "2"]


def test_async_functions_are_recognised_in_every_shape():
    async def plain(completions):
        return [1.0] * len(completions)

    class Judge:
        async def __call__(self, completions):
            return [2.0] * len(completions)

    for function, value in [(plain, 1.0), (functools.partial(plain), 1.0), (Judge(), 2.0)]:
        inspected = inspect_reward(function, name="judge")
        assert inspected.is_async
        assert asyncio.run(inspected(**CALL)) == [value, value]
    assert not inspect_reward(lambda **_: [], name="sync").is_async


def test_a_positional_only_parameter_is_refused():
    def exact(completions, /):
        return []

    with pytest.raises(ConfigError, match=r"'exact' takes 'completions' by position only.*'/'"):
        inspect_reward(exact, name="exact")


def test_missing_column_is_found_before_the_run():
    def exact(prompts, completions, answer, tolerance=0.0, **kwargs):
        return []

    function = inspect_reward(exact, name="exact")
    whole = Task(prompt="1+1=", columns={"answer": "2"})
    function.check_columns([whole])
    with pytest.raises(ConfigError, match="'exact' needs the column 'answer', which task 1 does"):
        function.check_columns([whole, Task(prompt="1+2=", columns={"result": "3"})])


@pytest.mark.parametrize(
    "value",
    [
        [1, None],
        (True, None),
        [np.float32(1), None],
        [torch.tensor(1.0), None],
        [Fraction(1), None],
    ],
)
def test_numbers_of_any_kind_become_floats(value):
    rewards = check_rewards(value, name="r", num_completions=2)
    assert rewards == [1.0, None]
    assert type(rewards[0]) is float


@pytest.mark.parametrize("value", [np.array([1.0, 0.5]), torch.tensor([1.0, 0.5])])
def test_arrays_become_floats(value):
    assert check_rewards(value, name="r", num_completions=2) == [1.0, 0.5]


@pytest.mark.parametrize(
    ("value", "sentence"),
    [
        ([1.0], "Reward 'r' returned 1 values for 2 completions; return a list with one"),
        ([1.0, float("nan")], r"Reward 'r' returned nan \(float\) for completion 1; return a list"),
        ([float("inf"), 1.0], r"returned inf \(float\) for completion 0"),
        ([10**400, 1.0], r"for completion 0"),
        (["yes", 1.0], r"returned 'yes' \(str\) for completion 0"),
        ([[1.0], 1.0], r"returned \[1.0\] \(list\) for completion 0"),
        (None, r"returned None \(NoneType\); return a list with one number per completion"),
        (0.5, r"returned 0.5 \(float\); return a list"),
        ("no", r"returned 'no' \(str\); return"),
        (np.float64(0.5), r"returned .*0.5.* \(float64\); return"),
        ({0: 1.0, 1: 1.0}, r"returned \{0: 1.0, 1: 1.0\} \(dict\)"),
        (np.zeros((2, 1)), r"returned \[0.0\] \(list\) for completion 0"),
    ],
)
def test_invalid_rewards_are_score_errors(value, sentence):
    with pytest.raises(ScoreError, match=sentence):
        check_rewards(value, name="r", num_completions=2)


@given(st.lists(st.none() | st.booleans() | st.integers(-9, 9) | st.floats(-1e9, 1e9)))
def test_any_list_of_finite_numbers_and_none_passes_unchanged(values):
    assert check_rewards(values, name="r", num_completions=len(values)) == values


def test_required_trl_arguments_that_are_not_passed_are_refused():
    def needs(completions, trainer_state):
        return [0.0]

    def can_do_without(completions, environments=None, log_metric=None):
        return [0.0]

    inspect_reward(can_do_without, name="f").check_columns([Task(prompt="p")])
    with pytest.raises(ConfigError, match="'f' needs 'trainer_state', which TRL passes and Millr"):
        inspect_reward(needs, name="f").check_columns([Task(prompt="p")])
