"""Lengths of completions: from parameters, files and run directories, and what they predict."""

import json
import math
import shutil

import numpy as np
import pytest

from millrace.config import load_config
from millrace.core.errors import ConfigError
from millrace.core.spans import GroupLife, TurnLife
from millrace.monitoring.files.episodes import StepFiles, StepLife
from millrace.monitoring.files.samples import SampledEpisode, SampledRollout
from millrace.monitoring.run_dir import RunDir
from millrace.plan.lengths import Lengths, read_lengths
from millrace.plan.model_costs import Calibration
from millrace.plan.simulation import simulate

PROMPT_TOKENS, TOOL_S, SCORE_S = 12, 0.5, 0.25


def write_run(path, groups):
    """A run directory of one step. `groups`: tokens of each turn of each episode; a token takes a
    second."""
    lives = []
    for number, group in enumerate(groups):
        turns: dict[int, list[TurnLife]] = {}
        for index, lengths in enumerate(group):
            begin_s, turns[index] = 1.0, []
            for tokens in lengths:
                turns[index].append(TurnLife(begin_s, begin_s + tokens, tokens, 0, 0))
                begin_s += tokens + TOOL_S
        end_s = max((turn.end_s for own in turns.values() for turn in own), default=1.0)
        times = {"started_s": 1.0, "generated_s": end_s, "ended_s": end_s + SCORE_S}
        lives.append(GroupLife(number=number, turns=turns, outcome="buffered", **times))
    times = {"begin_s": 2.0, "end_s": 3.0, "unix_s": 1e9}
    life = StepLife(step=1, **times, groups=lives, replayed=[], lost=[])
    sampled = [-1] * PROMPT_TOKENS + [0] * 3
    rollout = SampledRollout(
        num_tokens=len(sampled),
        agent="policy",
        policy="",
        temperature=1.0,
        ids=sampled,
        texts=[""] * len(sampled),
        trained=[version + 1 for version in sampled],
        versions=sampled,
        engine_logprobs=[None] * len(sampled),
    )
    names = {"prompt": "", "completion": "", "finish": "stop"}
    numbers = {"group": 0, "score": 0.0, "parts": {}, "advantage": 0.0, "versions": [0, 0]}
    sample = SampledEpisode(**names, **numbers, tokens=3, columns={}, rollouts=[rollout])
    path.mkdir(exist_ok=True)
    run_dir = RunDir(path)
    StepFiles(run_dir.lifecycle).write(1, [life])
    StepFiles(run_dir.rollouts).write(1, [sample])
    return str(path)


@pytest.fixture
def groups():
    """16 groups of 4 episodes of 1 to 10 turns, of 1 to 12 tokens each."""
    rng = np.random.default_rng(0)
    return [
        [rng.integers(1, 13, rng.integers(1, 11)).tolist() for _ in range(4)] for _ in range(16)
    ]


def test_lengths_of_a_run_are_those_of_its_episodes(tmp_path, groups):
    found = read_lengths(write_run(tmp_path, groups), max_new_tokens=9)
    episodes = [episode for group in groups for episode in group]
    assert found.mean == pytest.approx(np.mean([sum(e) for e in episodes]), rel=0.05)
    assert found.mean_turns == pytest.approx(np.mean([len(e) for e in episodes]), rel=0.05)
    assert found.longest == PROMPT_TOKENS + max(sum(e) for e in episodes)
    assert {tuple(e) for e in found.draw(np.random.default_rng(1), 8)} <= set(map(tuple, episodes))


@pytest.mark.parametrize(("turns", "longest"), [(1, 400), (2, 410), (3, 810)])
def test_the_longest_of_many_groups_counts(tmp_path, turns, longest):
    file = tmp_path / "lengths.json"
    groups = [[9, 10]] * 5000 + [[400, 10]]
    file.write_text(json.dumps({"completion_tokens": groups, "prompt_tokens": 0, "turns": turns}))
    assert read_lengths(str(file), max_new_tokens=9).longest == longest


def test_groups_without_turns_have_no_lengths(tmp_path, groups):
    """As an external program posts them."""
    found = read_lengths(write_run(tmp_path / "some", [*groups, []]), max_new_tokens=9)
    assert len(found.groups) == len(groups)
    with pytest.raises(ConfigError, match=r"lifecycle/ has no turns of trained groups"):
        read_lengths(write_run(tmp_path / "none", [[]]), max_new_tokens=9)


def test_times_between_turns_and_of_scoring_are_those_of_the_run(tmp_path, groups):
    found = read_lengths(write_run(tmp_path, groups), max_new_tokens=9)
    assert (found.tool_s, found.score_s) == (pytest.approx(TOOL_S), pytest.approx(SCORE_S))
    found = read_lengths(write_run(tmp_path / "one_turn", [[[5], [7]]]), max_new_tokens=9)
    assert found.tool_s == 0.0


def test_a_run_without_samples_has_an_assumed_prompt(tmp_path, groups):
    path = write_run(tmp_path, groups)
    for step in (1, 2):
        (tmp_path / "rollouts" / f"step_{step}.jsonl").write_text("")
    found = read_lengths(path, max_new_tokens=9)
    assert found.source == f"those of {path}, and an assumption: prompts of 128 tokens"
    shutil.rmtree(tmp_path / "rollouts")
    assert read_lengths(path, max_new_tokens=9).prompt_tokens == 128


def test_a_simulated_episode_has_the_turns_that_were_drawn():
    config = load_config(
        {
            "model": "m",
            "engine": {"count": 1, "max_sequences": 8},
            "rollout": {"group_size": 2},
            "trainer": {"groups_per_step": 1},
            "buffer": {"max_staleness": 0},
            "weights": {"interrupt": "barrier"},
        }
    )
    costs = dict.fromkeys(
        ("first_s", "admit_s", "start_s", "train_step_s", "microbatch_s", "train_token_s"), 0.0
    )
    found = Calibration(
        **costs, shape={}, num_cores=2, decode_step_s=1.0, sequence_s=0.0, publish_s=0.0, score_s=0
    )
    group = [np.array([5]), np.array([2, 3, 4])]
    lengths = Lengths(groups=(group,), tool_s=10.0)
    predicted = simulate(config, found, lengths, steps=1, warm_up=0)
    assert predicted.ends_s[0] == pytest.approx(2 + 10 + 3 + 10 + 4)
    assert predicted.tokens_per_s * predicted.ends_s[0] == pytest.approx(5 + 2 + 3 + 4)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "neither a JSON file nor"),
        ("[]", "whole numbers from 1 to 1,000,000,000"),
        ("{}", "are empty"),
        ("[1, 0]", "whole numbers from 1 to 1,000,000,000"),
        ("[1.5]", "whole numbers from 1 to 1,000,000,000"),
        ("[1, 1000000001]", "whole numbers from 1 to 1,000,000,000"),
        ("[1e30]", "whole numbers from 1 to 1,000,000,000"),
        ('{"completion_tokens": null}', "whole numbers from 1 to 1,000,000,000"),
        ("[" * 100_000, "neither a JSON file nor"),
        ('{"prompt_tokens": 100}', "neither completion_tokens, nor both median and p90; add them"),
        ('{"median": 800}', "neither completion_tokens, nor both median and p90; add them"),
        ("[[3], [[4]]]", "whole numbers from 1 to 1,000,000,000"),
        ('{"medain": 3}', "did you mean 'median'"),
        ('{"median": "x"}', "median = 'x' is not a number"),
        ('{"median": true}', "median = True is not a number"),
        ('{"median": 9, "p90": 1e300}', r"p90 = 1e\+300 is not a number from 0 to 1,000,000,000"),
        ('{"turns": 1.5}', "turns = 1.5 is not a whole number"),
        ('{"median": 9, "p90": 3}', "1 <= median <= p90"),
        ('{"median": 9, "p90": 9, "task_share": 2}', "below 1"),
        ("3", "are empty"),
    ],
)
def test_bad_lengths_are_one_sentence(tmp_path, text, says):
    file = tmp_path / "lengths.json"
    file.write_text(text)
    with pytest.raises(ConfigError, match=says):
        read_lengths(str(file), max_new_tokens=100)


def test_lengths_come_from_parameters_files_or_nothing(tmp_path):
    file = tmp_path / "lengths.json"
    file.write_text('{"completion_tokens": [[10, 20], [400]], "prompt_tokens": 7}')
    assert read_lengths(str(file), max_new_tokens=9).longest == 407
    given = read_lengths("median=50,p90=100,turns=2", max_new_tokens=10_000)
    assert given.mean == pytest.approx(2 * 50 * math.exp((math.log(2) / 1.2816) ** 2 / 2), rel=0.1)
    assert read_lengths(None, max_new_tokens=64).source.startswith("an assumption")
