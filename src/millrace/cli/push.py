"""`millrace push`: a checkpoint with a model card to a repository on the Hugging Face hub.

Promise: only the model leaves this machine, in one commit: no state of the trainer, and no path of
this machine. The token goes to the hub alone and is never printed. A model card that the repository
already has stays, unless it is to be replaced.
"""

import argparse
import json
import re
from pathlib import Path
from typing import Any

from huggingface_hub import CommitOperationAdd, HfApi, get_token
from huggingface_hub.errors import (
    HfHubHTTPError,
    HTTPError,  # pyright: ignore[reportPrivateImportUsage] - of httpx or httpx2, as the version has it
)

from millrace.core.errors import CheckpointError, ConfigError, RunFailed
from millrace.monitoring.report.model_card import base_model, model_card
from millrace.monitoring.run_dir import RunDir
from millrace.training.checkpoints.directory import MANIFEST_FILE, RUN_STATE_FILE, damage_to

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
    card = model_card(
        run_dir,
        title=options.repo.partition("/")[2],
        step=step,
        is_adapter=(checkpoint / ADAPTER_FILE).is_file(),
        license=options.license,
    )
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
            f"{run_dir.path} has no checkpoint yet; checkpoint.every sets when a run writes one."
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
    files = {path.name: path for path in sorted(checkpoint.iterdir()) if path.is_file()}
    for name in NOT_PUSHED:
        files.pop(name, None)
    return [
        CommitOperationAdd(name, _adapter_settings(path) if name == ADAPTER_FILE else path)
        for name, path in files.items()
    ]


def _adapter_settings(path: Path) -> bytes:
    """Of a local base model, the name of its folder only."""
    settings: dict[str, Any] = json.loads(path.read_text())
    base, _ = base_model({"model": {"path": settings["base_model_name_or_path"]}})
    return json.dumps({**settings, "base_model_name_or_path": base}, indent=2).encode()


def _reason(error: Exception) -> str:
    """To follow "was not pushed: "."""
    cause = error.__cause__ if isinstance(error, RuntimeError) and error.__cause__ else error
    if isinstance(cause, HfHubHTTPError):
        status = cause.response.status_code
        said = f" ({cause.server_message})" if cause.server_message else ""
        return REASONS.get(status, f"it answered with status {status}") + said
    if isinstance(cause, HTTPError | ConnectionError):
        return f"it cannot be reached ({' '.join(str(cause).split())})"
    return " ".join(str(cause).split()).rstrip(".")
