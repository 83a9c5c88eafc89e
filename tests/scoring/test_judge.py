"""The LLM judge against a real server that speaks OpenAI's chat completions."""

import asyncio
import json

import pytest
from scoring_service import FakeService, num_lost, open_pool, running, scores_of
from scripted_scorer import episode

from millrace.cluster.hub import Hub
from millrace.config import load_config
from millrace.core.errors import ConfigError, ScoreError
from millrace.core.records import Group, Task
from millrace.scoring.pool import check_scorers, resolve_scorer
from millrace.scoring.services import judge as judge_module
from millrace.scoring.services.judge import (
    PatternReader,
    ScoreCache,
    cache_key,
    check_template,
    fill_template,
    read_key,
)


def says(reply):
    return {"choices": [{"message": {"role": "assistant", "content": reply}}]}


def by_length(body):
    """Scores by the length of the text after the last colon."""
    text = body["messages"][-1]["content"].rpartition(": ")[2]
    return says(f'Fine, I think. {{"score": {len(text)}}}')


@pytest.fixture
async def service():
    async with running(FakeService(by_length)) as service:
        yield service


def table(service, **settings):
    rule = {} if "pattern" in settings else {"key": "score"}
    return {
        "type": "judge",
        "url": f"{service.url}/v1",
        "model": "some-model",
        "prompt": "Judge: {completion}",
        **rule,
        **settings,
    }


async def test_judge_scores_each_episode(service, tmp_path):
    settings = table(service, system="Be strict.", body={"max_tokens": 9}, weight=0.5)
    async with open_pool(settings, folder=tmp_path) as pool:
        assert await scores_of(pool, "a", "bb") == [0.5, 1.0]
    body = next(body for body in service.bodies if "bb" in str(body))
    assert body == {
        "model": "some-model",
        "messages": [
            {"role": "system", "content": "Be strict."},
            {"role": "user", "content": "Judge: bb"},
        ],
        "temperature": 0.0,
        "max_tokens": 9,
    }


@pytest.mark.parametrize("batch", [0, 1])
async def test_equal_requests_are_sent_once(service, tmp_path, batch):
    async with open_pool(table(service, batch=batch), folder=tmp_path) as pool:
        assert await scores_of(pool, "a", "bb", "a") == [1.0, 2.0, 1.0]
        assert await scores_of(pool, "bb", number=1) == [2.0]
    assert len(service.bodies) == 2


async def test_without_a_cache_equal_requests_are_all_sent(service, tmp_path):
    async with open_pool(table(service, cache=0), folder=tmp_path) as pool:
        assert await scores_of(pool, "a", "a") == [1.0, 1.0]
    assert len(service.bodies) == 2


async def test_equal_request_of_another_group_outlives_the_cancelled_one(service, tmp_path):
    begun, finish = asyncio.Event(), asyncio.Event()

    async def wait(request):
        begun.set()
        await finish.wait()

    service.first = [wait]
    async with open_pool(table(service), folder=tmp_path) as pool:
        cancelled = asyncio.create_task(scores_of(pool, "a"))
        await begun.wait()
        other = asyncio.create_task(scores_of(pool, "a", number=1))
        await asyncio.sleep(0.01)
        assert len(service.bodies) == 1
        cancelled.cancel()
        assert await other == [1.0]
    finish.set()


async def test_stored_cache_is_used_after_a_resume(service, tmp_path):
    settings = table(service, keep=True, name="my judge")
    async with open_pool(settings, folder=tmp_path) as pool:
        assert await scores_of(pool, "a", "bb") == [1.0, 2.0]
    (file,) = (tmp_path / "scorers").iterdir()
    assert "Judge" not in file.read_text()
    file.write_text(file.read_text() + '{"key": "cut sh')
    async with open_pool(settings, folder=tmp_path) as pool:
        assert await scores_of(pool, "bb", "ccc") == [2.0, 3.0]
    assert len(service.bodies) == 3
    assert len([json.loads(line) for line in file.read_text().splitlines()]) == 3


async def test_stored_score_is_not_used_after_a_resume_with_another_key(service, tmp_path):
    service.reply = lambda body: says('{"score": 1, "style": 3}')
    async with open_pool(table(service, keep=True), folder=tmp_path) as pool:
        assert await scores_of(pool, "a") == [1.0]
    async with open_pool(table(service, keep=True, key="style"), folder=tmp_path) as pool:
        assert await scores_of(pool, "a") == [3.0]


def test_cache_drops_the_least_recently_used_scores():
    cache = ScoreCache(2)
    cache.put("a", 1.0)
    cache.put("b", 2.0)
    assert cache.get("a") == 1.0
    cache.put("c", 3.0)
    assert [cache.get(key) for key in "abc"] == [1.0, None, 3.0]
    off = ScoreCache(0)
    off.put("a", 1.0)
    assert off.get("a") is None


def test_cache_key_depends_on_content_not_on_order():
    assert cache_key({"a": 1, "b": 2}) == cache_key({"b": 2, "a": 1})
    assert cache_key({"a": 1}) != cache_key({"a": 2})


@pytest.mark.parametrize(
    "answer",
    [
        says("I cannot say."),
        says('{"score": "high"}'),
        says('{"score": NaN}'),
        {"choices": []},
        {"error": "overloaded"},
        {"choices": [{"message": {"content": None}}]},
        "not JSON",
    ],
)
async def test_reply_without_a_score_is_retried_and_finally_fails_the_group(
    service, tmp_path, answer
):
    service.first = [answer]
    async with open_pool(table(service, retries=1), folder=tmp_path) as pool:
        assert await scores_of(pool, "a") == [1.0]
        service.first = [answer, answer]
        with pytest.raises(ScoreError, match=r"'judge': http://127.0.0.1:\d+/v1/chat/completions"):
            await scores_of(pool, "b", number=1)
        load = pool.loads()["judge"]
    assert (load.calls, load.retries, load.failures) == (4, 2, 1)


@pytest.mark.parametrize(
    ("reply", "found"),
    [
        ('{"score": 3}', 3),
        ('First {"score": 1}, no: ```json\n{"why": "{", "score": 0.5}\n```', 0.5),
        ('{"score": 1} and {"other": 2}', 1),
        ('{"result": {"score": 4}}', 4),
        ("{{{ score", None),
        ('{"a":' * 10_000, None),
        ("", None),
    ],
)
def test_a_key_is_read_from_the_last_object_that_has_it(reply, found):
    assert read_key(reply, "score") == found


def test_a_pattern_reads_the_number_of_its_last_match():
    read = PatternReader(r"Score: (-?[\d.]+|high)(x)?")
    replies = ["Score: 1, or rather Score: -2.5", "none", "Score: high"]
    assert read(replies) == [-2.5, None, None]


async def test_endless_pattern_fails_its_group_and_does_not_block_the_controller(
    service, tmp_path, monkeypatch
):
    monkeypatch.setattr(judge_module, "MATCH_TIMEOUT_S", 1.0)
    service.reply = lambda body: says(body["messages"][-1]["content"])
    endless = "a" * 40
    async with Hub(log_dir=tmp_path, on_event=lambda *_: None) as hub:
        settings = table(service, pattern=r"Score: ([0-9]+)|(?:a+)+b(c)", retries=0)
        async with open_pool(settings, folder=tmp_path, launch=hub.launch) as pool:
            assert await scores_of(pool, "Score: 1 Score: 7") == [7.0]
            judging = asyncio.create_task(scores_of(pool, endless, number=1))
            await asyncio.sleep(0.2)
            assert not judging.done()
            with pytest.raises(ScoreError, match="replied without a score"):
                await judging
            assert num_lost(pool) == 1


TASK = Task(prompt="1+1?", columns={"answer": 2, "hint": "a {answer}", "names": ["x"]})


def test_a_template_is_filled_once():
    template = "{prompt} {completion} {answer} {hint} {names} {{answer}} {} { a }"
    filled = fill_template(template, task=TASK, episode=episode("is {answer}"))
    assert filled == '1+1? is {answer} 2 a {answer} ["x"] {answer} {} { a }'


def test_chat_prompt_is_rendered_with_roles():
    chat = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "1+1?"}]
    filled = fill_template("{prompt}", task=Task(prompt=chat), episode=episode("2"))
    assert filled == "system: Be kind.\n\nuser: 1+1?"


@pytest.mark.parametrize(
    ("template", "sentence"),
    [
        ("{prompt}", r"'judge' has a prompt without \{completion\}, so the judge would not see"),
        ("{completion} {anser}", r"\{anser\} in its prompt, but task 0 has no such column"),
    ],
)
def test_a_template_that_cannot_be_filled_is_refused(template, sentence):
    with pytest.raises(ConfigError, match=sentence):
        check_template(template, [TASK], scorer="judge")


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"key": None}, "set either key, as in 'score', or pattern"),
        ({"pattern": "(a)", "key": "score"}, "set either key, as in 'score', or pattern"),
        ({"pattern": "(", "key": None}, "'judge' has an invalid pattern: "),
        ({"pattern": "a", "key": None}, "a pattern without a group"),
        ({"cache": -1}, "cache' = -1: input should be greater than or equal to 0"),
        ({"model": 4}, "model' = 4: input should be a valid string"),
    ],
)
def test_invalid_settings_are_refused_before_anything_is_sent(settings, sentence):
    row = {"type": "judge", "url": "http://h", "model": "m", "prompt": "{completion}"}
    row = {**row, "key": "score", **settings}
    row = {name: value for name, value in row.items() if value is not None}
    config = load_config({"model": "m", "scorers": [row]})
    with pytest.raises(ConfigError, match=sentence):
        check_scorers([resolve_scorer(config.scorers[0], section="scorers.0")], ())


async def test_task_columns_appear_in_the_prompt(service, tmp_path):
    settings = table(service, prompt="{answer}? {hint}: {completion}")
    async with open_pool(settings, folder=tmp_path, tasks=[TASK]) as pool:
        await pool.score(Group(number=0, task=TASK, episodes=(episode("two"),)))
    assert service.bodies[0]["messages"][0]["content"] == "2? a {answer}: two"
