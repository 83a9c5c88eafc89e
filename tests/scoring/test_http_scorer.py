"""The HTTP scorer against a real server that fails in every way."""

import asyncio
import time
from email.utils import formatdate

import pytest
from aiohttp import web
from scoring_service import FakeService, group, open_pool, running, scores_of

from millrace.config import load_config
from millrace.core.errors import ConfigError, ScoreError
from millrace.core.records import Task
from millrace.scoring.pool import check_scorers, resolve_scorer
from millrace.scoring.services.endpoint import retry_after_s


def lengths(body):
    return {"scores": [float(len(text)) for text in body["completions"]]}


@pytest.fixture
async def service():
    async with running(FakeService(lengths)) as service:
        yield service


def table(service, **settings):
    return {"type": "http", "url": f"{service.url}/score", **settings}


async def test_each_episode_is_one_request_with_its_task(service, tmp_path):
    async with open_pool(table(service, name="style", weight=2.0), folder=tmp_path) as pool:
        assert await scores_of(pool, "a", "bb") == [2.0, 4.0]
    assert sorted(service.bodies, key=lambda body: body["completions"]) == [
        {"scorer": "style", "prompt": "p", "completions": [text], "columns": {}}
        for text in ("a", "bb")
    ]


@pytest.mark.parametrize("batch", [0, 2])
async def test_batch_is_sent_in_one_request(service, tmp_path, batch):
    async with open_pool(table(service, batch=batch), folder=tmp_path) as pool:
        assert await scores_of(pool, "a", "bb") == [1.0, 2.0]
    assert [body["completions"] for body in service.bodies] == [["a", "bb"]]


async def test_score_of_null_is_left_out_of_the_total(service, tmp_path):
    service.reply = lambda body: {"scores": [1.0, None if body["scorer"] == "a" else 2.0]}
    tables = [table(service, batch=0, name=name) for name in "ab"]
    async with open_pool(*tables, folder=tmp_path) as pool:
        assert await scores_of(pool, "x", "y") == [2.0, 2.0]


async def test_service_behind_a_gate_gets_only_passed_episodes(service, tmp_path):
    tables = table(service, name="judge", when="format > 1"), table(service, name="format")
    async with open_pool(*tables, folder=tmp_path) as pool:
        scores = (await pool.score(group("x", "yy"))).scores
        assert pool.loads()["judge"].skipped == 1
    assert [score.parts for score in scores] == [
        {"judge": None, "format": 1.0},
        {"judge": 2.0, "format": 2.0},
    ]
    asked = [body["completions"] for body in service.bodies if body["scorer"] == "judge"]
    assert asked == [["yy"]]


async def status_500(request):
    return web.Response(status=500, text="oh no")


async def status_429(request):
    return web.Response(status=429, headers={"Retry-After": "0.05"})


async def dropped(request):
    request.transport.close()
    return web.Response()


PASSING = {
    "500": status_500,
    "429": status_429,
    "connection dropped": dropped,
    "malformed JSON": '{"scores": [1.0',
    "NaN": '{"scores": [NaN]}',
    "too few scores": {"scores": []},
    "a text": {"scores": ["good"]},
    "no scores": {"score": [1.0]},
    "no object": [1.0],
    "deeply nested": "[" * 100_000,
}


@pytest.mark.parametrize("fault", PASSING.values(), ids=PASSING)
async def test_temporary_failures_are_retried_without_loss(service, tmp_path, fault):
    service.first = [fault, fault]
    async with open_pool(table(service), folder=tmp_path) as pool:
        assert await scores_of(pool, "abc") == [3.0]
        load = pool.loads()["http"]
    assert (load.calls, load.retries, load.failures, load.episodes) == (3, 2, 0, 1)


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ('{"scores": [1.0', 'did not answer with JSON: {"scores": [1.0 (tried 3 times).'),
        ('{"scores": [NaN]}', "nan (float) for completion 0"),
        ({"scores": []}, "returned 0 values for 1 completions"),
    ],
)
async def test_answer_that_stays_unusable_fails_its_group(service, tmp_path, fault, words):
    service.reply = lambda body: fault if body["completions"] == ["bad"] else lengths(body)
    async with open_pool(table(service, retries=2), folder=tmp_path) as pool:
        with pytest.raises(ScoreError) as caught:
            await scores_of(pool, "bad")
        assert words in str(caught.value)
        assert await scores_of(pool, "good", number=1) == [4.0]
        load = pool.loads()["http"]
    assert (load.failures, load.retries, load.calls) == (1, 2, 4)


async def test_silent_service_times_out_and_is_retried(service, tmp_path):
    silent = asyncio.Event()

    async def nothing(request):
        await silent.wait()

    service.first = [nothing]
    async with open_pool(table(service, timeout_s=0.2), folder=tmp_path) as pool:
        assert await scores_of(pool, "a") == [1.0]
        assert pool.loads()["http"].retries == 1
        service.reply = lambda body: nothing
        strict = table(service, timeout_s=0.2, retries=1)
        with pytest.raises(ScoreError, match=r"gave no answer within 0.2 s \(tried 2 times\)"):
            async with open_pool(strict, folder=tmp_path, breaker_failures=0) as pool:
                await scores_of(pool, "a")
        silent.set()


async def test_client_error_is_not_retried_and_shows_the_answer(service, tmp_path):
    async def refused(request):
        return web.Response(status=404, text="no such\nroute")

    service.first = [refused]
    async with open_pool(table(service), folder=tmp_path) as pool:
        with pytest.raises(ScoreError, match=r"/score answered with status 404: no such route\.$"):
            await scores_of(pool, "a")
        assert pool.loads()["http"].calls == 1


async def test_redirect_is_not_followed(service, tmp_path):
    async def elsewhere(request):
        return web.Response(status=307, headers={"Location": f"{service.url}/other"})

    service.first = [elsewhere]
    async with open_pool(table(service), folder=tmp_path) as pool:
        with pytest.raises(ScoreError, match="status 307"):
            await scores_of(pool, "a")
    assert len(service.bodies) == 1


def test_retry_after_is_seconds_or_a_date():
    assert retry_after_s("3.5") == 3.5
    assert 50 < retry_after_s(formatdate(time.time() + 60, usegmt=True)) <= 60
    assert retry_after_s(formatdate(0, usegmt=True)) == 0.0
    assert retry_after_s("1e9") == 600.0
    assert [retry_after_s(text) for text in (None, "soon", "nan")] == [None, None, None]


async def test_groups_wait_while_the_endpoint_is_down_and_drain_afterwards(service, tmp_path):
    warnings = []
    service.reply = lambda body: status_500
    settings = table(service, concurrency=4, retries=2)
    warn = warnings.append
    async with open_pool(settings, folder=tmp_path, warn=warn, breaker_failures=3) as pool:
        waiting = [asyncio.create_task(scores_of(pool, "a", "bb", number=n)) for n in range(12)]
        while not pool.loads()["http"].is_held:  # noqa: ASYNC110
            await asyncio.sleep(0.005)
        await asyncio.sleep(0.1)
        load = pool.loads()["http"]
        assert load.waiting + load.in_flight == 24
        assert not any(task.done() for task in waiting)
        service.reply = lengths
        assert await asyncio.wait_for(asyncio.gather(*waiting), 20) == [[1.0, 2.0]] * 12
        load = pool.loads()["http"]
    assert (load.episodes, load.failures, load.waiting, load.breaker_opened) == (24, 0, 0, 1)
    (warning,) = warnings
    assert "status 500: oh no" in warning


async def test_restarted_endpoint_fails_no_group(tmp_path):
    async with running(FakeService(lengths)) as service:
        port = int(service.url.rpartition(":")[2])
    async with open_pool(table(service), folder=tmp_path, warn=lambda sentence: None) as pool:
        waiting = asyncio.create_task(scores_of(pool, "a"))
        while not pool.loads()["http"].is_held:  # noqa: ASYNC110
            await asyncio.sleep(0.005)
        async with running(service, port=port):
            assert await asyncio.wait_for(waiting, 20) == [1.0]


async def test_cancelled_group_ends_its_requests(service, tmp_path):
    gone = asyncio.Event()

    async def slow(request):
        try:
            await asyncio.sleep(60)
        finally:
            gone.set()

    service.reply = lambda body: slow
    async with open_pool(table(service), folder=tmp_path) as pool:
        waiting = asyncio.create_task(scores_of(pool, "a"))
        while not service.bodies:  # noqa: ASYNC110
            await asyncio.sleep(0.005)
        waiting.cancel()
        await asyncio.sleep(0.01)
        assert pool.loads()["http"].in_flight == 0


async def test_secrets_come_from_the_environment_and_appear_nowhere(service, tmp_path, monkeypatch):
    monkeypatch.setenv("SERVICE_KEY", "sk-very-secret\n")

    async def echo(request):
        return web.Response(status=403, text=f"{request.headers['Authorization']} is not allowed")

    headers = {"Authorization": "Bearer env:SERVICE_KEY", "X-Team": "a"}
    settings = table(service, headers=headers)
    dumped = load_config({"model": "m", "scorers": [settings]}).model_dump_json()
    assert "sk-very-secret" not in dumped
    service.first = [echo]
    async with open_pool(settings, folder=tmp_path) as pool:
        with pytest.raises(ScoreError) as caught:
            await scores_of(pool, "a")
        assert str(caught.value).endswith("status 403: Bearer <SERVICE_KEY> is not allowed.")
        assert await scores_of(pool, "a", number=1) == [1.0]
    assert service.headers[-1]["Authorization"] == "Bearer sk-very-secret"
    assert service.headers[-1]["X-Team"] == "a"


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"url": "service:80"}, r"'http' has url = 'service:80'; write 'http://HOST"),
        ({"url": "http://h:port"}, r"'http' has url = 'http://h:port'; write 'http://HOST"),
        ({"url": "http://me:pass@host/"}, "has a user or password in its url; send them"),
        ({"url": 3}, "Setting 'scorers.0.url' = 3: input should be a valid string"),
        ({}, "Setting 'scorers.0.url' is missing"),
        ({"url": "http://h", "header": {}}, "'scorers.0.header' of 'http'; did you mean 'headers'"),
        ({"url": "http://h", "headers": {"X": "env:NO_SUCH"}}, "environment variable 'NO_SUCH'"),
        ({"url": "http://h", "headers": {"authorization": "s3"}}, "'authorization' header in the"),
        (
            {"url": "http://h", "headers": {"X": 3}},
            "'scorers.0.headers.X' = 3: input should be a valid string",
        ),
    ],
)
def test_invalid_settings_are_refused_before_anything_is_sent(settings, sentence):
    config = load_config({"model": "m", "scorers": [{"type": "http", **settings}]})
    with pytest.raises(ConfigError, match=sentence) as caught:
        check_scorers([resolve_scorer(config.scorers[0], section="scorers.0")], ())
    assert "s3" not in str(caught.value)
    assert "pass@" not in str(caught.value)


def test_task_that_is_not_json_is_refused():
    config = load_config({"model": "m", "scorers": [{"type": "http", "url": "http://h"}]})
    spec = resolve_scorer(config.scorers[0], section="scorers.0")
    task = Task(prompt="p", columns={"when": object()})
    with pytest.raises(ConfigError, match=r"'http' sends tasks as JSON, but task 1 cannot"):
        check_scorers([spec], [Task(prompt="p"), task])


async def test_episodes_reach_a_service_as_they_finish(service, tmp_path):
    played = group("a", "bb")
    async with open_pool(table(service), folder=tmp_path) as pool:
        with pool.open(number=0, task=played.task) as scoring:
            scoring.add(1, played.episodes[1])
            while not service.bodies:  # noqa: ASYNC110
                await asyncio.sleep(0.005)
            scoring.add(0, played.episodes[0])
            scored = await pool.score(played, scoring)
    assert [score.total for score in scored.scores] == [1.0, 2.0]
