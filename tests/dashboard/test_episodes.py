"""Sampled episodes, the life of groups and the ledger, as the views ask for them."""

import msgspec
import pytest

from millrace.core.errors import ConfigError
from millrace.dashboard.runs import EXCERPT, RunReader


@pytest.fixture(scope="module")
def run(write_run, tmp_path_factory) -> RunReader:
    path = tmp_path_factory.mktemp("runs") / "run"
    write_run(path, steps=4, spans=40)
    reader = RunReader(path, id="0")
    reader.refresh()
    return reader


def test_every_recorded_step_can_be_chosen(run):
    assert run.steps() == {"samples": [1, 2, 3, 4], "lives": [1, 2, 3, 4]}


def test_a_list_holds_the_beginning_of_long_texts_and_an_episode_all_of_it(run):
    listed = run.episodes(step=2)["episodes"]
    place = next(e["place"] for e in listed if e["completion"].startswith("xxx"))

    assert len(listed[place]["completion"]) == EXCERPT
    assert len(run.episode(step=2, place=place).completion) == 1_000_000
    assert len(msgspec.json.encode(listed)) < 20_000


def test_search_reads_all_steps_newest_first(run):
    found = run.episodes(text="OWNED")

    assert [episode["step"] for episode in found["episodes"]] == [2]
    assert found["down_to"] == 1
    steps = [episode["step"] for episode in run.episodes()["episodes"]]
    assert steps == sorted(steps, reverse=True)


def test_an_episode_that_is_not_there_is_an_error(run):
    with pytest.raises(ConfigError, match="Step 99 has 0 sampled episodes"):
        run.episode(step=99)


def test_a_batch_has_the_times_of_its_groups(run):
    life = run.batch(step=3)

    assert life is not None
    assert life.step == 3
    assert all(group.started_s < life.end_s for group in life.groups)
    assert run.batch(step=99) is None


def test_ledger_counts_all_tasks_and_finds_one(run):
    ledger = run.ledger()
    assert sum(count for _, _, count in ledger["counts"]) == len(ledger["tasks"])

    trained = run.ledger(status="trained")["tasks"]
    assert {task["status"] for task in trained} == {"trained"}
    newest = trained[0]["number"]
    assert run.ledger(number=newest)["tasks"] == trained[:1]
    assert run.ledger(status="trained", before=newest)["tasks"] == trained[1:]
    assert run.ledger(number=10**9)["tasks"] == []
