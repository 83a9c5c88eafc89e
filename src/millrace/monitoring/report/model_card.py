"""The model card of a checkpoint: where it comes from, how it was trained and what it reached.

Promise: a card holds no path of a machine, no address and no key. Of a local file or folder, only
the last part of its path is written, and only settings that shape the model are shown.
"""

import json
import tomllib
from collections.abc import Mapping
from pathlib import Path
from statistics import fmean
from typing import Any

import tomli_w

from millrace.monitoring.files.metrics import read_metrics
from millrace.monitoring.report.summary import changed_settings
from millrace.monitoring.run_dir import RunDir

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
    kind = "LoRA adapter (PEFT) for" if is_adapter else "full fine-tune of"
    return CARD.format(
        head=head,
        title=title,
        kind=kind,
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


CARD = """\
---
{head}---

# {title}

{kind} {base}, trained with reinforcement learning by Millrace. This is step {step} of the run.

## Training

Each row is the mean over its steps.

{curve}

## Settings

These settings differ from the defaults. Files are named without their folders.

```toml
{settings}```

## Reproduce

Save the settings as `run.toml`, beside the tasks and reward functions that they name, and run:

```
millrace train run.toml --run_dir run
```

Made with: {versions}

## Licence

{license}
"""
