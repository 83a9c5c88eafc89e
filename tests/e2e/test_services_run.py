"""A run whose judge is an unreliable service behind a gate, and one with a slow scorer."""

import asyncio
import json
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import ClassVar

import pytest
from tiny_model import make_tiny_model

import millrace as mr
from millrace.monitoring.files.metrics import read_metrics, table

KEY = "sk-not-to-be-seen"
STEPS = 4


class FailingJudge(BaseHTTPRequestHandler):
    """Fails every other request, in turn with status 500, 429, invalid JSON and no score."""

    num_requests = 0
    keys: ClassVar[set[str]] = set()

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        FailingJudge.num_requests += 1
        FailingJudge.keys.add(self.headers["Authorization"])
        turn = FailingJudge.num_requests % 8
        status = {1: 500, 3: 429}.get(turn, 200)
        content = body["messages"][-1]["content"]
        score = f'{{"score": {len(set(content)) / 10}}}' if turn != 5 else "no idea"
        answer = {"choices": [{"message": {"content": score}}]}
        data = b"{" if turn == 7 else json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.send_header("Retry-After", "0")
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *args):
        """Print nothing."""


@pytest.fixture
def judge_url():
    server = ThreadingHTTPServer(("127.0.0.1", 0), FailingJudge)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_address[1]}/v1"
    server.shutdown()
    server.server_close()


def starts_even(completions, **columns):
    return [float(text[:1] in "02468") for text in completions]


@pytest.mark.slow
def test_judge_that_fails_every_other_time_costs_no_group(judge_url, tmp_path, monkeypatch):
    monkeypatch.setenv("JUDGE_KEY", KEY)
    judge = {
        "type": "judge",
        "url": judge_url,
        "model": "m",
        "prompt": "{prompt} {completion}",
        "key": "score",
        "headers": {"Authorization": "Bearer env:JUDGE_KEY"},
        "when": "starts_even >= 1",
        "keep": True,
        "concurrency": 4,
    }
    result = mr.train(
        {"scorers": [judge]},
        model=str(make_tiny_model(tmp_path / "model")),
        run_dir=str(tmp_path / "run"),
        tasks=[{"prompt": f"{n}+1="} for n in range(10)],
        scorers=[starts_even],
        sampling={"max_new_tokens": 8},
        scoring={"workers": 1},
        rollout={"group_size": 4},
        trainer={"steps": STEPS, "groups_per_step": 4},
        cluster={"threads": 1},
        monitoring={"progress": "off"},
    )
    assert result.steps == STEPS
    last = read_metrics(result.run_dir / "metrics.jsonl")[-1]
    assert table(last, "failed") == {}
    load = table(last, "scorer/judge")
    assert load["retries"] > 0
    assert load["failures"] == 0
    assert load["skipped"] > 0
    assert 0 < last["rewards/judge/share"] < 1
    assert FailingJudge.keys == {f"Bearer {KEY}"}
    assert (result.run_dir / "scorers" / "judge.jsonl").read_text()
    for file in Path(result.run_dir).rglob("*"):
        assert not file.is_file() or KEY.encode() not in file.read_bytes(), file


async def slow_reward(completions, **columns):
    await asyncio.sleep(0.3)
    return [float(len(set(text))) for text in completions]


@pytest.mark.slow
def test_run_reports_that_it_waits_for_a_scorer(tmp_path, capsys):
    slow = {"function": f"{__file__}:slow_reward", "concurrency": 1}
    result = mr.train(
        {"scorers": [slow]},
        model=str(make_tiny_model(tmp_path / "model")),
        run_dir=str(tmp_path / "run"),
        tasks=[{"prompt": f"{n}+1="} for n in range(10)],
        sampling={"max_new_tokens": 8},
        scoring={"workers": 1},
        rollout={"group_size": 4},
        trainer={"steps": 6, "groups_per_step": 4},
        cluster={"threads": 1},
        monitoring={"progress": "lines"},
    )
    last = read_metrics(result.run_dir / "metrics.jsonl")[-1]
    assert last["waiting/trainer/scores"] > 0.3
    assert last["scorer/slow_reward/busy"] > 0.5
    assert last["scorer/slow_reward/wait_s"] > 0
    output = capsys.readouterr().out
    assert "scoring limits the run: the trainer spends" in output
    assert re.search(r"slow_reward 1/1 busy, \d+ episodes wait", output)
