"""rollouts/step_N.jsonl: some episodes of a step, with what engine and trainer know of each token.

Promise: samples are not selected by score, and text of models and tasks can be anything.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import numpy as np

from millrace.core.completions import kept_counts
from millrace.core.records import Branching, Group, Prompt, Rollout
from millrace.monitoring.run_dir import RunDir, read_step, to_json

MAX_TOKENS = 16_384  # of a rollout; later ones are left out
MAX_ROUTED_LAYERS = 4
Column = list[float | None]  # by token; None = not trained, or not a finite number


@dataclass(frozen=True, kw_only=True, slots=True)
class SampledRollout:
    """Columns have one entry per token; a column that is not known is None."""

    num_tokens: int  # of the rollout; columns have at most MAX_TOKENS
    agent: str
    policy: str
    temperature: float
    ids: list[int]
    texts: list[str]  # of a character of several tokens, the last has it
    trained: list[int]  # 1 or 0
    versions: list[int]  # -1 = not sampled by the policy
    engine_logprobs: Column
    trainer_logprobs: Column | None = None
    entropies: Column | None = None
    advantages: Column | None = None
    kept: list[int] | None = None  # number of ids that truncation kept; 0 = all
    routed_layers: list[int] | None = None  # of a mixture of experts: the layers in `routes`
    routes: list[list[list[int]]] | None = None  # experts by token and layer


@dataclass(frozen=True, kw_only=True, slots=True)
class SampledEpisode:
    # The prompt of a turn holds the conversation before it, so the last turn has all of it.
    prompt: Prompt
    completion: str
    finish: str
    group: int
    score: float | None
    parts: dict[str, float | None]
    advantage: float | None
    versions: list[int]  # the first and the last
    tokens: int  # sampled
    columns: dict[str, Any]  # of its task
    # Files of older runs end here.
    step: int = 0
    episode: int = 0  # index in its group
    group_scores: list[float | None] = field(default_factory=list[float | None])
    ending: str = "done"
    branching: Branching | None = None
    turns: list[dict[str, str]] = field(default_factory=list[dict[str, str]])  # without prompts
    rollouts: list[SampledRollout] = field(default_factory=list[SampledRollout])


def read_samples(run_dir: RunDir, step: int) -> list[SampledEpisode]:
    """[] if the step has no file, or none any more."""
    return read_step(run_dir.rollouts, step, SampledEpisode)


def pick(groups: Sequence[Group], num_episodes: int) -> list[tuple[Group, int]]:
    """The first episode of each group, then the second of each, and so on."""
    largest = max((len(group.episodes) for group in groups), default=0)
    found = ((g, i) for i in range(largest) for g in groups if i < len(g.episodes))
    return list(islice(found, num_episodes))


def reported_rollouts(groups: Sequence[Group], num_episodes: int) -> dict[Rollout, int]:
    """The rollouts of these episodes, numbered as in Microbatch.reported."""
    picked = (group.episodes[index] for group, index in pick(groups, num_episodes))
    rollouts = (rollout for episode in picked for rollout in episode.rollouts)
    return {rollout: number for number, rollout in enumerate(rollouts)}


def scores_of(group: Group, index: int) -> dict[str, Any]:
    assert group.advantages is not None
    score = group.scores[index]
    return {
        "group": group.number,
        "score": to_json(score.total),
        "parts": to_json(score.parts),
        "advantage": to_json(group.advantages[index]),
    }


class EpisodeSampler:
    def __init__(self, decode: Callable[[np.ndarray], str]) -> None:
        """`decode`: the text of tokens, as of the policy's tokenizer."""
        self._decode = decode
        self._text = functools.lru_cache(maxsize=2**18)(self._text_of)

    def sample(
        self, group: Group, index: int, *, step: int, reported: Mapping[Rollout, np.ndarray]
    ) -> SampledEpisode:
        """`reported`: see HostSums of the trainer."""
        episode, shown = group.episodes[index], ("agent", "completion", "finish")
        turns = [{name: getattr(turn, name) for name in shown} for turn in episode.turns]
        versions = np.concatenate([r.versions[r.versions >= 0] for r in episode.rollouts])
        return SampledEpisode(
            prompt=to_json(episode.turns[-1].prompt),
            completion=to_json(turns[-1]["completion"]),
            finish=turns[-1]["finish"],
            **scores_of(group, index),
            versions=[int(versions.min()), int(versions.max())],
            tokens=sum(rollout.num_generated for rollout in episode.rollouts),
            columns={name: _shown(value) for name, value in group.task.columns.items()},
            step=step,
            episode=index,
            group_scores=[score.total for score in group.scores],
            ending=episode.ending,
            branching=episode.branching,
            turns=to_json(turns),
            rollouts=[self._rollout(r, reported.get(r)) for r in episode.rollouts],
        )

    def _rollout(self, rollout: Rollout, reported: np.ndarray | None) -> SampledRollout:
        columns: dict[str, Any] = {}
        if reported is not None:
            by_token = np.full((len(reported), len(rollout.tokens)), np.nan)
            by_token[:, rollout.mask] = reported
            names = ("trainer_logprobs", "entropies", "advantages")
            columns |= zip(names, map(_column, by_token), strict=True)
        if rollout.kept is not None:
            columns["kept"] = kept_counts(rollout.kept)[:MAX_TOKENS].tolist()
        if (routes := rollout.routes) is not None:
            layers = np.unique(np.linspace(0, routes.shape[1] - 1, MAX_ROUTED_LAYERS).astype(int))
            columns["routed_layers"] = layers.tolist()
            columns["routes"] = routes[:MAX_TOKENS, layers].tolist()
        ids = rollout.tokens[:MAX_TOKENS].tolist()
        return SampledRollout(
            num_tokens=len(rollout.tokens),
            agent=rollout.agent,
            policy=rollout.policy,
            temperature=rollout.sampling.temperature,
            ids=ids,
            texts=[self._text(token) or self._in_context(ids, i) for i, token in enumerate(ids)],
            trained=rollout.mask[:MAX_TOKENS].astype(int).tolist(),
            versions=rollout.versions[:MAX_TOKENS].tolist(),
            engine_logprobs=_column(rollout.engine_logprobs),
            **columns,
        )

    def _text_of(self, token: int) -> str:
        """Empty for a part of a character. Some tokenizers omit the space before the first token of
        a text, so the token comes twice."""
        once, twice = self._decode(np.array([token])), self._decode(np.array([token, token]))
        return "" if "\ufffd" in twice else twice.removeprefix(once)

    def _in_context(self, ids: list[int], place: int) -> str:
        """The character that ends with a token, "" if none does; UTF-8 has up to four bytes."""
        *before, _ = near = ids[max(0, place - 3) : place + 1]
        text, known = self._decode(np.array(near)), self._decode(np.array(before, int))
        return "" if text.endswith("\ufffd") else text[len(known.rstrip("\ufffd")) :]


def _column(values: np.ndarray) -> Column:
    """Rounded, which halves the file. NaN becomes null in JSON."""
    return np.round(values[:MAX_TOKENS].astype(np.float64), 6).tolist()


def _shown(value: Any) -> Any:
    """A task's column may be any Python object; one without a JSON form is shown as its repr."""
    try:
        return to_json(value)
    except TypeError:
        return repr(value)
