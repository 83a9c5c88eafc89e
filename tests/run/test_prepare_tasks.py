"""What a run makes of [tasks] and of what shapes its data, before any worker starts."""

import json
from pathlib import Path

import pytest
from chat_model import make_chat_model
from fake_checkpoint import write_fake_checkpoint
from tiny_model import make_tiny_model

from millrace.config import load_config
from millrace.core.errors import CheckpointError, ConfigError
from millrace.environments.tools.mcp_server import WithServers
from millrace.monitoring.run_dir import RunDir
from millrace.run.prepare import PreparedRun, prepare
from millrace.scoring.shaping import FirstSelection, RocSelection
from millrace.tasks.streams import Curriculum


def length(completions, **columns):
    return [len(text) for text in completions]


def listed():
    return [{"prompt": f"{n}*1="} for n in range(3)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("project")
    make_tiny_model(folder / "model")
    rows = [json.dumps({"prompt": f"{n}+1="}) for n in range(4)]
    (folder / "sums.jsonl").write_text("\n".join(rows))
    (folder / "products.py").write_text(
        "def listed():\n    return [{'prompt': f'{n}*1='} for n in range(3)]\n"
    )
    return folder


def prepared(folder: Path, **settings) -> PreparedRun:
    config = load_config({"model": str(folder / "model"), **settings})
    return prepare(config, scorers=[length])


def sources(folder: Path) -> dict[str, dict]:
    return {
        "sums": {"path": str(folder / "sums.jsonl"), "weight": 3.0},
        "products": {"generator": f"{folder}/products.py:listed"},
    }


def test_sources_are_mixed_by_weight_and_tasks_name_their_source(folder):
    stream = prepared(folder, tasks={"source": sources(folder), "order": "sequential"}).tasks
    drawn = [stream.task(number) for number in range(8)]
    assert [task.source for task in drawn] == ["sums", "sums", "products", "sums"] * 2
    assert drawn[0].prompt == "0+1="
    assert drawn[2].prompt == "0*1="


def test_sources_without_names_are_refused(folder):
    with pytest.raises(ConfigError, match=r"tables by name; write \[tasks.source.NAME\] instead"):
        prepared(folder, tasks={"source": [{"path": str(folder / "sums.jsonl")}]})


def test_tasks_from_python_do_not_mix_with_sources(folder):
    with pytest.raises(ConfigError, match=r"both from Python and from \[tasks.source\]"):
        prepare(
            load_config({"model": str(folder / "model"), "tasks": {"source": sources(folder)}}),
            tasks=listed(),
            scorers=[length],
        )


def test_conversations_that_are_examples_are_refused(tmp_path):
    make_chat_model(tmp_path / "model")
    chat = [{"role": "user", "content": "1"}, {"role": "assistant", "content": "2"}]
    with pytest.raises(ConfigError, match="train on the conversations with `millrace sft`"):
        prepare(
            load_config({"model": str(tmp_path / "model")}),
            tasks=[{"messages": chat}],
            scorers=[length],
        )


def test_single_task_list_has_no_source_name(folder):
    path = {"path": str(folder / "sums.jsonl")}
    stream = prepared(folder, tasks={**path, "order": "sequential"}).tasks
    assert [stream.task(number).prompt for number in range(2)] == ["0+1=", "1+1="]
    assert stream.task(0).source == ""
    assert isinstance(prepared(folder, tasks={**path, "order": "curriculum"}).tasks, Curriculum)


def test_mcp_servers_alone_are_an_environment_that_needs_a_scorer(folder):
    pytest.importorskip("mcp")
    config = {
        "model": str(folder / "model"),
        "tasks": {"path": str(folder / "sums.jsonl")},
        "environment": {"mcp": [{"command": ["python", "server.py"]}]},
    }
    assert isinstance(prepare(load_config(config), scorers=[length]).environment, WithServers)
    with pytest.raises(ConfigError, match="The run has no scorer"):
        prepare(load_config(config))


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"rollout": {"filter": [{"type": "zero"}]}}, "'rollout.filter.type' = 'zero'"),
        ({"rollout": {"selection": "best"}}, "'rollout.selection.type' = 'best'"),
        ({"scoring": {"penalty": [{"type": "linear"}]}}, "'scoring.penalty.max_tokens' is missing"),
        (
            {"scoring": {"penalty": [{"type": "linear", "max_tokens": 9, "name": "length"}]}},
            "Two parts of the score are named 'length'",
        ),
    ],
)
def test_typo_in_data_shaping_is_reported_before_the_start(folder, settings, sentence):
    with pytest.raises(ConfigError, match=sentence):
        prepared(folder, tasks={"path": str(folder / "sums.jsonl")}, **settings)


def test_resumed_run_restores_tasks_and_solve_rates_of_its_checkpoint(folder, tmp_path):
    tasks = {"source": sources(folder), "order": "curriculum"}
    first = prepared(folder, tasks=tasks).tasks
    for number in range(40):
        first.task(number)
        first.observe(number, number % 2)
        first.finish(number)
    open_tasks = [first.task(number) for number in (40, 41)]
    checkpoint = tmp_path / "run" / "checkpoints" / "step_3"
    cursor = {
        "step": 3,
        "version": 3,
        "next_number": 42,
        "unfinished": [40, 41],
        "tasks": first.state(),
    }
    write_fake_checkpoint(checkpoint, run_state=cursor)
    config = load_config(
        {"model": str(folder / "model"), "run_dir": str(tmp_path / "run"), "tasks": tasks}
    )
    resumed = prepare(config, scorers=[length], resume=True)
    assert resumed.cursor.version == 3
    assert resumed.cursor.unfinished == (40, 41)
    assert [resumed.tasks.task(number) for number in (40, 41)] == open_tasks
    assert [resumed.tasks.task(n) for n in range(42, 80)] == [first.task(n) for n in range(42, 80)]


def test_resumed_run_skips_damaged_checkpoints_with_a_warning(folder, tmp_path):
    config = load_config(
        {
            "model": str(folder / "model"),
            "run_dir": str(tmp_path),
            "tasks": {"path": str(folder / "sums.jsonl")},
        }
    )
    steps = [tmp_path / "checkpoints" / f"step_{step}" for step in (1, 2, 3)]
    for version, directory in enumerate(steps, start=1):
        cursor = {"step": version, "version": version, "next_number": 8, "unfinished": []}
        write_fake_checkpoint(directory, run_state=cursor)
    for directory in steps[1:]:
        (directory / "trainer_state.pt").write_text("[]")
    resumed = prepare(config, scorers=[length], resume=True)
    assert (resumed.checkpoint, resumed.cursor.version) == (steps[0], 1)
    for path, told in zip(steps[:0:-1], resumed.warnings, strict=True):
        assert str(path) in told
    (steps[0] / "trainer_state.pt").unlink()
    with pytest.raises(CheckpointError, match=r"has no checkpoint .*step_3.*step_2.*step_1.*"):
        prepare(config, scorers=[length], resume=True)


def test_checkpoint_of_another_model_is_refused(folder, tmp_path):
    checkpoint = tmp_path / "checkpoints" / "step_1"
    cursor = {"step": 1, "version": 1, "next_number": 8, "unfinished": []}
    write_fake_checkpoint(checkpoint, run_state=cursor, num_layers=3)
    settings = {
        "model": str(folder / "model"),
        "run_dir": str(tmp_path),
        "tasks": {"path": str(folder / "sums.jsonl")},
    }
    with pytest.raises(ConfigError, match=r"whose num_hidden_layers is 3, and that of model\.path"):
        prepare(load_config(settings), scorers=[length], resume=True)


def test_run_without_a_checkpoint_resumes_with_the_same_policies_only(folder, tmp_path):
    settings = {
        "model": str(folder / "model"),
        "run_dir": str(tmp_path / "run"),
        "tasks": {"path": str(folder / "sums.jsonl")},
    }
    started = load_config({**settings, "policies": {"proposer": {}, "solver": {}}})
    run_dir = RunDir(started.run_dir)
    run_dir.open(started, resume=False)
    run_dir.close()
    run_dir.journal.mkdir()
    with pytest.raises(ConfigError, match=r"was trained with the policies proposer, solver; to"):
        prepare(load_config(settings), scorers=[length], resume=True)


def test_no_policy_of_several_learns_from_a_teacher(folder):
    async def play(task, agent):
        await agent.role("solver").complete("1+1=")

    policies = {"proposer": {}, "solver": {"loss": {"type": "distil"}}}
    config = load_config(
        {
            "model": str(folder / "model"),
            "tasks": {"path": str(folder / "sums.jsonl")},
            "policies": policies,
        }
    )
    with pytest.raises(ConfigError, match=r"policies\.solver\.loss\.distil = 'reverse_kl' learns"):
        prepare(config, scorers=[length], environment=play)


def test_evaluation_engines_need_held_out_tasks(folder):
    path = {"path": str(folder / "sums.jsonl")}
    with pytest.raises(ConfigError, match=r"evaluate\.engines = 1 have no tasks to evaluate"):
        prepared(folder, tasks=path, evaluate={"engines": 1})


def test_selection_and_evaluation_share_the_solved_score(folder):
    path = {"path": str(folder / "sums.jsonl")}
    half = prepared(folder, tasks=path, evaluate={"solved_at": 0.5}).shaping
    assert half.selection == RocSelection(solved_at=0.5)
    own = prepared(folder, tasks=path, rollout={"selection": {"type": "roc", "solved_at": 0.25}})
    assert own.shaping.selection == RocSelection(solved_at=0.25)
    first = prepared(folder, tasks=path, rollout={"selection": "first"}).shaping
    assert first.selection == FirstSelection()
