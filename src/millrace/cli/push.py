"""`millrace push`: a checkpoint with a model card to a repository on the Hugging Face hub.

Promise: only the model leaves this machine, in one commit: no state of the trainer. The token goes
to the hub alone and is never printed. A model card that the repository already has stays, unless it
is to be replaced. A card says where the model comes from, how it was trained and what it reached;
it holds no path of a machine, no address and no key. Of a local file or folder, only the last part
of its path is written, and only settings that shape the model are shown.
"""

import argparse
import json
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from statistics import fmean
from typing import Any

import tomli_w
from huggingface_hub import CommitOperationAdd, HfApi, get_token
from huggingface_hub.errors import (
    HfHubHTTPError,
    HTTPError,  # pyright: ignore[reportPrivateImportUsage] - of httpx or httpx2, as the version has it
)

from millrace.core.errors import CheckpointError, ConfigError, RunFailed
from millrace.monitoring.files.metrics import read_metrics
from millrace.monitoring.report.summary import changed_settings
from millrace.monitoring.run_dir import RunDir
from millrace.training.checkpoints.directory import MANIFEST_FILE, RUN_STATE_FILE, damage_to

CARD = Path(__file__).with_name("model_card.md")  # a template
CARD_FILE = "README.md"
ADAPTER_FILE = "adapter_config.json"
NOT_PUSHED = (MANIFEST_FILE, RUN_STATE_FILE, "trainer_state.pt", CARD_FILE)
REASONS = {
    401: "it does not accept the token; create one that may write, and log in again",
    403: "this token may not write there; use one that may, or another --repo",
    404: "there is no such repository, or this token may not see it",
}


def push(options: argparse.Namespace) -> str:
    """`options` of `millrace push`; returns the URL of the commit."""
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", options.repo):
        raise ConfigError(f"--repo {options.repo!r} is not OWNER/NAME, such as me/my-model.")
    if options.license is not None and not re.fullmatch(r"[a-z0-9.-]+", options.license):
        raise ConfigError(
            f"--license {options.license!r} is not an identifier of the hub, such as apache-2.0."
        )
    run_dir = RunDir(options.run_dir)
    checkpoint = _checkpoint(run_dir, options.step)
    operations = _files(checkpoint)
    token = get_token()
    if token is None:
        raise ConfigError(
            "There is no token of the Hugging Face hub; set HF_TOKEN, or run: hf auth login."
        )
    step = int(checkpoint.name.removeprefix("step_"))
    is_adapter, title = (checkpoint / ADAPTER_FILE).is_file(), options.repo.partition("/")[2]
    about = {"title": title, "step": step, "is_adapter": is_adapter}
    card = model_card(run_dir, **about, license=options.license)
    api = HfApi(endpoint=options.endpoint, token=token)
    try:
        api.create_repo(options.repo, private=options.private or None, exist_ok=True)
        if options.replace_card or not api.file_exists(options.repo, CARD_FILE):
            operations.append(CommitOperationAdd(CARD_FILE, card.encode()))
        else:
            print(f"The repository keeps its {CARD_FILE}; --replace-card writes a new one.")
        message = f"Step {step} of {run_dir.path.resolve().name}, by millrace push"
        return api.create_commit(options.repo, operations, commit_message=message).commit_url
    # RuntimeError: of an upload. ValueError: the hub refuses the card, or answers nonsense.
    except (HTTPError, OSError, RuntimeError, ValueError) as error:
        sentence = f"{options.repo} was not pushed to {api.endpoint}: {_reason(error)}."
        raise RunFailed(sentence.replace(token, "***")) from None


def _checkpoint(run_dir: RunDir, step: int | None) -> Path:
    if not run_dir.config.is_file():
        raise ConfigError(f"{run_dir.path} is not a run directory: it has no config.toml.")
    found = run_dir.checkpoint_paths
    if not found:
        raise ConfigError(
            f"{run_dir.path} has no checkpoint yet; checkpoint.every_steps sets when a run writes"
            " one."
        )
    chosen = found[-1] if step is None else run_dir.checkpoints / f"step_{step}"
    if chosen not in found:
        steps = ", ".join(path.name.removeprefix("step_") for path in found)
        raise ConfigError(f"{run_dir.path} has no checkpoint of step {step}; it has {steps}.")
    if (damage := damage_to(chosen)) is not None:
        raise CheckpointError(f"Checkpoint {chosen} is not pushed: it {damage}.")
    return chosen


def _files(checkpoint: Path) -> list[CommitOperationAdd]:
    """The files of the model; folders hold the optimizer and the critic."""
    files = [path for path in sorted(checkpoint.iterdir()) if path.is_file()]
    contents: dict[str, Path | bytes] = {p.name: p for p in files if p.name not in NOT_PUSHED}
    if ADAPTER_FILE in contents:
        settings: dict[str, Any] = json.loads((checkpoint / ADAPTER_FILE).read_text())
        # A local base model is named by its folder, without the path.
        base, _ = base_model({"model": {"path": settings["base_model_name_or_path"]}})
        settings["base_model_name_or_path"] = base
        contents[ADAPTER_FILE] = json.dumps(settings, indent=2).encode()
    return [CommitOperationAdd(name, content) for name, content in contents.items()]


def _reason(error: Exception) -> str:
    """The text after "was not pushed: "."""
    cause = error.__cause__ if isinstance(error, RuntimeError) and error.__cause__ else error
    if isinstance(cause, HfHubHTTPError):
        status = cause.response.status_code
        said = f" ({cause.server_message})" if cause.server_message else ""
        return REASONS.get(status, f"it answered with status {status}") + said
    if isinstance(cause, HTTPError | ConnectionError):
        return f"it cannot be reached ({' '.join(str(cause).split())})"
    return " ".join(str(cause).split()).rstrip(".")


SECTIONS = {"model", "lora", "tasks", "scorers", "scoring", "sampling", "rollout", "buffer"}
SECTIONS |= {"loss", "optimizer", "trainer", "critic", "seed"}
SCORER_KEYS = ("name", "type", "function", "weight")  # others may name services
COLUMNS = ("reward/mean", "reward/std", "eval/accuracy", "kl", "entropy", "staleness/mean")
MAX_ROWS = 10
METADATA = {"pipeline_tag": "text-generation", "tags": ["millrace", "reinforcement-learning"]}


def model_card(
    run_dir: RunDir, *, title: str, step: int, is_adapter: bool, license: str | None
) -> str:
    text = run_dir.config.read_text()
    settings = tomllib.loads(text)
    base, is_local = base_model(settings)
    metadata: dict[str, Any] = {} if license is None else {"license": license}
    if not is_local:
        relation = "adapter" if is_adapter else "finetune"
        metadata |= {"base_model": base, "base_model_relation": relation}
    metadata |= {"library_name": "peft" if is_adapter else "transformers", **METADATA}
    # A JSON value is also a YAML value.
    head = "".join(f"{key}: {json.dumps(value)}\n" for key, value in metadata.items())
    versions = text.partition("\n")[0].removeprefix("# ") if text.startswith("# ") else "unknown"
    return CARD.read_text().format(
        head=head,
        title=title,
        kind="LoRA adapter (PEFT) for" if is_adapter else "full fine-tune of",
        base=f"the local model {base}" if is_local else f"[{base}](https://huggingface.co/{base})",
        step=step,
        curve=_curve(read_metrics(run_dir.metrics), step),
        settings=tomli_w.dumps(_public(settings)),
        versions=versions,
        license=f"`{license}`" if license else "The author has not chosen one yet.",
    )


def base_model(settings: Mapping[str, Any]) -> tuple[str, bool]:
    """Name of the model that the run started from, and whether it is a local folder. The run has
    written the path of a folder as an absolute one."""
    path = settings["model"]["path"]
    return (Path(path).name, True) if Path(path).is_absolute() else (path, False)


def _curve(rows: list[dict[str, Any]], step: int) -> str:
    """A table of means over at most MAX_ROWS equal parts of the run."""
    rows = [row for row in rows if row["step"] <= step]
    names = [name for name in COLUMNS if any(row.get(name) is not None for row in rows)]
    count = min(MAX_ROWS, len(rows))
    lines = [f"| steps | {' | '.join(names)} |", "|---" * (len(names) + 1) + "|"]
    for part in range(count):
        chosen = rows[part * len(rows) // count : (part + 1) * len(rows) // count]
        first, last = chosen[0]["step"], chosen[-1]["step"]
        values = [[row[name] for row in chosen if row.get(name) is not None] for name in names]
        means = [f"{fmean(found):.4g}" if found else "" for found in values]
        steps = f"{first}" if first == last else f"{first} to {last}"
        lines.append(f"| {steps} | {' | '.join(means)} |")
    return "\n".join(lines) if names else "The run has no metrics."


def _public(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The changed settings that shape the model, as tables."""
    shown: dict[str, Any] = {}
    for key, value in changed_settings(settings).items():
        *above, name = key.split(".")
        if (above or [name])[0] not in SECTIONS:
            continue
        if name == "scorers":
            value = [{k: row[k] for k in SCORER_KEYS if k in row} for row in value]
        table = shown
        for part in above:
            table = table.setdefault(part, {})
        table[name] = _without_folders(value)
    return shown


def _without_folders(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _without_folders(below) for key, below in value.items()}
    if isinstance(value, list | tuple):
        return [_without_folders(below) for below in value]
    return Path(value).name if isinstance(value, str) and value.startswith("/") else value
