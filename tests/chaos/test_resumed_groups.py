"""The controller is killed while groups are in flight; the next one goes on from what they had."""

from collections import Counter
from pathlib import Path

import pytest
from torn_run import TornRun

from millrace.core.errors import JournalError
from millrace.core.partials import put_together
from millrace.journal import JournalHistory, read_journal
from millrace.journal.reading import read_tokens
from millrace.monitoring.files.metrics import read_metrics, table

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

ENVIRONMENT = """
async def play(task, agent):
    text = task.prompt
    for _ in range(3):
        reply = await agent.complete(text)
        text += reply.text + "+1="
    return sum(c.isdigit() for c in text) / len(text)
"""


@pytest.fixture
def torn(tmp_path):
    runs: list[TornRun] = []

    def make(**sections) -> TornRun:
        settings = {
            "sampling": {"max_new_tokens": 200},
            "journal": {"partial_every_s": 0.05},
            "supervision": {"report_s": 0.05, "backoff_s": 0.05},
        }
        runs.append(TornRun(tmp_path, steps=6, **{**settings, **sections}))
        return runs[-1]

    yield make
    for run in runs:
        run.close()


def past_of(run: TornRun) -> JournalHistory | None:
    try:
        return read_journal(run.path / "journal")
    except JournalError:  # it is being written
        return None


def told_in(past: JournalHistory, folder: Path) -> dict[int, Counter[str]]:
    """By number in flight: how many tokens were told, by request."""
    told = {}
    for number in past.ledger.running:
        known = put_together(read_tokens(folder, number))
        if known:
            told[number] = Counter()
        for (request, _), one in known.items():
            told[number][request] += len(one.completion.tokens)
    return told


def kill_in_flight(run: TornRun, *, num_requests: int) -> dict[int, Counter[str]]:
    """When enough was written down of requests in flight; returns what the disk holds then."""

    def told_at_a_standstill() -> dict[int, Counter[str]] | None:
        run.controller.suspend()
        past = past_of(run)
        told = {} if past is None else told_in(past, run.path / "journal")
        if sum(len(requests) for requests in told.values()) >= num_requests:
            return told
        run.controller.resume()
        return None

    run.until(lambda: run.step >= 2)
    told = run.until(told_at_a_standstill)
    run.kill()
    return told


def assert_gone_on_from(run: TornRun, told: dict[int, Counter[str]]) -> None:
    """Every token that was written down was used again, or is counted with the reason why not."""
    summary = run.summary()
    wasted = table(read_metrics(run.path / "metrics.jsonl")[-1], "tokens/wasted")
    num_told = sum(requests.total() for requests in told.values())
    num_wasted = wasted.get("outdated", 0) + wasted.get("unasked", 0)
    assert summary["resumed_tokens"] > 0
    assert summary["resumed_tokens"] + num_wasted == num_told


def test_completions_in_flight_go_on_after_a_kill_of_the_controller(torn):
    run = torn()
    run.start()
    told = kill_in_flight(run, num_requests=1)
    run.start("--resume")
    assert_gone_on_from(run, told)


def test_episodes_of_many_turns_go_on_after_a_kill_of_the_controller(torn, tmp_path):
    (tmp_path / "play.py").write_text(ENVIRONMENT)
    run = torn(environment={"function": "play.py:play"}, sampling={"max_new_tokens": 60})
    run.start()
    told = kill_in_flight(run, num_requests=9)
    assert any(".1" in request for requests in told.values() for request in requests), "one turn"
    run.start("--resume")
    assert_gone_on_from(run, told)


def test_a_run_is_killed_again_before_what_was_resumed_is_done(torn):
    run = torn()
    run.start()
    kill_in_flight(run, num_requests=1)
    before = past_of(run)
    assert before is not None
    run.start("--resume")
    run.until(lambda: (past := past_of(run)) is not None and past.position > before.position)
    told = kill_in_flight(run, num_requests=1)
    run.start("--resume")
    assert_gone_on_from(run, told)
