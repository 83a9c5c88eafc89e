"""Completions that errors quote must not control the terminal of the user."""

import io
import json
import subprocess
import sys

import pytest
from echo_worker import ask
from rich.console import Console
from synthetic_run import make_run, metrics_row

from millrace.cli.main import main, report
from millrace.cluster.hub import Hub
from millrace.core.errors import ConfigError, ScoreError, WorkerError, printable
from millrace.monitoring.terminal.progress import make_progress
from millrace.run.execution.evaluate import EvalResult, results_table

HOSTILE = "\x1b]0;owned\x07\x1b[2J\x9b31m\rerror\x08\u202egnp.exe\u2066\u2028\ud800\x00\x7f"
CONTROLS = set(HOSTILE) - set("]0;owned[2J31merrorgnp.exe")


def test_printable_text_stays_and_controls_are_escaped():
    assert printable("naïve → 你好\n\tline 😀") == "naïve → 你好\n\tline 😀"
    assert printable("a\x1b[2J\r\u202e\x9b") == r"a\x1b[2J\r\u202e\x9b"
    assert not CONTROLS & set(printable(HOSTILE))


def test_errors_of_the_command_line_are_escaped(capfd):
    error = WorkerError(f"A reward failed: {HOSTILE}.", worker="scorer-0", traceback=HOSTILE)
    report(error)
    report(ConfigError(HOSTILE))
    shown = capfd.readouterr().err
    assert not CONTROLS & set(shown)
    assert shown.count(r"\x1b]0;owned\x07") == 3


def test_a_hostile_argument_does_not_reach_the_terminal():
    command = [sys.executable, "-m", "millrace", "inspect", "no\x1b[2J\u202erun"]
    ran = subprocess.run(command, capture_output=True, text=True)
    assert ran.returncode == 2
    assert r"no\x1b[2J\u202erun" in ran.stderr
    assert "\x1b" not in ran.stderr


@pytest.mark.parametrize("mode", ["lines", "live"])
def test_notes_of_a_run_are_escaped(mode):
    shown = io.StringIO()
    progress = make_progress(mode, console=Console(file=shown, width=400))
    progress.note(f"a group failed: {ScoreError(HOSTILE)}")
    assert not CONTROLS & set(shown.getvalue())
    assert r"\x1b]0;owned" in shown.getvalue()


async def test_logs_of_workers_are_escaped(tmp_path):
    async with Hub(log_dir=tmp_path, on_event=lambda *_: None) as hub:
        worker = await hub.launch("echo-0", "echo_worker")
        with pytest.raises(WorkerError):
            await worker.call(ask("quote a completion"))
    log = (tmp_path / "echo-0.log").read_text()
    assert log.count(r"a \x1b[2J completion \u202e") >= 2
    assert not {"\x1b", "\u202e", "\r"} & set(log)


def test_the_files_of_a_run_and_names_of_models_are_escaped(tmp_path, capfd):
    """A run directory may come from somebody else."""
    run = make_run(tmp_path / "run", steps=2)
    hostile = HOSTILE.replace("\ud800", "")
    with run.metrics.open("a") as file:
        row = {**metrics_row(3), f"dropped/{hostile}": 1}
        file.write(f"{json.dumps(row, ensure_ascii=False)}\n")
    run.warnings.write_text(hostile)
    assert main(["inspect", "--no-plots", str(run.path)]) == 0
    result = EvalResult(
        model=f"{hostile}[red]",
        step=None,
        accuracy=0.5,
        standard_error=None,
        reward_mean=None,
        pass_at={},
        num_tasks=1,
        num_failed=0,
        samples=1,
    )
    Console(width=400).print(results_table([result]))
    shown = capfd.readouterr().out
    assert not CONTROLS & set(shown)
    assert shown.count(r"\x1b]0;owned") == 3
    assert "[red]" in shown
