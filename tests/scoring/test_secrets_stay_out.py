"""Secrets of a run appear neither in its files nor in its output."""

import traceback
from pathlib import Path

import pytest
from aiohttp import web
from scoring_service import FakeService, open_pool, running, scores_of

from millrace.config import load_config
from millrace.core.errors import ScoreError
from millrace.monitoring.run_dir import RunDir

SECRET = "sk-planted-0123456789"
HEADERS = {"Authorization": "Bearer env:PLANTED_KEY", "X-Other": "env:PLANTED_KEY"}
JUDGE = {"type": "judge", "model": "m", "prompt": "{completion}", "key": "score", "keep": True}


async def tells_it_back(request: web.Request) -> web.Response:
    return web.Response(status=403, text=f"not you: {dict(request.headers)}")


async def tells_it_as_a_reply(request: web.Request) -> web.Response:
    said = request.headers["Authorization"]
    body = {"choices": [{"message": {"content": said}}], "scores": said}
    return web.json_response(body)


async def redirects_to_it(request: web.Request) -> web.Response:
    raise web.HTTPFound(f"http://127.0.0.1:1/{request.headers['X-Other']}")


def texts_in(folder: Path) -> list[str]:
    return [path.read_text() for path in folder.rglob("*") if path.is_file()]


@pytest.mark.parametrize("misdeed", [tells_it_back, tells_it_as_a_reply, redirects_to_it])
@pytest.mark.parametrize("kind", [{"type": "http"}, JUDGE], ids=["http", "judge"])
async def test_no_secret_appears_in_files_or_output(kind, misdeed, tmp_path, monkeypatch, capfd):
    monkeypatch.setenv("PLANTED_KEY", SECRET)
    said: list[str] = []
    async with running(FakeService(lambda body: misdeed)) as service:
        table = {**kind, "retries": 1, "url": service.url, "headers": HEADERS}
        config = load_config({"model": "m", "run_dir": str(tmp_path / "run"), "scorers": [table]})
        run_dir = RunDir(config.run_dir)
        run_dir.open(config)
        async with open_pool(table, folder=run_dir.path, warn=said.append) as pool:
            with pytest.raises(ScoreError) as caught:
                await scores_of(pool, "a")
        run_dir.close()
        assert SECRET in str(service.headers), "the secret was sent"
    left = texts_in(run_dir.path)
    assert any("env:PLANTED_KEY" in text for text in left), "the name of the variable is stored"
    account = "".join(traceback.format_exception(caught.value))
    for text in (*left, *said, account, *capfd.readouterr()):
        assert SECRET not in text
