"""Tasks from Parquet files and Hugging Face datasets."""

import subprocess
import sys
from datetime import date
from pathlib import Path

import pytest

from millrace.config import load_config
from millrace.core.errors import ConfigError
from millrace.core.records import Task
from millrace.tasks.loading import load_path, load_section, load_tasks

pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")

CHAT = [{"role": "user", "content": "1+1?"}]
ROWS = [{"question": "1+1=", "answer": 2, "day": date(2024, 1, 1)}] * 3
COLUMNS = {"prompt": "question", "answer": "answer"}


@pytest.fixture
def parquet(tmp_path):
    def write(rows, name="tasks.parquet") -> Path:
        pq.write_table(pa.Table.from_pylist(rows), tmp_path / name)
        return tmp_path / name

    return write


def test_parquet_file_has_one_task_per_row(parquet):
    path = parquet([{"prompt": "1+1=", "n": 2, "x": 0.5}, {"prompt": "2+2=", "n": None, "x": 1.0}])
    expected = [
        Task(prompt="1+1=", columns={"n": 2, "x": 0.5}),
        Task(prompt="2+2=", columns={"n": None, "x": 1.0}),
    ]
    assert load_tasks(path) == load_tasks(str(path)) == expected


def test_parquet_messages_become_a_chat_prompt(parquet):
    assert load_tasks(parquet([{"prompt": CHAT}])) == [Task(prompt=CHAT)]


def test_folder_reads_parquet_files_in_name_order(parquet):
    folder = parquet([{"prompt": "b"}], "part-1.parquet").parent
    parquet([{"prompt": "a"}], "part-0.parquet")
    assert [task.prompt for task in load_tasks(folder)] == ["a", "b"]


def test_only_requested_columns_are_read(parquet):
    path = str(parquet(ROWS))
    assert load_path(path, columns=COLUMNS) == [Task(prompt="1+1=", columns={"answer": 2})] * 3
    with pytest.raises(ConfigError, match=r"row 0 has a column 'day' that holds .* of type date"):
        load_path(path, columns={**COLUMNS, "day": "day"})


def test_columns_get_the_names_that_tasks_use(parquet):
    columns = {"prompt": "question", "reference": "answer", "text": "question"}
    expected = Task(prompt="1+1=", columns={"reference": 2, "text": "1+1="})
    assert load_path(str(parquet(ROWS)), columns=columns) == [expected] * 3


def test_jsonl_supports_columns(tmp_path):
    path = tmp_path / "tasks.jsonl"
    path.write_text('{"question": "1+1=", "answer": 2, "note": "x"}\n')
    assert load_path(str(path), columns=COLUMNS) == [Task(prompt="1+1=", columns={"answer": 2})]
    with pytest.raises(ConfigError, match=r"line 1 has no 'result', only .*; every task needs one"):
        load_path(str(path), columns={"prompt": "question", "result": "result"})


def test_missing_column_raises_config_error_with_existing_columns(parquet):
    path = str(parquet(ROWS))
    with pytest.raises(ConfigError, match="has no column 'text', only question, answer, day; set"):
        load_path(path, columns={"prompt": "text"})
    with pytest.raises(ConfigError, match="row 0 has no 'prompt', only"):
        load_path(path)


def test_unreadable_parquet_file_raises_config_error(tmp_path):
    broken = tmp_path / "broken.parquet"
    broken.write_text("no parquet at all")
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(ConfigError, match=r"Task file '.*broken.parquet' cannot be read"):
        load_tasks(broken)
    with pytest.raises(ConfigError, match=r"No task file 'gone.parquet'; check the path"):
        load_tasks("gone.parquet")
    with pytest.raises(ConfigError, match="holds neither Parquet files nor a dataset"):
        load_tasks(empty)


def test_saved_dataset_is_read_by_split(tmp_path):
    datasets = pytest.importorskip("datasets")
    train, test = (datasets.Dataset.from_list(rows) for rows in (ROWS, ROWS[:1]))
    train.save_to_disk(str(tmp_path / "one"))
    datasets.DatasetDict(train=train, test=test).save_to_disk(str(tmp_path / "two"))
    expected = [Task(prompt="1+1=", columns={"answer": 2})]
    assert load_path(str(tmp_path / "one"), columns=COLUMNS) == expected * 3
    assert load_path(str(tmp_path / "two" / "test"), columns=COLUMNS) == expected
    with pytest.raises(ConfigError, match=r"has the splits train, test; add one .*two/SPLIT'"):
        load_path(str(tmp_path / "two"), columns=COLUMNS)
    with pytest.raises(ConfigError, match="has no column 'text', only question, answer, day"):
        load_path(str(tmp_path / "one"), columns={"prompt": "text"})


def test_hub_path_names_dataset_subset_and_split(monkeypatch):
    datasets = pytest.importorskip("datasets")
    calls = []

    def load_dataset(name, subset, *, split):
        calls.append((name, subset, split))
        dataset = datasets.Dataset.from_list([{"prompt": "1+1="}])
        return dataset if split else datasets.DatasetDict(train=dataset, test=dataset)

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    assert load_path("hub:openai/gsm8k:main:train[:1000]") == [Task(prompt="1+1=")]
    assert load_path("hub:a/b::train") == [Task(prompt="1+1=")]
    with pytest.raises(ConfigError, match=r"splits train, test; .*: 'hub:a/b:default:SPLIT'"):
        load_path("hub:a/b")
    assert calls == [
        ("openai/gsm8k", "main", "train[:1000]"),
        ("a/b", None, "train"),
        ("a/b", None, None),
    ]


def test_path_settings_reach_the_loader(parquet):
    table = {"path": str(parquet(ROWS)), "columns": COLUMNS}
    place = load_config({"model": "m", "tasks": table}).tasks
    expected = [Task(prompt="1+1=", columns={"answer": 2})] * 3
    assert load_section(place, None, section="tasks") == expected


def test_list_of_columns_keeps_their_names_and_the_prompt():
    place = load_config({"model": "m", "tasks": {"path": "p", "columns": ["answer"]}}).tasks
    assert place.columns == {"prompt": "prompt", "answer": "answer"}
    with pytest.raises(ConfigError, match=r"Setting 'tasks.columns' = \['a', 3\]: "):
        load_config({"model": "m", "tasks": {"path": "p", "columns": ["a", 3]}})


def test_hub_name_is_not_resolved_as_a_path(tmp_path):
    (tmp_path / "run.toml").write_text('model = "m"\n[tasks]\npath = "hub:owner/name"\n')
    assert load_config(tmp_path / "run.toml").tasks.path == "hub:owner/name"


def test_unreachable_hub_raises_config_error(tmp_path):
    pytest.importorskip("datasets")
    script = (
        "from millrace.tasks.loading import load_path\n"
        "from millrace.core.errors import ConfigError\n"
        "try: load_path('hub:nobody/nothing::train')\n"
        "except ConfigError as error: print(error)\n"
    )
    env = {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path), "PYTHONPATH": ":".join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, env=env, check=True
    )
    assert done.stdout.startswith("Dataset 'nobody/nothing' cannot be loaded from the hub (")
    assert done.stdout.count("\n") == 1


def test_missing_package_error_names_the_extra(parquet, monkeypatch):
    path = parquet(ROWS)
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ConfigError, match=r"needs pyarrow, which is not .* millrace\[datasets\]"):
        load_tasks(path)
    with pytest.raises(ConfigError, match=r"'a/b' needs datasets, which is not installed; install"):
        load_tasks("hub:a/b")
