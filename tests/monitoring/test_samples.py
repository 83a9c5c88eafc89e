import json

import numpy as np

from millrace.core.records import Episode, Group, Rollout, Sampling, Score, Task, Turn
from millrace.monitoring.files.episodes import StepLog, sample_row


def episode(completion: str, *, versions: list[int]) -> Episode:
    stamps = np.array([-1, *versions], dtype=np.int32)  # after a prompt of one token
    rollout = Rollout(
        tokens=np.zeros(len(stamps), dtype=np.int32),
        mask=stamps >= 0,
        engine_logprobs=np.zeros(len(stamps), dtype=np.float32),
        versions=stamps,
        sampling=Sampling(),
    )
    turn = Turn(prompt="2+2=", completion=completion, finish="stop")
    return Episode(turns=(turn,), rollouts=(rollout,))


def group(number: int, *, answer: object = "4") -> Group:
    return Group(
        number=number,
        task=Task(prompt="2+2=", columns={"answer": answer}),
        episodes=(episode("4", versions=[3, 4]), episode("vier", versions=[4, 4, 4])),
        scores=(
            Score(total=1.0, parts={"correct": 1.0, "short": None}),
            Score(total=0.0, parts={"correct": 0.0, "short": None}),
        ),
        advantages=np.array([0.5, -0.5], dtype=np.float32),
    )


def read(path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_an_episode_is_readable(tmp_path):
    StepLog(tmp_path, per_step=1, row=sample_row).write(7, [group(12)])
    assert read(tmp_path / "step_7.jsonl") == [
        {
            "group": 12,
            "prompt": "2+2=",
            "completion": "4",
            "finish": "stop",
            "score": 1.0,
            "parts": {"correct": 1.0, "short": None},
            "advantage": 0.5,
            "versions": [3, 4],
            "tokens": 2,
            "columns": {"answer": "4"},
        }
    ]


def test_different_groups_come_before_more_of_one_group(tmp_path):
    StepLog(tmp_path, per_step=3, row=sample_row).write(1, [group(1), group(2)])
    found = [(row["group"], row["completion"]) for row in read(tmp_path / "step_1.jsonl")]
    assert found == [(1, "4"), (2, "4"), (1, "vier")]


def test_step_with_few_episodes_writes_all_of_them(tmp_path):
    StepLog(tmp_path, per_step=10, row=sample_row).write(1, [group(1)])
    assert len(read(tmp_path / "step_1.jsonl")) == 2


def test_zero_per_step_writes_no_file(tmp_path):
    StepLog(tmp_path, per_step=0, row=sample_row).write(1, [group(1)])
    assert list(tmp_path.iterdir()) == []


def test_a_column_without_json_form_is_shown_as_its_repr(tmp_path):
    StepLog(tmp_path, per_step=1, row=sample_row).write(1, [group(1, answer={1, 2})])
    assert read(tmp_path / "step_1.jsonl")[0]["columns"] == {"answer": "{1, 2}"}
