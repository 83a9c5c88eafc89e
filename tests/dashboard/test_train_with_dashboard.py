"""`millrace train --dashboard`: a process beside the run that ends with it."""

import re
import time
import urllib.error
import urllib.request

import pytest
from project import Command, make_project

pytestmark = pytest.mark.slow


def fetch(url: str, path: str) -> str:
    base, token = re.fullmatch(r"(http://.*/)\?token=(.*)", url).groups()
    key = {"Authorization": f"Bearer {token}"}
    with urllib.request.urlopen(urllib.request.Request(base + path, headers=key)) as response:
        return response.read().decode()


def test_a_run_shows_itself_and_the_dashboard_ends_with_it(tmp_path):
    make_project(tmp_path, trainer={"steps": 4})
    command = Command("train", "run.toml", "--dashboard", folder=tmp_path)
    assert command.process.stdout is not None
    url = ""
    while not url:
        line = command.process.stdout.readline()
        assert line, command.finish()
        url = "".join(re.findall(r"Dashboard: (http://\S+)", line))

    command.wait_for(tmp_path / "run" / "metrics.jsonl", lines=2)
    deadline = time.monotonic() + 30
    while '"step":0,' in (text := fetch(url, "runs/0/overview")):
        assert time.monotonic() < deadline
        time.sleep(0.2)
    assert '"reward/mean"' in text

    code, _, stderr = command.finish()
    assert code == 0, stderr
    deadline = time.monotonic() + 30
    while True:
        try:
            fetch(url, "runs/0/overview")
        except urllib.error.URLError:
            break
        assert time.monotonic() < deadline, "the dashboard outlives the run"
        time.sleep(0.2)
