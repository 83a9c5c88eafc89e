"""What a run makes of teachers and references before any worker starts."""

import json
from pathlib import Path

import pytest
from tiny_model import make_tiny_model

from millrace.config import load_config
from millrace.core.errors import ConfigError
from millrace.run.prepare import PreparedRun, prepare


def length(completions, **columns):
    return [len(text) for text in completions]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """With a policy, a teacher, and one that has another tokenizer."""
    folder = tmp_path_factory.mktemp("models")
    make_tiny_model(folder / "policy")
    make_tiny_model(folder / "teacher", seed=1)
    make_tiny_model(folder / "stranger")
    path = folder / "stranger" / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    vocab = tokenizer["model"]["vocab"]
    vocab["a"], vocab["b"] = vocab["b"], vocab["a"]
    path.write_text(json.dumps(tokenizer))
    return folder


def prepared(folder: Path, *scorers: dict, reward=length, held_out=None, **settings) -> PreparedRun:
    tables = [
        {**table, "model": str(folder / table["model"])} if "model" in table else table
        for table in scorers
    ]
    config = load_config({"model": str(folder / "policy"), "scorers": tables, **settings})
    tasks = [
        {"prompt": "1+1=", "answer": "2", "kind": "sum"},
        {"prompt": "1*1=", "answer": "1", "kind": "product"},
    ]
    given = [] if reward is None else [reward]
    return prepare(config, tasks=tasks, eval_tasks=held_out, scorers=given)


TEACHER = {"type": "teacher", "model": "teacher"}


def test_teacher_on_several_devices_is_refused(folder):
    with pytest.raises(ConfigError, match="lists 2 devices, and a scorer runs on one; keep one"):
        prepared(folder, TEACHER, placement={"models": {"teacher": ["cpu", "cpu"]}})


def test_settings_of_a_teacher_become_settings_of_the_loss(folder):
    table = {**TEACHER, "loss": "jsd", "beta": 0.2, "weight": 0.3, "top_k": 5}
    loss = prepared(folder, table).config.loss
    assert loss == {
        "type": "clipped",
        "distil": "jsd",
        "distil_beta": 0.2,
        "distil_weight": 0.3,
    }


def test_loss_settings_override_those_of_the_teacher(folder):
    settings = {"loss": {"distil": "reverse_kl", "distil_weight": 2.0}}
    loss = prepared(folder, {**TEACHER, "loss": "forward_kl", "top_k": 3}, **settings).config.loss
    assert (loss["distil"], loss["distil_weight"]) == ("reverse_kl", 2.0)


def test_several_teachers_share_the_tasks(folder):
    sums = {**TEACHER, "name": "sums", "column": "kind", "tasks": ["sum"]}
    products = {**TEACHER, "name": "products", "column": "kind", "tasks": ["product"]}
    assert [s.name for s in prepared(folder, sums, products).scorers] == [
        "sums",
        "products",
        "length",
    ]


def test_reference_scorer_enables_the_kl_term(folder):
    settings = {"loss": {"kl": 0.1}}
    assert prepared(folder, {"type": "reference"}, **settings).config.loss["kl"] == 0.1


@pytest.mark.parametrize(
    ("scorers", "settings", "message"),
    [
        ([{"type": "teacher", "model": "stranger"}], {}, "for example in 'a'"),
        ([{"type": "teacher", "model": "nothing"}], {}, "does not exist"),
        ([{"type": "teacher"}], {}, "set either model or url"),
        ([{**TEACHER, "url": "http://here"}], {}, "set either model or url"),
        ([{"type": "teacher", "url": "here"}], {}, "write 'http://HOST:PORT/PATH'"),
        ([{**TEACHER, "topk": 4}], {}, "did you mean 'top_k'?"),
        ([{**TEACHER, "loss": "kl"}], {}, "loss' = 'kl': input should be 'reverse_kl'"),
        ([{**TEACHER, "loss": "jsd", "top_k": 27}], {}, "knows 27 tokens, and top_k = 27"),
        ([{**TEACHER, "tasks": ["sums"]}], {}, "no [tasks.source.NAME] has such a name"),
        (
            [{**TEACHER, "tasks": ["division"], "column": "kind"}],
            {},
            "no task has such a value in its column 'kind'",
        ),
        ([{**TEACHER, "hint": "solution"}], {}, "column 'solution', which task '1+1=' does not"),
        ([{**TEACHER, "hint": "answer", "template": "{hint}"}], {}, "must contain {prompt}"),
        (
            [TEACHER, {**TEACHER, "name": "other", "weight": 2.0}],
            {},
            "'teacher' and 'other' differ in weight (1.0 and 2.0)",
        ),
        ([TEACHER], {"loss": {"distil": "none"}}, "loss.distil = 'none' ignores it"),
        ([TEACHER], {"loss": {"distil": "jsd"}}, "scorer 'teacher' returns none; set its"),
        ([], {"loss": {"type": "distil"}}, "learns from a teacher, and there is none"),
        (
            [{**TEACHER, "loss": "jsd", "top_k": 4}],
            {"sampling": {"top_p": 0.9}},
            "set loss.distil to 'reverse_kl'",
        ),
        ([TEACHER], {"loss": {"type": "online_dpo"}}, "learns from pairs alone"),
        ([{"type": "reference"}], {}, "a reference that nothing compares with; set loss.kl"),
        ([], {"loss": {"kl": 0.1}}, "loss.kl = 0.1 compares with a reference model"),
        (
            [{"type": "reference", "model": "stranger"}],
            {"loss": {"kl": 0.1}},
            "choose a model with the same tokenizer",
        ),
        ([{"type": "self_teacher"}], {}, "either lag or ema; set either"),
        (
            [{"type": "self_teacher", "lag": -1}],
            {},
            "lag' = -1: input should be greater than or equal",
        ),
        ([{"type": "self_teacher", "ema": 1.0}], {}, "ema' = 1.0: input should be less than 1"),
    ],
)
def test_impossible_combination_is_refused_before_the_start(folder, scorers, settings, message):
    with pytest.raises(ConfigError) as caught:
        prepared(folder, *scorers, **settings)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"rollout": {"filter": [{"type": "zero_variance"}]}}, "would drop every group"),
        ({"critic": {}}, "[critic] would learn that every value is 0"),
        ({"tasks": {"order": "curriculum"}}, "would count every task as unsolved"),
        ({"scoring": {"advantages": {"type": "best_worst"}}}, "would find no pairs"),
    ],
)
def test_settings_that_need_scores_are_refused_with_only_a_teacher(folder, settings, message):
    with pytest.raises(ConfigError) as caught:
        prepared(folder, TEACHER, reward=None, **settings)
    assert message in str(caught.value)
    prepared(folder, TEACHER, reward=None)


def test_held_out_tasks_need_a_scorer_that_gives_scores(folder):
    held_out = [{"prompt": "2+2=", "answer": "4", "kind": "sum"}]
    with pytest.raises(ConfigError, match="no scorer that says whether they are solved"):
        prepared(folder, TEACHER, reward=None, held_out=held_out)
