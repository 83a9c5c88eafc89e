import json
import sys
from pathlib import Path

import numpy as np
import pytest

from millrace.core.errors import ConfigError
from millrace.core.records import Task
from millrace.tasks.loading import load_tasks

CHAT = [{"role": "user", "content": "1+1?"}]


@pytest.fixture
def write(tmp_path):
    def write(text: str, *, name: str = "tasks.jsonl") -> Path:
        path = tmp_path / name
        path.write_text(text, encoding="utf-8")
        return path

    return write


def test_jsonl_file_has_one_task_per_line(write):
    path = write('{"prompt": "1+1=", "answer": 2}\n\n' + json.dumps({"prompt": CHAT}) + "\r\n")
    expected = [Task(prompt="1+1=", columns={"answer": 2}), Task(prompt=CHAT)]
    assert load_tasks(path) == load_tasks(str(path)) == expected


def test_jsonl_lines_can_contain_unicode_line_separators(write):
    path = write('{"prompt": "a\u2028b\x85c"}\n')
    assert load_tasks(path) == [Task(prompt="a\u2028b\x85c")]


def test_rows_can_be_dicts_or_tasks():
    task = Task(prompt="b", columns={"n": [1, {"x": None}]})
    assert load_tasks([{"prompt": "a"}, task]) == [Task(prompt="a"), task]


def test_function_or_reference_is_called(write, monkeypatch, tmp_path):
    write("def make():\n    return [{'prompt': 'a', 'k': 1}]\nCOUNT = 3\n", name="my_tasks_a.py")
    monkeypatch.syspath_prepend(tmp_path)
    expected = [Task(prompt="a", columns={"k": 1})]
    assert load_tasks("my_tasks_a:make") == expected
    assert load_tasks(f"{tmp_path / 'my_tasks_a.py'}:make") == expected
    assert load_tasks(sys.modules["my_tasks_a"].make) == expected
    with pytest.raises(ConfigError, match="'my_tasks_a:COUNT' is 3, not a function"):
        load_tasks("my_tasks_a:COUNT")
    with pytest.raises(ConfigError, match="'my_tasks_a' has no 'build'"):
        load_tasks("my_tasks_a:build")


def test_raising_function_is_named_with_its_error():
    def broken():
        raise KeyError("split")

    with pytest.raises(
        ConfigError, match="'broken' raised KeyError: 'split'; it is called without"
    ):
        load_tasks(broken)


def test_missing_file_raises_config_error():
    with pytest.raises(ConfigError, match=r"No task file 'nowhere/tasks.jsonl'; check the path"):
        load_tasks("nowhere/tasks.jsonl")


@pytest.mark.parametrize("text", ["", "\n \n"])
def test_empty_file_raises_config_error(write, text):
    path = write(text)
    with pytest.raises(ConfigError, match=rf"{path}' is empty; at least one task is needed"):
        load_tasks(path)


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ('{"prompt": ', r"tasks.jsonl, line 2 is not valid JSON \(.*\): .*; write one object"),
        ('["1+1="]', r"line 2 is \['1\+1='\]; a task is an object with a 'prompt'"),
        (
            '{"question": "1+1="}',
            r"line 2 has no 'prompt', only \['question'\]; every",
        ),
        ('{"prompt": 3}', r"line 2 has the prompt 3; it must be a text or a non-empty list"),
        ('{"prompt": []}', r"line 2 has the prompt \[\]; it must be"),
        ('{"prompt": ""}', r"line 2 has an empty 'prompt'"),
        ('{"prompt": ["hi"]}', r"line 2 has the message 'hi' in its prompt; each must be"),
        ('{"prompt": [{"role": "user"}]}', r"has the message \{'role': 'user'\} in its prompt"),
        ('{"prompt": "a", "prompts": "b"}', r"line 2 has a column 'prompts', a name that reward"),
        ('{"prompt": "a", "completion_ids": 1}', r"column 'completion_ids'.*rename the column"),
        (
            '{"prompt": "a", "n": 18446744073709551616}',
            r"column 'n' that holds 18446744073709551616",
        ),
        (
            '{"prompt": "a", "n": {"deep": ["\\ud800"]}}',
            r"column 'n' that holds .*not valid Unicode",
        ),
        ('{"prompt": "\\ud800"}', r"line 2 has a 'prompt' that holds .*not valid Unicode"),
    ],
)
def test_invalid_line_raises_config_error_with_its_number(write, line, sentence):
    path = write('{"prompt": "fine"}\n' + line)
    with pytest.raises(ConfigError, match=sentence):
        load_tasks(path)


@pytest.mark.parametrize(
    ("rows", "sentence"),
    [
        ([], "The list of tasks gave no tasks"),
        ({"prompt": "a"}, r"The list of tasks gave \{'prompt': 'a'\}; a list of tasks is needed"),
        (7, "gave 7; a list of tasks is needed"),
        ([{"prompt": "a"}, "b"], "Task 1 is 'b'; a task is an object"),
        (
            [{"prompt": "a", "n": (1, 2)}],
            r"Task 0 has a column 'n' that holds \(1, 2\) of type tuple",
        ),
        (
            [{"prompt": "a", "n": np.float64(1)}],
            "column 'n' that holds .* of type float64; use texts",
        ),
        ([{"prompt": "a", "n": {1: 2}}], "column 'n' that holds the key 1; keys must be texts"),
        ([{"prompt": "a", 1: "x"}], "Task 0 has a column 1; column names must be texts"),
        ([Task(prompt="a", columns={"completions": 1})], "Task 0 has a column 'completions'"),
    ],
)
def test_invalid_row_raises_config_error_with_its_index(rows, sentence):
    with pytest.raises(ConfigError, match=sentence):
        load_tasks(rows)


def test_generator_function_that_raises_later_is_named_with_its_error():
    def broken():
        yield {"prompt": "a"}
        raise KeyError("split")

    with pytest.raises(ConfigError, match="'broken' raised KeyError: 'split'"):
        load_tasks(broken)
