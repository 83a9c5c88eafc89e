"""Every way to get the settings wrong, and the sentence it earns."""

import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, get_args

import pytest
from pydantic import BaseModel

from millrace.config import (
    ModelConfig,
    RunConfig,
    load_config,
    parse_overrides,
)
from millrace.config.loading import MOVED, section_of
from millrace.controller.orders import ORDERS
from millrace.core.errors import ConfigError
from millrace.core.plugins import build_plugin, load_reference
from millrace.environments.branching import RECIPES
from millrace.inference.backend import EmbeddedBackend
from millrace.run.checks import check_roles, check_settings
from millrace.run.placement import local_devices
from millrace.scoring.advantages import ADVANTAGES, GaeAdvantages
from millrace.scoring.pool import SCORER_TYPES
from millrace.scoring.shaping import FILTERS, PENALTIES, SELECTIONS
from millrace.scoring.verifiers import VERIFIERS
from millrace.tasks.loading import GENERATORS

# Settings of all versions until now. Keys of plug-ins have their type: scorers[judge].url.
OLD_SETTINGS = Path(__file__).with_name("documented_settings.txt").read_text().split()
OLD_PLUGIN_KEYS = [name for name in OLD_SETTINGS if re.search(r"\[\w+\]", name)]
PLUGINS = {
    "buffer.order": ORDERS,
    "environment.recipe": RECIPES,
    "rollout.filter": FILTERS,
    "rollout.selection": SELECTIONS,
    "scorers": {**VERIFIERS, **SCORER_TYPES},
    "scoring.advantages": ADVANTAGES,
    "scoring.penalty": PENALTIES,
    "tasks.generator": GENERATORS,
}
REQUIRED = {
    "environment.models.NAME": {"path": "m"},
    "model": {"path": "m"},
    "scorers[]": {"function": "a:b"},
}


def sentence_of(table: dict[str, Any]) -> str:
    with pytest.raises(ConfigError) as caught:
        check_settings(load_config({"model": "m", **table}))
    assert "\n" not in str(caught.value)
    return str(caught.value)


# Wrong settings


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({"trainr": {}}, "Unknown setting 'trainr'; did you mean 'trainer'?"),
        ({"trainer": {"step": 3}}, "Unknown setting 'trainer.step'; did you mean 'steps'?"),
        ({"trainer": {"zzz": 3}}, "Unknown setting 'trainer.zzz'; valid here: steps, "),
        ({"zzz": 3}, "Unknown setting 'zzz'; valid here: run_dir, seed, model, "),
        (
            {"scorers": [{"function": "a:b", "wieght": 2}]},
            "Unknown setting 'scorers.0.wieght'; did you mean 'weight'?",
        ),
        ({"model": {"pth": "x", "path": "y"}}, "did you mean 'path'?"),
        ({"lora": {"rnk": 8}}, "Unknown setting 'lora.rnk'; did you mean 'rank'?"),
        ({"tasks": {"source": {"a": {"wight": 1}}}}, "source.a.wight'; did you mean 'weight'?"),
    ],
)
def test_unknown_key_is_reported_with_the_nearest_one(table, message):
    assert message in sentence_of(table)


@pytest.mark.parametrize(("old", "new"), MOVED.items())
def test_key_of_an_earlier_version_is_reported_with_its_present_name(old, new):
    table: Any = 1
    for part in reversed(old.split(".")):
        table = {part: table}
    expected = f"Setting {old!r} is now {new!r}; see docs/reference/configuration.md."
    assert sentence_of(table) == expected
    assert not is_setting(old)
    assert is_setting(new)


def is_setting(name: str) -> bool:
    """True for keys of sections, for options of the default engine, and for those of a critic's
    advantages."""
    section, _, key = name.rpartition(".")
    section = section.replace("environment.models.*.", "engine.")
    plugins = {"engine.options": EmbeddedBackend, "scoring.advantages": GaeAdvantages}
    if section in plugins:
        return key in {field.name for field in fields(plugins[section])}
    return key in section_of(name.split(".")).model_fields


@pytest.mark.parametrize("name", [name for name in OLD_SETTINGS if name not in OLD_PLUGIN_KEYS])
def test_every_setting_that_was_ever_documented_is_known_moved_or_removed_for_a_reason(name):
    *tables, key = name.split(".")
    table: Any = {**REQUIRED.get(".".join(tables), {}), key: 1}
    for part in reversed(tables):
        table = {part.removesuffix("[]"): [table] if part.endswith("[]") else table}
    found = refusal(table)
    known = rf"Setting '{re.escape(name.replace('[]', '.0'))}' = "
    named = r"Setting 'tasks\.source' = .* write \[tasks\.source\.NAME\] instead"
    moved = re.match(r"Setting '[\w.*]+' is now '(.*)'; see", found)
    removed = r"Setting '[\w.*]+' was removed: [\w ,.']+\.$"
    assert not found or moved or any(re.match(kind, found) for kind in (known, named, removed))
    assert moved is None or is_setting(moved[1])


@pytest.mark.parametrize("name", OLD_PLUGIN_KEYS)
def test_every_key_of_a_plugin_that_was_ever_documented_is_known_or_moved(name):
    section, kind, key = re.fullmatch(r"([\w.]+)\[(\w+)\]\.(\w+)", name).groups()
    if key not in {field.name for field in fields(PLUGINS[section][kind])}:
        moved = re.match(r"Setting .* is now '(.*)'; see", refusal({section: {key: 1}}))
        assert moved is not None
        assert is_setting(moved[1])


def refusal(table: dict[str, Any]) -> str:
    """Why these settings are refused; empty if they are not."""
    try:
        load_config({"model": "m", **table})
    except ConfigError as error:
        return str(error)
    return ""


def test_type_of_the_users_own_may_have_a_key_that_was_removed_from_others():
    removed = "Setting 'scorers.backoff_s' was removed: its value is fixed."
    assert sentence_of({"scorers": [{"type": "http", "backoff_s": 1}]}) == removed
    load_config({"model": "m", "scorers": ["exact", {"type": "a:B", "backoff_s": 1}]})


@pytest.mark.parametrize(
    ("hang_s", "limit_s"), [(3.0, 3.0), (60.0, 60.0), (300.0, 60.0), (1000.0, 200.0)]
)
def test_weight_updates_have_a_minute_unless_workers_hang_much_earlier_or_later(hang_s, limit_s):
    config = load_config({"model": "m", "supervision": {"hang_timeout_s": hang_s}})
    assert config.supervision.transfer_timeout_s == limit_s


def test_removed_key_is_accepted_only_with_its_former_default():
    assert sentence_of({"rollout": {"redundancy": 2}}) == (
        "Setting 'rollout.redundancy' was removed: set rollout.oversample, and rollout.selection to"
        " 'fastest'."
    )
    given = load_config({"model": "m", "rollout": {"redundancy": 0}, "weights": {"timeout_s": 60}})
    assert given == load_config({"model": "m"})


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({"trainer": {"steps": "many"}}, "Setting 'trainer.steps' = 'many': "),
        ({"trainer": {"steps": 1.5}}, "Setting 'trainer.steps' = 1.5: "),
        ({"trainer": {"steps": 0}}, "Setting 'trainer.steps' = 0: input should be greater than 0"),
        (
            {"optimizer": {"learning_rate": float("nan")}},
            "Setting 'optimizer.learning_rate' = nan: ",
        ),
        (
            {"optimizer": {"learning_rate": float("inf")}},
            "Setting 'optimizer.learning_rate' = inf: ",
        ),
        (
            {"optimizer": {"betas": [0.1, 0.2, 0.3]}},
            "'optimizer.betas' = [0.1, 0.2, 0.3]: ",
        ),
        ({"optimizer": {"schedule": "cosin"}}, "'constant', 'linear' or 'cosine'"),
        ({"trainer": 3}, "Setting 'trainer' = 3: "),
        ({"lora": {"rank": 0}}, "Setting 'lora.rank' = 0: input should be greater than 0"),
        ({"lora": {"target_modules": []}}, "Setting 'lora.target_modules' = []: "),
        ({"lora": {"dropout": 0.1}}, "Unknown setting 'lora.dropout'; valid here: rank, "),
        ({"sampling": {"temperature": 0}}, "Setting 'sampling.temperature' = 0: "),
        ({"sampling": {"top_p": 1.5}}, "Setting 'sampling.top_p' = 1.5: "),
        ({"sampling": {"min_p": 1}}, "Setting 'sampling.min_p' = 1: "),
        ({"rollout": {"group_size": 1}}, "Setting 'rollout.group_size' = 1: "),
        ({"optimizer": {"min_lr_ratio": 2}}, "Setting 'optimizer.min_lr_ratio' = 2: "),
        ({"buffer": {"max_staleness": -1}}, "Setting 'buffer.max_staleness' = -1: "),
        ({"engine": {"dtype": "float8"}}, "'float32', 'bfloat16' or 'float16'"),
        ({"weights": {"transport": "pigeon"}}, "Setting 'weights.transport' = 'pigeon': "),
        ({"weights": {"notify": ["http://a:1/b"]}}, "weights.transport = 'auto' writes none"),
        ({"weights": {"notify": ["a:1"], "transport": "disk"}}, "weights.notify"),
        ({"monitoring": {"progress": "loud"}}, "Setting 'monitoring.progress' = 'loud': "),
        ({"run_dir": 3}, "Setting 'run_dir' = 3: "),
        ({"model": 3}, "Setting 'model' = 3: "),
        ({"lora": "none"}, "Setting 'lora' = 'none': a table is needed, such as [lora]."),
        ({"loss": 3}, "Setting 'loss' = 3: "),
        ({"scorers": {"function": "a:b"}}, "Setting 'scorers' = {'function': 'a:b'}: "),
        ({"scorers": [{}]}, "Setting 'scorers.0' = {}: a scorer has either a function or a type"),
        (
            {"scorers": [{"function": "a:b", "type": "exact"}]},
            ": a scorer has either a function or a type; set one of the two",
        ),
    ],
)
def test_wrong_value_is_reported_with_its_field(table, message):
    assert message in sentence_of(table)


@pytest.mark.parametrize(
    ("table", "field"),
    [
        ({}, "model"),
        ({"model": {}}, "model.path"),
    ],
)
def test_missing_setting_is_reported(table, field):
    with pytest.raises(ConfigError, match=rf"Setting '{re.escape(field)}.*' is missing"):
        load_config(table)


def test_buffer_smaller_than_a_batch_is_refused():
    message = sentence_of({"buffer": {"capacity": 4}, "trainer": {"groups_per_step": 8}})
    assert "buffer.capacity = 4" in message
    assert "trainer.groups_per_step = 8" in message
    assert "raise buffer.capacity" in message


def test_barrier_needs_a_staleness_limit_of_zero():
    message = sentence_of({"weights": {"interrupt": "barrier"}, "buffer": {"max_staleness": 3}})
    assert "weights.interrupt = 'barrier'" in message
    assert "buffer.max_staleness = 3" in message
    assert "set buffer.max_staleness to 0" in message
    load_config({"model": "m", "weights": {"interrupt": "barrier"}, "buffer": {"max_staleness": 0}})


def test_additional_adapters_cannot_be_merged_or_named_base():
    adapters = {"adapters": {"judge": "a/folder"}}
    message = sentence_of({"engine": adapters, "lora": {"apply": "merged"}})
    assert "lora.apply = 'merged'" in message
    assert "(judge)" in message
    for lora in ({"apply": "auto"}, {"apply": "unmerged"}, None):
        load_config({"model": "m", "engine": adapters, "lora": lora})
    assert "named 'base'" in sentence_of({"engine": {"adapters": {"base": "a/folder"}}})


@pytest.mark.parametrize(
    ("buffer", "message"),
    [
        (
            {"staleness": "share"},
            "type 'share' has one key, max_share: the share of a group's tokens that may exceed",
        ),
        (
            {"staleness": {"type": "share", "max_share": 1.0}},
            "max_share: Input should be less than 1",
        ),
        (
            {"staleness": {"type": "oldest", "max_share": 0.1}},
            "type 'oldest' has no key 'max_share'; remove it",
        ),
        ({"staleness": "oldst"}, "'oldst' is not a staleness measure; did you mean 'oldest'?"),
        ({"replay": {"share": 0.1}}, "is less than one group; raise it to 0.125 or more"),
        ({"replay": {"max_staleness": 1}}, "Setting 'buffer.replay.max_staleness' = 1"),
        ({"replay": {"shares": 0.5}}, "'buffer.replay.shares'; did you mean 'share'"),
        ({"order": 3}, "Setting 'buffer.order' = 3"),
    ],
)
def test_impossible_buffer_is_refused_with_the_remedy(buffer, message):
    with pytest.raises(ConfigError) as caught:
        check_settings(load_config({"model": "m", "buffer": buffer}))
    assert message in str(caught.value)


def test_barrier_refuses_replay():
    table = {
        "model": "m",
        "buffer": {"max_staleness": 0, "replay": {}},
        "weights": {"interrupt": "barrier"},
    }
    with pytest.raises(ConfigError, match=r"on-policy, which buffer\.replay is not; remove"):
        check_settings(load_config(table))


def test_lora_refuses_an_update_of_routers():
    message = sentence_of({"lora": {}, "trainer": {"router_bias_rate": 0.001}})
    assert "changes routers, and [lora] publishes nothing but its adapter" in message


def test_order_can_be_a_name_alone():
    config = load_config({"model": "m", "buffer": {"order": "freshest"}})
    assert config.buffer.order == {"type": "freshest"}


def test_more_minibatches_than_groups_are_refused():
    message = sentence_of({"trainer": {"groups_per_step": 2, "minibatches": 3}})
    assert "trainer.minibatches = 3 is more than trainer.groups_per_step = 2" in message
    assert message.endswith("lower it.")


@pytest.mark.parametrize("section", ["tasks", "evaluate"])
def test_two_sources_of_tasks_are_refused(section):
    message = sentence_of({section: {"path": "a", "generator": "b:c"}})
    assert message == f"{section}.path and {section}.generator are both set; keep one."


@pytest.mark.parametrize(
    ("tasks", "message"),
    [
        ({"path": "a", "source": {"x": {"path": "b"}}}, "that one a [tasks.source.NAME], too"),
        ({"source": {"x": {"weight": 2.0}}}, "[tasks.source.x] has neither a path nor a generator"),
        ({"source": {"x": {"path": "a", "generator": "b:c"}}}, "source.x.path and tasks.source.x."),
        ({"source": {"x": {"path": "a", "weight": 0.0}}}, "'tasks.source.x.weight' = 0.0"),
    ],
)
def test_sources_that_cannot_be_mixed_are_refused(tasks, message):
    assert message in sentence_of({"tasks": tasks})


def test_selection_can_be_a_name_alone():
    config = load_config({"model": "m", "rollout": {"selection": "first"}})
    assert config.rollout.selection == {"type": "first"}


def test_several_greedy_samples_per_task_are_refused():
    message = sentence_of({"evaluate": {"samples": 4, "temperature": 0.0}})
    assert "evaluate.samples = 4 at evaluate.temperature = 0 are all the same" in message


def test_all_mistakes_are_reported_together():
    message = sentence_of({"trainer": {"steps": -1}, "bufer": {}})
    assert "'trainer.steps' = -1" in message
    assert "'bufer'; did you mean 'buffer'?" in message


def sections_in(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for argument in get_args(annotation):
        yield from sections_in(argument)


def test_there_are_at_most_161_settings():
    """A key of a table counts once for each place of that table."""
    assert sum(1 for _ in leaves(RunConfig)) <= 161


def leaves(section: type[BaseModel]) -> Iterator[str]:
    for name, field in section.model_fields.items():
        below = [leaf for inner in sections_in(field.annotation) for leaf in leaves(inner)]
        yield from below or [name]


def test_every_setting_has_a_description_that_stands_alone():
    for section in {RunConfig, *descendants(RunConfig)}:
        for name, field in section.model_fields.items():
            text = field.description or ""
            assert text.endswith("."), f"{section.__name__}.{name} has no description"
            words = text.split()
            assert words[0][:1].isupper(), f"{section.__name__}.{name}: {text}"
            assert words[0] not in {"Or", "So", "Of", "As", "With", "And", "Then"}, name
            assert len(words) > 2, f"{section.__name__}.{name}: {text}"


def descendants(section: type[BaseModel]) -> Iterator[type[BaseModel]]:
    for field in section.model_fields.values():
        for below in sections_in(field.annotation):
            yield below
            yield from descendants(below)


# A name alone stands for its table


def test_loss_scorer_and_tracker_can_be_names_alone():
    config = load_config(
        {
            "model": "m",
            "loss": "grpo",
            "scorers": ["exact", "rewards.py:digits", {"type": "numeric", "weight": 0.5}],
            "tracker": ["tensorboard"],
            "scoring": {"advantages": "group", "penalty": ["linear"]},
            "rollout": {"filter": ["zero_variance"]},
        }
    )
    assert config.loss == {"type": "grpo"}
    assert [scorer.type for scorer in config.scorers] == ["exact", None, "numeric"]
    assert config.scorers[1].function == "rewards.py:digits"
    assert config.tracker[0].type_settings == {"type": "tensorboard"}
    assert config.scoring.advantages == {"type": "group"}
    assert config.scoring.penalty == ({"type": "linear"},)
    assert config.rollout.filter == ({"type": "zero_variance"},)
    assert load_config({"model": "m", "scorers": "exact"}).scorers[0].type == "exact"


def test_override_within_a_table_keeps_its_name():
    table = {"model": "m", "loss": "grpo"}
    overrides = {"loss.high": 0.3, "model.trust_remote_code": True}
    config = load_config(table, overrides=overrides)
    assert config.loss == {"type": "grpo", "high": 0.3}
    assert config.model == ModelConfig(path="m", trust_remote_code=True)


# Placement and defaults that follow the situation


def test_engines_use_the_devices_of_a_list_in_turn():
    placement = load_config(
        {
            "model": "m",
            "environment": {"models": {"judge": {"path": "j"}}},
            "placement": {
                "engines": ["cuda:0", "cuda:1"],
                "models": {"judge": "cpu", "teacher": "cuda:1"},
            },
        }
    ).placement
    assert [placement.engine(i) for i in range(3)] == ["cuda:0", "cuda:1", "cuda:0"]
    assert placement.model("judge", 0) == "cpu"
    assert (placement.model("teacher"), placement.model("other")) == ("cuda:1", "auto")
    assert placement.trainer == ("auto",)


def test_engines_that_only_evaluate_use_the_next_devices_of_the_list():
    table = {
        "model": "m",
        "engine": {"count": 1},
        "evaluate": {"engines": 2},
        "placement": {"trainer": "cpu", "engines": ["cuda:0", "cuda:1"]},
    }
    assert local_devices(load_config(table)) == ["cpu", "cuda:0", "cuda:1", "cuda:0"]


def test_placement_of_an_unknown_model_is_refused_with_the_nearest_name():
    models = {"models": {"judge": {"path": "j"}}}
    table = {"model": "m", "environment": models, "placement": {"models": {"judg": "cpu"}}}
    with pytest.raises(ConfigError, match=r"names none of environment.models.*mean 'judge'\?"):
        check_roles(load_config(table), [], num_held_out=0)


@pytest.mark.parametrize(
    ("placement", "message"),
    [
        ({"trainer": "gpu"}, "Setting 'placement.trainer.0' = 'gpu'"),
        ({"trainer": ["cuda:0", "cuda:1"]}, "names 2 devices for trainer.ranks = 1"),
        ({"engines": []}, "Setting 'placement.engines' = []"),
    ],
)
def test_impossible_placement_is_refused(placement, message):
    models = {"models": {"judge": {"path": "j"}}}
    assert message in sentence_of({"environment": models, "placement": placement})


def test_default_learning_rate_depends_on_lora():
    assert load_config({"model": "m"}).learning_rate == 1e-6
    assert load_config({"model": "m", "lora": {}}).learning_rate == 1e-4
    own = {"model": "m", "lora": {}, "optimizer": {"learning_rate": 3e-5}}
    assert load_config(own).learning_rate == 3e-5


def test_only_a_user_defined_optimizer_has_further_keys():
    message = sentence_of({"optimizer": {"momentum": 0.9}})
    assert message.startswith("Unknown setting 'optimizer.momentum'; valid here: type, ")
    message = sentence_of({"optimizer": {"type": "muon", "momentum": 0.9}})
    assert message.startswith("Unknown setting 'optimizer.momentum'")
    assert "is not a built-in optimizer" in sentence_of({"optimizer": {"type": "adam"}})
    own = {"type": "torch.optim:SGD", "momentum": 0.9}
    assert load_config({"model": "m", "optimizer": own}).optimizer.type_arguments == {
        "momentum": 0.9
    }


# Where settings come from


def test_dotted_and_nested_overrides_take_precedence():
    table = {"model": "m", "trainer": {"steps": 1}, "optimizer": {"schedule": "cosine"}}
    for overrides in ({"trainer.steps": 7}, {"trainer": {"steps": 7}}):
        config = load_config(table, overrides=overrides)
        assert (config.trainer.steps, config.optimizer.schedule) == (7, "cosine")


def test_wrong_override_is_reported_like_any_setting():
    with pytest.raises(ConfigError, match=r"'trainer\.stepz'; did you mean 'steps'"):
        load_config({"model": "m"}, overrides={"trainer.stepz": 3})


def test_model_can_be_a_path_alone():
    assert load_config({"model": "some/model"}).model.path == "some/model"
    assert load_config(overrides={"model": "some/model"}).model.path == "some/model"


def test_loaded_config_is_returned_unchanged():
    config = load_config({"model": "m", "loss": {"type": "clipped", "high": 0.3}})
    assert load_config(config) == config
    assert isinstance(load_config(config), RunConfig)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("12", 12),
        ("3e-5", 3e-5),
        ("true", True),
        ("[0.9, 0.95]", [0.9, 0.95]),
        ('"12"', "12"),
        ("runs/second", "runs/second"),
        ("cosine", "cosine"),
        ("", ""),
    ],
)
def test_command_line_value_is_toml_or_text(text, value):
    assert parse_overrides({"trainer.steps": text}) == {"trainer.steps": value}


@pytest.mark.parametrize("key", ["lora", "critic", "buffer.replay", "engine.max_context"])
def test_none_on_the_command_line_removes_an_optional_setting(key):
    assert parse_overrides({key: "none"}) == {key: None}
    table = {"model": "m", "lora": {}, "critic": {}, "buffer": {"replay": {}}}
    table["engine"] = {"max_context": 128}
    value = load_config(table, overrides={key: None})
    for part in key.split("."):
        value = getattr(value, part)
    assert value is None


@pytest.mark.parametrize("key", ["loss.distil", "run_dir", "trainer.steps"])
def test_none_is_a_text_where_a_setting_is_not_optional(key):
    assert parse_overrides({key: "none"}) == {key: "none"}


def test_paths_in_a_toml_start_from_its_folder(tmp_path):
    (tmp_path / "model").mkdir()
    file = tmp_path / "run.toml"
    file.write_text(
        'run_dir = "run"\nmodel.path = "model"\ntasks.path = "t.jsonl"\n'
        'evaluate.generator = "held.py:out"\nloss.type = "losses.py:Mine"\n'
        '[[scorers]]\nfunction = "rewards.py:reward"\n[[scorers]]\nfunction = "pack.mod:reward"\n'
    )
    config = load_config(file)
    assert config.run_dir == str(tmp_path / "run")
    assert config.model.path == str(tmp_path / "model")
    assert config.tasks.path == str(tmp_path / "t.jsonl")
    assert config.evaluate.generator == {"type": f"{tmp_path}/held.py:out"}
    assert config.loss["type"] == f"{tmp_path}/losses.py:Mine"
    assert [scorer.function for scorer in config.scorers] == [
        f"{tmp_path}/rewards.py:reward",
        "pack.mod:reward",
    ]


def test_keys_of_a_verifier_survive_a_round_trip(tmp_path):
    file = tmp_path / "run.toml"
    file.write_text(
        'model = "m"\n[[scorers]]\ntype = "json_schema"\npath = "schema.json"\nweight = 2.0\n'
    )
    config = load_config(file)
    assert config.scorers[0].type_settings == {
        "type": "json_schema",
        "path": str(tmp_path / "schema.json"),
    }
    assert load_config(config.model_dump(mode="json")) == config


def test_a_hub_name_in_a_toml_stays_a_hub_name(tmp_path):
    file = tmp_path / "run.toml"
    file.write_text('model.path = "some/model"\n')
    assert load_config(file).model.path == "some/model"


def test_a_missing_toml_points_to_init(tmp_path):
    with pytest.raises(ConfigError, match=r"No config file '.*run\.toml'; `millrace init`"):
        load_config(tmp_path / "run.toml")


def test_invalid_toml_is_reported_with_its_position(tmp_path):
    file = tmp_path / "run.toml"
    file.write_text("[trainer]\nsteps = \n")
    with pytest.raises(ConfigError, match=r"run\.toml is not valid TOML: .*line 2"):
        load_config(file)


# Plug-ins


@dataclass(frozen=True, kw_only=True, slots=True)
class Clipped:
    high: float = 0.2
    low: float = 0.2

    def __post_init__(self) -> None:
        if self.high < 0:
            raise ValueError(f"high = {self.high} must not be negative")


def plugin(**table: Any) -> Any:
    return build_plugin(table, builtins={"clipped": Clipped}, default="clipped", section="loss")


def test_a_plugin_is_its_own_config():
    assert plugin(type="clipped", high=0.28) == Clipped(high=0.28)


def test_plugin_can_be_any_callable():
    assert plugin(type="builtins:dict", a=1) == {"a": 1}


@pytest.mark.parametrize(
    ("table", "message"),
    [
        (
            {"type": 3},
            "'loss.type' = 3 is not a name; write 'module:Name' or a built-in one: clipped.",
        ),
        ({"type": "cliped"}, "'loss.type' = 'cliped' is not known; did you mean 'clipped'?"),
        ({"type": "zzz"}, "'loss.type' = 'zzz' is not known; built in: clipped."),
        ({"type": "clipped", "hihg": 1}, "'loss.hihg' of 'clipped'; did you mean 'high'?"),
        ({"type": "clipped", "zzz": 1}, "'loss.zzz' of 'clipped'; valid here: high, low."),
        ({"type": "clipped", "high": "x"}, "'loss.high' = 'x': input should be a valid number."),
        ({"type": "clipped", "high": -1}, "'loss' does not fit: high = -1 must not be negative."),
        ({"type": "builtins:dict.x"}, "'builtins' has no 'dict.x'"),
        ({"type": "json:JSONDecoder", "zzz": 1}, "Section 'loss' does not fit: "),
    ],
)
def test_wrong_plugin_is_reported_in_one_sentence(table, message):
    with pytest.raises(ConfigError) as caught:
        plugin(**table)
    assert message in str(caught.value)


# References


def test_references_name_modules_or_files(tmp_path):
    (tmp_path / "rewards.py").write_text("def reward():\n    return 'mine'\n")
    assert load_reference("json:dumps") is sys.modules["json"].dumps
    by_file = load_reference(f"{tmp_path}/rewards.py:reward")
    assert by_file() == "mine"
    assert load_reference(f"{tmp_path}/rewards.py:reward") is by_file


def test_files_of_one_name_in_two_folders_do_not_clash(tmp_path):
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "rewards.py").write_text(f"NAME = {name!r}\n")
    names = [load_reference(f"{tmp_path}/{name}/rewards.py:NAME") for name in ("a", "b")]
    assert names == ["a", "b"]


@pytest.mark.parametrize(
    ("reference", "message"),
    [
        ("json", "'json' is not a reference; write 'package.module:Name' or 'file.py:Name'"),
        (":dumps", "':dumps' is not a reference"),
        ("json:", "'json:' is not a reference"),
        ("json:dump_all", "'json' has no 'dump_all'; check the name after the colon"),
        ("no_such_package.x:f", "No module named 'no_such_package.x'; is it installed"),
        ("nowhere.py:f", "No file '"),
    ],
)
def test_wrong_reference_is_reported_in_one_sentence(reference, message):
    with pytest.raises(ConfigError) as caught:
        load_reference(reference)
    assert message in str(caught.value)


def test_a_missing_import_inside_user_code_is_not_blamed_on_the_reference(tmp_path: Path):
    (tmp_path / "rewards.py").write_text("import no_such_package\n")
    with pytest.raises(ModuleNotFoundError, match="no_such_package"):
        load_reference(f"{tmp_path}/rewards.py:reward")


# Engines on other hosts

JOINABLE = {
    "engine": {"remote": 1},
    "cluster": {"address": "tcp://*:5000", "ticket": "ticket.json"},
    "weights": {"transport": "disk"},
}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"engine": {"remote": -1}}, "Setting 'engine.remote' = -1: "),
        ({"engine": {"count": 0}}, "engine.count = 0 and engine.remote = 0 leave no engine"),
        ({"engine": {"remote": 2, "max_count": 2}}, "engine.max_count = 2 is less than the 3"),
        ({"cluster": {"ticket": "t"}}, "cluster.address = 'auto' is a local socket"),
        ({"cluster": {"address": "tcp://*:5000"}}, "no cluster.ticket, the file that"),
        (
            {"cluster": {"address": "tcp://*:5000", "ticket": "runs/run/t.json"}},
            "cluster.ticket = 'runs/run/t.json' is a secret in run_dir",
        ),
        ({"weights": {"transport": "shm"}}, "weights.transport = 'shm' reaches engines on this"),
        ({"cluster": {"start_timeout_s": 0}}, "Setting 'cluster.start_timeout_s' = 0: "),
    ],
)
def test_settings_that_keep_remote_engines_out_are_refused(change, message):
    assert message in sentence_of({**JOINABLE, **change})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"trainer": {"ranks": 2, "remote": 2}}, "leaves none of trainer.ranks = 2 on this host"),
        (
            {"trainer": {"ranks": "auto", "remote": 2}, "engine": {"remote": 1}},
            "trainer.remote = 2 needs a fixed number of ranks, but trainer.ranks is 'auto'; set a",
        ),
        ({"cluster": {"launcher": "ray"}}, "wait for 1 of them; set both to 0"),
        (
            {"cluster": {"launcher": "ray"}, "engine": {}, "placement": {"engines": "cuda:1"}},
            "chooses the GPU of each process, but [placement] names 'cuda:1'",
        ),
        (
            {"cluster": {"launcher": "ray", "share_gpu": "mps"}, "engine": {}},
            "gives each process GPUs of its own, which cluster.share_gpu = 'mps' cannot share",
        ),
        (
            {
                "cluster": {"launcher": "ray"},
                "engine": {},
                "environment": {"function": "m:f", "models": {"judge": {"path": "j"}}},
                "placement": {"models": {"judge": "cuda:3"}},
            },
            "chooses the GPU of each process, but [placement] names 'cuda:3'",
        ),
        (
            {"cluster": {"launcher": "ray"}, "engine": {}, "weights": {"transport": "ipc"}},
            "cluster.launcher = 'ray', but weights.transport = 'ipc' reaches engines on this host",
        ),
    ],
)
def test_ranks_and_launchers_that_cannot_work_are_refused(change, message):
    settings = {**JOINABLE, **change}
    if "trainer" in change:
        settings["engine"] = {}
    assert message in sentence_of(settings)


def test_all_engines_can_be_remote():
    config = load_config({"model": "m", **JOINABLE, "engine": {"count": 0, "remote": 2}})
    assert (config.engine.count, config.engine.remote) == (0, 2)


def test_role_models_take_engine_settings_except_those_of_the_policy(tmp_path):
    (tmp_path / "judge").mkdir()
    (tmp_path / "run.toml").write_text(
        'model = "m"\n[environment.models.judge]\npath = "judge"\ncount = 2\nmax_sequences = 4\n'
        '[environment.models.hub]\npath = "owner/name"\ntrust_remote_code = true\n'
    )
    models = load_config(tmp_path / "run.toml").environment.models
    judge = models["judge"]
    assert judge.path == str(tmp_path / "judge")
    assert (judge.engine.count, judge.engine.max_sequences) == (2, 4)
    assert models["hub"].model.path == "owner/name"
    assert models["hub"].model.trust_remote_code
    for key, value in {"count": 0, "remote": 1, "kv": "keep", "adapters": {}}.items():
        table = {"models": {"judge": {"path": "m", key: value}}}
        assert f"environment.models.judge.{key}" in sentence_of({"environment": table})


def test_relative_adapters_start_from_the_folder_of_their_toml(tmp_path):
    (tmp_path / "run.toml").write_text('model = "m"\nengine.adapters = { judge = "j" }\n')
    assert load_config(tmp_path / "run.toml").engine.adapters == {"judge": str(tmp_path / "j")}


def test_relative_paths_of_engine_options_start_from_the_folder_of_their_toml(tmp_path):
    interpreter = tmp_path / "env" / "python"
    interpreter.parent.mkdir()
    interpreter.touch()
    options = '{ python = "env/python", directory = "new" }'
    (tmp_path / "run.toml").write_text(
        f'model = "m"\n[engine]\ntype = "vllm"\noptions = {options}\n'
        f'[environment.models.judge]\npath = "j"\ntype = "vllm"\noptions = {options}\n'
    )
    config = load_config(tmp_path / "run.toml")
    expected = {"python": str(interpreter), "directory": str(tmp_path / "new")}
    assert config.engine.options == expected
    assert config.environment.models["judge"].engine.options == expected
    (tmp_path / "run.toml").write_text('model = "m"\nengine.options.python = "python3"\n')
    assert load_config(tmp_path / "run.toml").engine.options == {"python": "python3"}, "of PATH"


def test_a_relative_ticket_starts_from_the_folder_of_its_toml(tmp_path):
    (tmp_path / "run.toml").write_text('model = "m"\n[cluster]\nticket = "ticket.json"\n')
    assert load_config(tmp_path / "run.toml").cluster.ticket == str(tmp_path / "ticket.json")
