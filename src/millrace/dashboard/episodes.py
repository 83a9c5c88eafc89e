"""Sampled episodes and the life of groups, step by step, for the views Batch, Episodes and Tokens.

Promise: lists hold the beginning of a text only, so a page with episodes of any length stays small;
the whole text comes with one episode.
"""

from typing import Any

from millrace.core.errors import ConfigError
from millrace.dashboard.runs import RunReader
from millrace.monitoring.files.episodes import StepLife, read_lifecycle
from millrace.monitoring.files.samples import SampledEpisode, read_samples
from millrace.monitoring.run_dir import step_file, steps_in

EXCERPT = 300  # characters
MAX_FOUND, MAX_SEARCHED_BYTES = 200, 128 * 2**20


def list_steps(run: RunReader) -> dict[str, list[int]]:
    """The steps that have samples, and those whose groups are described."""
    return {"samples": steps_in(run.run_dir.rollouts), "lives": steps_in(run.run_dir.lifecycle)}


def read_batch(run: RunReader, *, step: int = 0) -> StepLife | None:
    return read_lifecycle(run.run_dir, step)


def read_episode(run: RunReader, *, step: int = 0, place: int = 0) -> SampledEpisode:
    episodes = read_samples(run.run_dir, step)
    if place >= len(episodes):
        raise ConfigError(f"Step {step} has {len(episodes)} sampled episodes, none at {place}.")
    return episodes[place]


def find_episodes(run: RunReader, *, step: int | None = None, text: str = "") -> dict[str, Any]:
    """Sampled episodes that contain `text`: of a step or, newest first, of all, within limits."""
    folder, found, num_bytes, last = run.run_dir.rollouts, [], 0, step
    for last in steps_in(folder)[::-1] if step is None else [step]:
        episodes = enumerate(read_samples(run.run_dir, last))
        found += [_brief(e, place, last) for place, e in episodes if _has(e, text.lower())]
        num_bytes += step_file(folder, last).stat().st_size if step is None else 0
        if len(found) >= MAX_FOUND or num_bytes > MAX_SEARCHED_BYTES:
            break
    return {"episodes": found, "down_to": last}


def _has(episode: SampledEpisode, text: str) -> bool:
    parts = (episode.prompt, episode.completion, episode.columns, episode.turns)
    return not text or any(text in str(part).lower() for part in parts)


def _brief(episode: SampledEpisode, place: int, step: int) -> dict[str, Any]:
    names = ("group", "episode", "score", "parts", "advantage", "tokens", "versions", "ending")
    brief = {name: getattr(episode, name) for name in names}
    return {"step": step, "place": place, **brief, "completion": episode.completion[:EXCERPT]}
