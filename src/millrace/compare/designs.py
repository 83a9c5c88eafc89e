"""Which runs a comparison makes: settings files, presets and values of a sweep, for each seed."""

import itertools
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from millrace.config import load_config, parse_override
from millrace.core.errors import ConfigError
from millrace.run.checks import check_settings


@dataclass(frozen=True)
class Design:
    name: str
    source: Path
    preset: str | None
    settings: Mapping[str, str]  # by dotted key
    notes: tuple[str, ...]  # axes of the preset that the settings override

    @property
    def folder(self) -> str:
        return re.sub(r"[^\w.=-]+", "_", self.name)

    def arguments(self, *, seed: int, run_dir: Path) -> list[str]:
        """Of `millrace`, for one run."""
        given = {**self.settings, "seed": str(seed), "run_dir": json.dumps(str(run_dir))}
        options = [f"--{key}={value}" for key, value in given.items()]
        preset = [] if self.preset is None else ["--preset", self.preset]
        return ["train", str(self.source), "--auto-resume", *preset, *options]


def plan_designs(
    sources: Sequence[Path],
    *,
    presets: Sequence[str],
    sweeps: Sequence[str],
    settings: Mapping[str, str],
) -> list[Design]:
    """All combinations, checked."""
    values = [list(_values(sweep)) for sweep in sweeps]
    designs: list[Design] = []
    combinations = list(itertools.product(*values))
    for source, preset, swept in itertools.product(sources, presets or [None], combinations):
        own = {**settings, **dict(swept)}
        parts = [source.stem] if len(sources) > 1 or not (presets or sweeps) else []
        parts += [preset] if preset else []
        parts += [f"{key}={value}" for key, value in swept]
        notes: list[str] = []
        overrides: dict[str, Any] = {key: parse_override(key, text) for key, text in own.items()}
        check_settings(load_config(source, overrides=overrides, preset=preset, report=notes.append))
        name = ", ".join(parts)
        designs.append(Design(name, source, preset, settings=own, notes=tuple(notes)))
    folders = [design.folder for design in designs]
    if twice := {design.name for design in designs if folders.count(design.folder) > 1}:
        raise ConfigError(
            f"Two designs are named {min(twice)!r}; rename a settings file, or remove one of them."
        )
    return designs


def _values(sweep: str) -> Iterator[tuple[str, str]]:
    key, equals, values = sweep.partition("=")
    if not equals or not key or not values.strip(","):
        raise ConfigError(
            f"--sweep {sweep!r} is not KEY=VALUE,VALUE, such as buffer.max_staleness=0,4,16."
        )
    return ((key, value) for value in values.split(",") if value)
