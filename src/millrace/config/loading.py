"""Loading of settings from TOML files, mappings and the command line; errors as sentences.
Torch-free."""

import re
import tomllib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, cast, get_args

from pydantic import BaseModel, ValidationError

from millrace.config.episodes import HUB, OF_POLICY, RoleModelConfig
from millrace.config.generation import EngineConfig
from millrace.config.run_config import RunConfig
from millrace.config.training import OptimizerConfig
from millrace.core.errors import ConfigError, describe_setting_error, suggestion
from millrace.presets import over_preset

# Settings that are always paths.
_PATHS = {"tasks.path", "evaluate.path", "scorers.path", "cluster.ticket"}
_DIRECTORIES = {"run_dir", "weights.directory", "engine.options.directory"}
# Settings that may be a path or a hub name, and a path or another word of a command line.
_MODELS = {"model", "model.path", "critic.path", "scorers.model"}
_COMMANDS = {"environment.command", "environment.mcp.command", "engine.options.python"}
_ENGINES, _TASKS = ("engine", "environment.models.*"), ("tasks", "tasks.source.*", "evaluate")
_SAME_OPTIONS = ("block_tokens", "prefill_tokens", "compile", "prefix_cache", "kv_bytes")
_OPTIONS = {"num_blocks": "kv_bytes", "round_steps": "decode_steps"}
_OF_TASKS = {"function": "generator", "prompt": "columns", "split": "path", "subset": "path"}
_OF_CRITIC = {"discount": "gamma", "decay": "gae_lambda"}
MOVED = {  # keys of earlier versions and what they are called now; * stands for any name
    **{f"trainer.{key}": f"optimizer.{key}" for key in OptimizerConfig.model_fields},
    **{f"{table}.{key}": f"{table}.options.{key}" for table in _ENGINES for key in _SAME_OPTIONS},
    **{f"{t}.{old}": f"{t}.options.{new}" for t in _ENGINES for old, new in _OPTIONS.items()},
    **{f"{table}.threads": "cluster.threads" for table in (*_ENGINES, "trainer")},
    **{f"{t}.{old}": f"{t}.{new}" for t in _TASKS for old, new in _OF_TASKS.items()},
    **{f"critic.{old}": f"scoring.advantages.{new}" for old, new in _OF_CRITIC.items()},
    **{f"critic.{k}": f"scoring.advantages.{k}" for k in (*_OF_CRITIC.values(), "normalize")},
    "buffer.max_stale_share": "buffer.staleness",
    "cluster.mps": "cluster.share_gpu",
    "cluster.take_turns": "cluster.share_gpu",
    "engine.device": "placement.engines",
    "environment.models.*.device": "placement.models",
    "journal.enabled": "journal.max_bytes",
    "placement.evaluators": "placement.engines",
    "placement.scorers": "placement.models",
    "scorer": "scorers",
    "scorers.device": "placement.models",
    "tasks.shuffle": "tasks.order",
    "trainer.device": "placement.trainer",
    "trainer.min_learning_rate_share": "optimizer.min_lr_ratio",
    "watch.tensorboard": "tracker",
    "watch": "monitoring",
    "weights.address": "cluster.advertise",
}
_CONSTANTS = """
cluster.stop_timeout_s critic.loss_weight environment.tool_result_chars evaluate.score_timeout_s
journal.commit_interval_s rollout.max_failure_share rollout.max_filtered_share scorers.backoff_s
scorers.breaker_failures scorers.breaker_s supervision.backoff_s supervision.report_s
supervision.save_timeout_s supervision.stall_warning_s supervision.swap_timeout_s
supervision.window_s tasks.explore_share tasks.target_solve_rate trainer.logprob_chunk
weights.bucket_bytes
"""
# Keys of earlier versions without a successor: the former default, which may stay (`...` = none),
# and why.
_REMOVED: dict[str, tuple[Any, str]] = {
    **dict.fromkeys(_CONSTANTS.split(), (..., "its value is fixed")),
    "buffer.replay.capacity": (..., "buffer.replay.max_staleness says how long groups are kept"),
    "cluster.heartbeat_timeout_s": (..., "it follows from supervision.hang_timeout_s"),
    "cluster.join_timeout_s": (..., "it follows from cluster.start_timeout_s"),
    "cluster.stall_timeout_s": (..., "it follows from supervision.hang_timeout_s"),
    "environment.mcp.name": (..., "a server is named by its url or its command"),
    "environment.models.*.tool_format": (..., "it follows from the model's chat template"),
    "journal.fsync": (..., "every commit is written to the disk"),
    "journal.segment_bytes": (..., "the journal is one SQLite database"),
    "rollout.redundancy": (0, "set rollout.oversample, and rollout.selection to 'fastest'"),
    "scorers.priority": (..., "calls are made in the order of their groups"),
    "supervision.step_timeout_s": (..., "supervision.hang_timeout_s finds a trainer that hangs"),
    "weights.timeout_s": (60.0, "it follows from supervision.hang_timeout_s"),
}
_POLICY = re.compile(r"^policies\.[^.]+\.")  # its table takes tables of the run
_ROLE = re.compile(r"^environment\.models\.[^.]+\.")  # its table takes the keys of [engine]


def load_config(
    source: str | Path | Mapping[str, Any] | RunConfig | None = None,
    *,
    overrides: Mapping[str, Any] | None = None,
    preset: str | None = None,
    report: Callable[[str], None] = print,
) -> RunConfig:
    """Read settings from a TOML file or a mapping; without a source, all are defaults. `overrides`,
    dotted or nested, take precedence over the source, and both over the preset; `report` gets a
    sentence for each axis of the preset that they override."""
    if isinstance(source, RunConfig):
        source = source.model_dump(mode="python", exclude_unset=preset is not None)
    table = settings_table(source, overrides=overrides)
    if preset is not None:
        table = over_preset(table, preset, report=report)
    for old, new in MOVED.items():
        refusal = f"Setting {old!r} is now {new!r}; see docs/reference/configuration.md."
        table = _without(table, old.split("."), ..., refusal)
    for key, (default, remedy) in _REMOVED.items():
        table = _without(table, key.split("."), default, f"Setting {key!r} was removed: {remedy}.")
    try:
        return RunConfig.model_validate(table)
    except ValidationError as error:
        raise ConfigError(_sentence(error)) from None


def settings_table(
    source: str | Path | Mapping[str, Any] | None, *, overrides: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """What a TOML file or a mapping sets, with overrides, unchecked."""
    table = _read_toml(Path(source)) if isinstance(source, str | Path) else {**(source or {})}
    for key, value in (overrides or {}).items():
        table = _merged(table, key.split("."), value)
    return table


def parse_overrides(settings: Mapping[str, str]) -> dict[str, Any]:
    """Settings of a command line, by dotted key."""
    return {key: _parse_override(key, text) for key, text in settings.items()}


def _parse_override(key: str, text: str) -> Any:
    """A command-line value as TOML reads it; anything that is not TOML is a string. "none" removes
    an optional setting or table."""
    path = key.split(".")
    field = section_of(path).model_fields.get(path[-1])
    if text == "none" and field is not None and field.default is None:
        return None
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def _read_toml(path: Path) -> dict[str, Any]:
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(
            f"No config file {str(path)!r}; `millrace init` writes one to start from."
        ) from None
    except OSError as error:
        raise ConfigError(f"Config file {str(path)!r} cannot be read: {error.strerror}.") from None
    except (UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"{path} is not valid TOML: {error}.") from None
    return anchored(table, folder=path.resolve().parent)


def anchored(value: Any, *, folder: Path, key: str = "") -> Any:
    """Settings as TOML has them, with absolute paths: a relative path in a TOML starts from the
    folder of that TOML. None, which TOML lacks, is left out."""
    if isinstance(value, dict):
        table = cast(dict[str, Any], value)
        return {
            k: anchored(v, folder=folder, key=f"{key}.{k}".strip("."))
            for k, v in table.items()
            if v is not None
        }
    if isinstance(value, list | tuple):
        return [anchored(row, folder=folder, key=key) for row in cast(list[Any], value)]
    if not isinstance(value, str):
        return value
    is_of_role = _ROLE.match(key) is not None and key.endswith(".path")
    key = _POLICY.sub("", _ROLE.sub("engine.", key))
    is_found = (key in _MODELS | _COMMANDS or is_of_role) and (folder / value).exists()
    is_of_source = key.startswith("tasks.source.") and key.endswith(".path")
    is_path = (key in _PATHS | _DIRECTORIES or is_of_source) and not value.startswith(HUB)
    is_path = is_path or key.startswith("engine.adapters.")
    # A reference to a function in a file holds ".py:".
    return str(folder / value) if is_found or is_path or ".py:" in value else value


def _merged(table: Mapping[str, Any], keys: list[str], value: Any) -> dict[str, Any]:
    """`table` with one setting changed. A table is merged into a table, key by key."""
    head, *rest = keys
    below = cast(dict[str, Any], table[head]) if isinstance(table.get(head), Mapping) else {}
    if rest and isinstance(name := table.get(head), str):  # a name alone stands for its table
        below = {"path" if head == "model" else "type": name}
    if rest:
        value = _merged(below, rest, value)
    elif isinstance(value, Mapping):
        value = {**below, **cast(Mapping[str, Any], value)}
    return {**table, head: value}


def _without(table: Any, keys: list[str], default: Any, refusal: str) -> Any:
    """`table` without a key of an earlier version; raises ConfigError unless its value is the
    former default, which may still be in the config.toml of a run. `...` is the default of none."""
    head, *rest = keys
    if isinstance(table, list | tuple):
        rows = cast(list[Any], table)  # a type of the user's own may have such a key
        return [row if _is_own(row) else _without(row, keys, default, refusal) for row in rows]
    if not isinstance(table, Mapping):
        return table
    table = cast(Mapping[str, Any], table)
    if head == "*":
        return {name: _without(below, rest, default, refusal) for name, below in table.items()}
    if head not in table:
        return table
    if rest:
        return {**table, head: _without(table[head], rest, default, refusal)}
    if table[head] != default:
        raise ConfigError(refusal)
    return {key: value for key, value in table.items() if key != head}


def _is_own(row: Any) -> bool:
    return isinstance(row, Mapping) and ":" in str(cast(Mapping[str, Any], row).get("type", ""))


def _sentence(error: ValidationError) -> str:
    sentence = "; ".join(_clauses(error))
    return sentence if sentence.endswith(("?", ".")) else f"{sentence}."


def _clauses(error: ValidationError) -> Iterator[str]:
    for detail in error.errors():
        path = [str(part) for part in detail["loc"]]
        where = ".".join(path)
        if detail["type"] == "extra_forbidden":
            yield f"Unknown setting {where!r}; {_suggestion(path)}"
        elif detail["type"] in ("model_type", "dict_type"):
            yield f"Setting {where!r} = {detail['input']!r}: a table is needed, such as [{where}]"
        elif not path:
            yield detail["msg"].removeprefix("Value error, ")
        else:
            yield describe_setting_error(detail, where=where)


def _suggestion(path: list[str]) -> str:
    """The key that was probably meant, or all keys of the table."""
    path = path[2:] if path[0] == "policies" and len(path) > 3 else path  # of a table of the run
    section = section_of(path)
    known = list(section.model_fields)
    if section is RoleModelConfig:
        known += [key for key in EngineConfig.model_fields if key not in OF_POLICY]
    return suggestion(path[-1], known)


def section_of(path: list[str]) -> type[BaseModel]:
    """The section that holds the last key of a path."""
    section: type[BaseModel] = RunConfig
    for part in path[:-1]:
        field = section.model_fields.get(part)
        below = None if field is None else _section_in(field.annotation)
        # A position or a name within a list or table of sections has no field of its own.
        section = below or section
    return section


def _section_in(annotation: Any) -> type[BaseModel] | None:
    """The section of a field that is one, may be one, or holds several."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    found = (_section_in(argument) for argument in get_args(annotation))
    return next((section for section in found if section is not None), None)
