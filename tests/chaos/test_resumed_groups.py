"""The controller is killed while groups are running; the next one resumes from their tokens."""

from collections import Counter
from pathlib import Path

import pytest
from killable_run import KillableRun

from millrace.core.completions import join_streamed
from millrace.core.errors import JournalError
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
def make_run(tmp_path):
    runs: list[KillableRun] = []

    def make(**sections) -> KillableRun:
        settings = {
            "sampling": {"max_new_tokens": 200},
            "journal": {"partial_every_s": 0.05},
        }
        runs.append(KillableRun(tmp_path, steps=6, **{**settings, **sections}))
        return runs[-1]

    yield make
    for run in runs:
        run.close()


def history_of(run: KillableRun) -> JournalHistory | None:
    try:
        return read_journal(run.path / "journal")
    except JournalError:  # it is just being written
        return None


def saved_in(history: JournalHistory, folder: Path) -> dict[int, Counter[str]]:
    """Saved tokens of each running task, by request."""
    saved = {}
    for number in history.ledger.running:
        known = join_streamed(read_tokens(folder, number))
        if known:
            saved[number] = Counter()
        for (request, _), one in known.items():
            saved[number][request] += len(one.part.tokens)
    return saved


def thread_states(pid: int) -> list[str]:
    """T = stopped. A thread that writes may run for a moment after the signal."""
    stats = Path(f"/proc/{pid}/task").glob("*/stat")
    return [stat.read_text().rpartition(") ")[2][0] for stat in stats]


def kill_in_flight(run: KillableRun, *, turn: int = 0) -> dict[int, Counter[str]]:
    """Kill the run once tokens of such a turn are saved; returns all saved tokens."""

    def saved_so_far() -> dict[int, Counter[str]]:
        history = history_of(run)
        return {} if history is None else saved_in(history, run.path / "journal")

    def is_suspended_with_tokens() -> bool:
        run.controller.suspend()
        run.until(lambda: all(state == "T" for state in thread_states(run.controller.pid)))
        requests = [request for one in saved_so_far().values() for request in one]
        if any(turn == 0 or request.endswith(f".{turn}") for request in requests):
            return True
        run.controller.resume()
        return False

    run.until(lambda: run.step >= 2)
    run.until(is_suspended_with_tokens)
    run.kill()
    # Read again: a commit that the signal had stopped becomes visible when the process is dead.
    return saved_so_far()


def assert_resumed_from(run: KillableRun, saved: dict[int, Counter[str]]) -> None:
    """Every saved token was used, or is counted as wasted with a reason."""
    summary = run.summary()
    wasted = table(read_metrics(run.path / "metrics.jsonl")[-1], "tokens/wasted")
    num_saved = sum(requests.total() for requests in saved.values())
    num_wasted = wasted.get("outdated", 0) + wasted.get("not_resumed", 0)
    assert summary["resumed_tokens"] > 0
    assert summary["resumed_tokens"] + num_wasted == num_saved


def test_completions_resume_after_the_controller_is_killed(make_run):
    run = make_run()
    run.start()
    saved = kill_in_flight(run)
    run.start("--resume")
    assert_resumed_from(run, saved)


def test_episodes_with_several_turns_resume_after_the_controller_is_killed(make_run, tmp_path):
    (tmp_path / "play.py").write_text(ENVIRONMENT)
    run = make_run(environment={"function": "play.py:play"}, sampling={"max_new_tokens": 60})
    run.start()
    saved = kill_in_flight(run, turn=1)
    run.start("--resume")
    assert_resumed_from(run, saved)


def test_run_survives_a_second_kill_before_resumed_groups_are_complete(make_run):
    run = make_run()
    run.start()
    kill_in_flight(run)
    before = history_of(run)
    assert before is not None
    run.start("--resume")
    run.until(
        lambda: (history := history_of(run)) is not None and history.position > before.position
    )
    saved = kill_in_flight(run)
    run.start("--resume")
    assert_resumed_from(run, saved)
