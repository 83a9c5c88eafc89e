"""The HTTP side of the dashboard: the token, headers, answers and events."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator

import aiohttp
import pytest
from synthetic_run import make_run, metrics_row

from millrace.dashboard.server import STATIC, Dashboard, make_dashboard_app
from millrace.serving.server import http_listener

TOKEN = "secret"
KEY = {"Authorization": f"Bearer {TOKEN}"}


@contextlib.asynccontextmanager
async def serving(*paths) -> AsyncIterator[aiohttp.ClientSession]:
    dashboard = Dashboard(paths)
    app = make_dashboard_app(dashboard, token=TOKEN)
    async with http_listener(app, host="127.0.0.1", port=0) as url:
        watching = asyncio.create_task(dashboard.watch())
        try:
            jar = aiohttp.CookieJar(unsafe=True)  # keeps cookies of IP addresses, as browsers do
            async with aiohttp.ClientSession(url, cookie_jar=jar) as session:
                yield session
        finally:
            watching.cancel()


async def read(session, path: str, status: int = 200):
    async with session.get(path, headers=KEY) as response:
        assert response.status == status, await response.text()
        return await response.json()


async def test_nothing_about_a_run_is_served_without_the_token(tmp_path):
    make_run(tmp_path)
    async with serving(tmp_path) as session:
        paths = ("/", "/events", "/runs/0/overview", "/runs/0/trace.json", "/?token=wrong")
        for path in paths:
            async with session.get(path) as response:
                assert response.status == 401
                assert "demo" not in await response.text()
        async with session.get("/static/app.js") as response:
            assert response.status == 200


async def test_the_url_with_the_token_lets_a_browser_in(tmp_path):
    make_run(tmp_path)
    async with serving(tmp_path) as session:
        async with session.get(f"/?token={TOKEN}") as response:
            cookie = response.headers["Set-Cookie"]
            assert "HttpOnly" in cookie
            assert "SameSite=Strict" in cookie
        async with session.get("/runs/0/overview") as response:
            assert response.status == 200


async def test_every_answer_forbids_foreign_scripts(tmp_path):
    make_run(tmp_path)
    async with serving(tmp_path) as session:
        for path in ("/", "/static/app.js", "/runs/0/overview", "/nowhere"):
            async with session.get(path, headers=KEY) as response:
                policy = response.headers["Content-Security-Policy"]
                assert "default-src 'none'" in policy
                assert "unsafe" not in policy
                assert response.headers["X-Content-Type-Options"] == "nosniff"


def test_the_page_needs_no_inline_script_or_style_and_no_other_host():
    for path in STATIC.rglob("*"):
        if path.suffix in (".html", ".js", ".css") and path.parent.name != "vendor":
            text = path.read_text()
            for forbidden in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write"):
                assert forbidden not in text, path
            assert "eval(" not in text, path
            assert len(text.splitlines()) <= 400, path
    page = (STATIC / "index.html").read_text()
    assert "style=" not in page
    assert "://" not in page


async def test_only_get_is_allowed_and_paths_stay_inside(tmp_path):
    make_run(tmp_path)
    async with serving(tmp_path) as session:
        async with session.post("/runs/0/overview", headers=KEY) as response:
            assert response.status == 405
        await read(session, "/runs/7/overview", status=404)
        await read(session, "/runs/0/nothing", status=404)
        await read(session, "/runs/0/log?name=..%2Fconfig.toml", status=404)
        await read(session, "/runs/0/tile?level=x", status=400)
        async with session.get("/static/%2e%2e/server.py", headers=KEY) as response:
            assert response.status in (403, 404)


async def test_answers_describe_each_run(tmp_path):
    make_run(tmp_path / "a", steps=20)
    make_run(tmp_path / "b", steps=30)
    async with serving(tmp_path / "a", tmp_path / "b") as session:
        assert (await read(session, "/runs/1/overview"))["step"] in (0, 30)
        await first_event(session)
        assert (await read(session, "/runs/0/overview"))["step"] == 20
        curves = await read(session, "/runs/1/curves?keys=reward/mean&points=10")
        assert len(curves["reward/mean"]) == len(curves["step"]) == 10
        timeline = await read(session, "/runs/0/timeline")
        assert [track["worker"] for track in timeline["tracks"]] == ["engine-0", "trainer"]
        async with session.get("/runs/0/tile?level=10&index=0", headers=KEY) as response:
            assert len(await response.read()) > 8
        span = await read(session, "/runs/0/span?worker=trainer&us=3600000")
        assert span["name"] in ("generation", "scores", "step", "publish")
        ledger = await read(session, "/runs/0/ledger")
        assert ledger == {"counts": [], "tasks": []}


async def test_damaged_files_are_errors_with_a_sentence(tmp_path):
    run_dir = make_run(tmp_path)
    run_dir.trace.write_text("not a trace\n")
    async with serving(tmp_path) as session:
        answer = await read(session, "/runs/0/timeline", status=404)
        assert "is not a trace of Millrace" in answer["error"]["message"]


async def first_event(session) -> dict:
    async with session.get("/events", headers=KEY) as response:
        return await next_event(response)


async def next_event(response) -> dict:
    async for line in response.content:
        if line.startswith(b"data: ") and (event := json.loads(line[6:])):
            return event
    pytest.fail("the events have ended")


async def test_viewers_are_told_about_new_steps(tmp_path):
    run_dir = make_run(tmp_path, steps=5, finished=False)
    run_dir.metrics.write_text("")
    async with serving(tmp_path) as session, session.get("/events", headers=KEY) as response:
        assert (await next_event(response))["runs"][0]["step"] == 0
        run_dir.metrics.write_text(json.dumps(metrics_row(1)) + "\n")
        assert (await next_event(response))["runs"][0]["step"] == 1
        assert (await read(session, "/runs/0/overview"))["step"] == 1


async def test_slow_viewer_gets_news_that_came_while_it_received_an_event(tmp_path):
    run_dir = make_run(tmp_path, steps=5, finished=False)
    run_dir.metrics.write_text("")
    dashboard = Dashboard([tmp_path])
    slow, fast = dashboard.events(), dashboard.events()
    assert [await anext(slow), await anext(fast)] == [{}, {}]
    watching = asyncio.create_task(dashboard.watch())
    assert [(await anext(v))["runs"][0]["step"] for v in (slow, fast)] == [0, 0]
    run_dir.metrics.write_text(json.dumps(metrics_row(1)) + "\n")
    assert (await anext(fast))["runs"][0]["step"] == 1
    watching.cancel()  # there is no more news
    assert (await anext(slow))["runs"][0]["step"] == 1
