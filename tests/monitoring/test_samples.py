import json
from dataclasses import replace

import numpy as np
import pytest

from millrace.config import load_config
from millrace.core.records import (
    Episode,
    Group,
    Kept,
    Rollout,
    Sampling,
    Score,
    Task,
    Turn,
)
from millrace.core.spans import GroupLife, TurnLife
from millrace.monitoring.files.episodes import StepFiles, StepLife, StepRecorder, read_lifecycle
from millrace.monitoring.files.samples import EpisodeSampler, pick, read_samples
from millrace.monitoring.run_dir import RunDir, steps_in

HOSTILE = "</script><script>alert(1)</script>\x1b[31m\u202e\u2028\0" + "x" * 1_000_000


def episode(completion: str, *, versions: list[int]) -> Episode:
    stamps = np.array([-1, *versions], dtype=np.int32)  # after a prompt of one token
    rollout = Rollout(
        tokens=np.arange(len(stamps), dtype=np.int32),
        mask=stamps >= 0,
        engine_logprobs=np.where(stamps >= 0, -0.5, 0).astype(np.float32),
        versions=stamps,
        sampling=Sampling(),
    )
    turn = Turn(prompt="2+2=", completion=completion, finish="stop")
    return Episode(turns=(turn,), rollouts=(rollout,))


def group(number: int, *, answer: object = "4") -> Group:
    return Group(
        number=number,
        task=Task(prompt="2+2=", columns={"answer": answer}),
        episodes=(episode("4", versions=[3, 4]), episode("vier", versions=[4, 4, 4])),
        scores=(
            Score(total=1.0, parts={"correct": 1.0, "short": None}),
            Score(total=0.0, parts={"correct": 0.0, "short": None}),
        ),
        advantages=np.array([0.5, -0.5], dtype=np.float32),
    )


def step_life(step: int, **changes) -> StepLife:
    times = {"begin_s": 2.0, "end_s": 3.0, "unix_s": 1e9}
    return StepLife(**{"step": step, **times, "groups": [], "replayed": [], "lost": [], **changes})


async def record(folder, step, groups, *, reported=None, per_step=1, life=None):
    config = load_config({"model": "m", "monitoring": {"samples_per_step": per_step}})
    recorder = StepRecorder(config, RunDir(folder), decode=lambda ids: "".join(map(str, ids)))
    recorder.write(life or step_life(step), groups, reported or {})
    await recorder.written()
    return read_samples(RunDir(folder), step)


async def test_an_episode_is_readable(tmp_path):
    await record(tmp_path, 7, [group(12)])
    (line,) = (tmp_path / "rollouts/step_7.jsonl").read_text().splitlines()
    row = json.loads(line)
    assert (
        row.items()
        >= {
            "group": 12,
            "prompt": "2+2=",
            "completion": "4",
            "finish": "stop",
            "score": 1.0,
            "parts": {"correct": 1.0, "short": None},
            "advantage": 0.5,
            "versions": [3, 4],
            "tokens": 2,
            "columns": {"answer": "4"},
        }.items()
    )


async def test_tokens_have_the_numbers_of_engine_and_trainer(tmp_path):
    kept = Kept(ids=np.arange(5, dtype=np.int32), offsets=np.array([0, 0, 2, 5]))
    first = group(12)
    rollout = replace(first.episodes[0].rollouts[0], kept=kept)
    first = replace(first, episodes=(replace(first.episodes[0], rollouts=(rollout,)),))
    numbers = np.array([[-0.25, np.nan], [1.5, 2.0], [0.5, 0.5]], np.float32)
    (found,) = await record(tmp_path, 7, [first], reported={0: numbers}, per_step=4)
    assert (found.step, found.episode, found.group_scores) == (7, 0, [1.0, 0.0])
    (tokens,) = found.rollouts
    assert tokens.ids == [0, 1, 2]
    assert tokens.trained == [0, 1, 1]
    assert tokens.versions == [-1, 3, 4]
    assert tokens.engine_logprobs == [0.0, -0.5, -0.5]
    assert tokens.trainer_logprobs == [None, -0.25, None]  # JSON has no NaN
    assert tokens.entropies == [None, 1.5, 2.0]
    assert tokens.advantages == [None, 0.5, 0.5]
    assert tokens.kept == [0, 2, 3]


async def test_different_groups_come_before_more_of_one_group(tmp_path):
    found = await record(tmp_path, 1, [group(1), group(2)], per_step=3)
    assert [(row.group, row.completion) for row in found] == [(1, "4"), (2, "4"), (1, "vier")]


async def test_step_with_few_episodes_writes_all_of_them(tmp_path):
    assert len(await record(tmp_path, 1, [group(1)], per_step=10)) == 2


async def test_zero_per_step_writes_no_samples(tmp_path):
    assert await record(tmp_path, 1, [group(1)], per_step=0) == []
    assert steps_in(tmp_path / "rollouts") == []


@pytest.mark.parametrize(
    ("answer", "shown"), [({1, 2}, "{1, 2}"), ("a\ud800", "a\\ud800"), (HOSTILE, HOSTILE)]
)
async def test_any_value_of_a_task_can_be_written_and_read(tmp_path, answer, shown):
    (found,) = await record(tmp_path, 1, [group(1, answer=answer)])
    assert found.columns == {"answer": shown}


async def test_files_of_older_runs_are_read_without_tokens(tmp_path):
    await record(tmp_path, 1, [group(1)])
    path = tmp_path / "rollouts/step_1.jsonl"
    row = json.loads(path.read_text())
    new = ("step", "episode", "group_scores", "ending", "branching", "turns", "rollouts")
    path.write_text(json.dumps({key: value for key, value in row.items() if key not in new}))
    (found,) = read_samples(RunDir(tmp_path), 1)
    assert (found.group, found.rollouts) == (1, [])


def test_a_character_of_several_tokens_is_shown_once():
    pieces = [b"a", b"\xf0", b"\x9f", b"\x98\x80", b"\xe2", b" b", b"\xff"]
    sampler = EpisodeSampler(lambda ids: b"".join(pieces[i] for i in ids).decode(errors="replace"))
    tokens = np.arange(len(pieces), dtype=np.int32)
    rollout = episode("", versions=[0] * (len(pieces) - 1)).rollouts[0]
    played = Episode(
        turns=(Turn(prompt="", completion="", finish="stop"),),
        rollouts=(replace(rollout, tokens=tokens),),
    )
    one = replace(group(1), episodes=(played,), scores=group(1).scores[:1])
    (found,) = sampler.sample(one, 0, step=1, reported={}).rollouts
    assert found.texts == ["a", "", "", "\U0001f600", "", " b", ""]


async def test_times_of_groups_are_written_and_read(tmp_path):
    life = GroupLife(
        number=3,
        tries=1,
        started_s=0.5,
        generated_s=1.0,
        scored_s=None,
        ended_s=1.5,
        outcome="dropped",
        reason="zero_variance",
        turns={0: [TurnLife(0.5, 0.75, 7, 3, 4)], 1: []},
        scores=[1.0, 0.0],
    )
    await record(tmp_path, 5, [group(1)], life=step_life(5, lost=[life], replayed=[1]))
    found = read_lifecycle(RunDir(tmp_path), 5)
    assert found is not None
    (lost,) = found.lost
    assert lost.turns == life.turns
    assert lost.turns[0][0].last_version == 4
    assert (lost.reason, lost.scored_s, found.replayed) == ("zero_variance", None, [1])
    assert read_lifecycle(RunDir(tmp_path), 6) is None


async def test_a_file_that_cannot_be_written_is_an_error_of_the_next_step(tmp_path):
    (tmp_path / "rollouts").write_text("not a folder")
    with pytest.raises(OSError, match="rollouts"):
        await record(tmp_path, 1, [group(1)])


def test_old_steps_are_thinned_out(tmp_path):
    files = StepFiles(tmp_path, max_bytes=2000)
    for step in range(1, 101):
        files.write(step, ["x" * 97])  # 100 bytes
        sizes = [path.stat().st_size for path in tmp_path.iterdir()]
        assert sum(sizes) <= 2000
    steps = steps_in(tmp_path)
    assert steps[0] == 1
    assert steps[-5:] == [96, 97, 98, 99, 100]
    gaps = np.diff(steps)
    assert max(gaps[: len(gaps) // 2]) > max(gaps[len(gaps) // 2 :])
    again = StepFiles(tmp_path, max_bytes=2000)  # a resumed run counts what is there
    again.write(101, ["x" * 97])
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) <= 2000


def test_pick_does_not_look_at_scores():
    groups = [group(1), group(2)]
    assert [(g.number, i) for g, i in pick(groups, 3)] == [(1, 0), (2, 0), (1, 1)]
