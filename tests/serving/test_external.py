"""Tasks that external programs fetch over HTTP, and the groups that they post."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import aiohttp
import numpy as np
import pytest
from chat_model import IM_END, chat_tokenizer
from writing_engine import WritingEngine, served

from millrace.config import load_config
from millrace.core.errors import ConfigError, TaskError
from millrace.core.records import Sampling, Task
from millrace.core.staleness import StalenessLimit
from millrace.environments.rollouts.renderer import Renderer
from millrace.run.episodes.external import check_external
from millrace.serving.external import ExternalEnvironment, add_routes

NEWEST = 5


class Program:
    """A client, and the environment that it plays."""

    def __init__(self, http: aiohttp.ClientSession, url: str) -> None:
        self.http = http
        self.url = url
        self.now_s = 0.0
        self.environment = ExternalEnvironment(
            renderer=Renderer(chat_tokenizer()),
            num_tokens=128,
            limit=StalenessLimit(max_staleness=2),
            newest=lambda: NEWEST,
            lease_s=600.0,
            clock=lambda: self.now_s,
        )
        self.client = ""

    async def post(self, path: str, **body: Any) -> tuple[int, Any]:
        return await self.send(path, json.dumps(body))

    async def send(self, path: str, data: str) -> tuple[int, Any]:
        headers = {"Content-Type": "application/json"}
        async with self.http.post(f"{self.url}{path}", data=data, headers=headers) as response:
            self.headers = response.headers
            return response.status, await response.json()

    async def fetch(self, count: int = 1) -> list[dict[str, Any]]:
        status, found = await self.post("/tasks", client=self.client, count=count)
        assert status == 200, found
        return found["tasks"]

    def play(self, *, n: int = 1, is_trained: bool = True, task: Task | None = None) -> Any:
        policy = SimpleNamespace(
            name="group 3", seed=7, sampling=Sampling(), max_context=16, is_trained=is_trained
        )
        task = task or Task(prompt="1+1=", columns={"answer": "2", "grid": np.arange(2)})
        return asyncio.create_task(self.environment.play(task, policy, n))


@pytest.fixture
async def program() -> AsyncIterator[Program]:
    async with contextlib.AsyncExitStack() as stack:
        http = await stack.enter_async_context(aiohttp.ClientSession())
        program = Program(http, "")
        client = await stack.enter_async_context(
            served(
                WritingEngine("2"),
                extend=lambda app: add_routes(app, program.environment, info={"max_context": 16}),
            )
        )
        program.url = str(client.base_url).removesuffix("/v1/")
        status, found = await program.post("/register", name="adder")
        assert (status, found["version"], found["max_context"]) == (200, NEWEST, 16)
        program.client = found["client"]
        yield program


def rollout(**changes: Any) -> dict[str, Any]:
    """A prompt of two tokens; "2" and the end were sampled."""
    whole = {
        "tokens": [49, 61, 50, IM_END],
        "logprobs": [0, 0, -0.5, -0.25],
        "versions": [-1, -1, 4, 5],
    }
    return {**whole, **changes}


def group(program: Program, task: dict[str, Any], *rollouts: Any, **changes: Any) -> dict[str, Any]:
    episodes = [{"rollouts": [row], "reward": 1.0} for row in rollouts or [rollout()]]
    return {"client": program.client, "task": task["task"], "episodes": episodes, **changes}


async def test_posted_group_becomes_the_episodes_of_its_task(program):
    playing = program.play(n=2)
    await asyncio.sleep(0)
    (task,) = await program.fetch()
    assert (task["prompt"], task["columns"]) == ("1+1=", {"answer": "2", "grid": [0, 1]})
    assert task["prompt_tokens"] == [49, 43, 49, 61]
    assert (task["num_episodes"], task["is_trained"]) == (2, True)
    assert task["sampling"] == {"max_tokens": 256, "temperature": 1.0, "stop": []}
    # The engines of the run answer beside the tasks, with versions.
    status, sampled = await program.post(
        "/v1/completions", model="tiny", prompt="1+1=", logprobs=0, return_token_ids=True
    )
    (choice,) = sampled["choices"]
    assert (status, choice["token_ids"], choice["versions"]) == (200, [50, IM_END], [3, 3])
    posted = rollout(logprobs=[0, 0, *choice["logprobs"]["token_logprobs"]])
    assert await program.post("/groups", **group(program, task, posted, rollout())) == (
        200,
        {"version": NEWEST},
    )
    first, second = await playing
    (kept,) = first.rollouts
    np.testing.assert_array_equal(kept.tokens, [49, 61, 50, IM_END])
    np.testing.assert_array_equal(kept.mask, [False, False, True, True])
    np.testing.assert_array_equal(kept.versions, [-1, -1, 4, 5])
    np.testing.assert_array_equal(second.rollouts[0].engine_logprobs, [0.0, 0.0, -0.5, -0.25])
    assert (kept.tokens.dtype, kept.versions.dtype) == (np.int32, np.int32)
    assert (first.turns[0].completion, first.turns[0].finish, first.reward) == ("2", "stop", 1.0)
    status, again = await program.post("/groups", **group(program, task))
    assert (status, again["error"]["code"]) == (409, "task_closed")
    async with program.http.get(f"{program.url}/status") as response:
        found = await response.json()
    assert (found["version"], found["accepted"], found["refused"], found["open"]) == (5, 1, 1, 0)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"tokens": [49, 61, 50]}, "3 tokens, 4 logprobs and 4 versions, but needs one of each"),
        ({"tokens": [49, 61, 50, 128]}, "token id 128 is not in the vocabulary, whose ids end at"),
        ({"tokens": [49, 61, 50, -1]}, "Expected `int` >= 0 - at `$.episodes[0].rollouts[0].tok"),
        ({"tokens": [49, 61, 50, 2**40]}, "The body is not a group: Expected `int` <= 2147483647"),
        ({"logprobs": [0, 0, 1.0, 0]}, "a logprob is positive or not finite"),
        ({"logprobs": [0, 0, "x", 0]}, "Expected `float`, got `str`"),
        ({"logprobs": [0, 0, 1e300, 0]}, "a logprob is positive or not finite"),
        ({"logprobs": [0, 0, -1e300, 0]}, "a logprob is positive or not finite"),
        ({"versions": [-1, -1, 4, 6]}, "version 6 is unknown; the newest is 5"),
        ({"versions": [-1, -1, -1, -1]}, "no token of it was sampled by the policy"),
        ({"versions": [5, 5, 5, 5]}, "its first token has a version, but follows no prompt"),
        ({"tokens": [1] * 20, "logprobs": [0] * 20, "versions": [-1] * 20}, "2 to 16 are possible"),
        ({"mask": [0, 0, 1, 1]}, "Object contains unknown field `mask`"),
    ],
)
async def test_invalid_rollouts_are_refused_with_one_sentence(program, changes, sentence):
    playing = program.play()
    await asyncio.sleep(0)
    (task,) = await program.fetch()
    status, found = await program.post("/groups", **group(program, task, rollout(**changes)))
    message = found["error"]["message"]
    assert (status, sentence in message) == (400, True), message
    assert message.endswith(".")
    assert not playing.done()
    assert (await program.post("/groups", **group(program, task)))[0] == 200  # and corrected
    assert len(await playing) == 1


async def test_rollout_without_a_sampled_token_is_refused_beside_another(program):
    playing = program.play()
    await asyncio.sleep(0)
    (task,) = await program.fetch()
    both = {"rollouts": [rollout(), rollout(versions=[-1] * 4)], "reward": 1.0}
    status, found = await program.post("/groups", **group(program, task, episodes=[both]))
    assert (status, found["error"]["param"]) == (400, "episodes[0].rollouts[1]")
    assert "no token of it was sampled by the policy" in found["error"]["message"]
    playing.cancel()


async def test_other_invalid_groups_are_refused(program):
    playing = program.play()
    await asyncio.sleep(0)
    (task,) = await program.fetch()
    whole = json.dumps(group(program, task))
    for status, data, sentence in [
        (400, whole.replace('"reward": 1.0', '"reward": NaN'), "not a group"),
        (400, whole.replace('"reward": 1.0', '"reward": 1e999'), "not a"),
        (400, "[" * 100_000, "not a group"),
        (400, json.dumps(group(program, task, rollout(), rollout())), "2 episodes, but its task"),
        (400, json.dumps(group(program, task, episodes=[{"rollouts": []}])), "length >= 1"),
        (404, json.dumps({**group(program, task), "client": "x"}), "not registered with this run"),
        (409, json.dumps(group(program, {"task": "x"})), "Task 'x' is not open"),
    ]:
        found = await program.send("/groups", data)
        assert found[0] == status, found
        assert sentence in found[1]["error"]["message"]
    playing.cancel()


async def test_too_stale_group_gets_409_and_its_task_is_offered_again(program):
    playing = program.play()
    await asyncio.sleep(0)
    (task,) = await program.fetch()
    stale = rollout(versions=[-1, -1, 2, 5])
    status, found = await program.post("/groups", **group(program, task, stale))
    assert (status, found["error"]["code"]) == (409, "too_stale")
    assert "oldest token is of version 2, the newest version is 5" in found["error"]["message"]
    assert [again["task"] for again in await program.fetch()] == [task["task"]]
    assert (await program.post("/groups", **group(program, task)))[0] == 200
    await playing
    evaluated = program.play(is_trained=False)  # an evaluation is not trained, so it may be stale
    await asyncio.sleep(0)
    (task,) = await program.fetch()
    assert (await program.post("/groups", **group(program, task, stale)))[0] == 200
    await evaluated


async def test_program_waits_while_no_task_is_free_and_lost_leases_return(program):
    status, found = await program.post("/tasks", client=program.client)
    assert (status, found["error"]["code"]) == (429, "no_task")
    assert program.headers["Retry-After"] == "1"
    playing = [program.play() for _ in range(3)]
    await asyncio.sleep(0)
    leased = await program.fetch(2)
    assert len(leased) == 2
    assert len(await program.fetch(8)) == 1
    assert (await program.post("/tasks", client=program.client))[0] == 429
    program.now_s = 601.0
    assert len(await program.fetch(8)) == 3
    # The group of the program that was late still counts, if it is the first.
    assert (await program.post("/groups", **group(program, leased[0])))[0] == 200
    await playing[0]
    for each in playing[1:]:
        each.cancel()  # such as a group that became too stale
    await asyncio.wait(playing)
    assert (await program.post("/groups", **group(program, leased[1])))[0] == 409


async def test_program_can_say_that_a_task_cannot_be_played(program):
    playing = program.play()
    await asyncio.sleep(0)
    (task,) = await program.fetch()
    status, _ = await program.post("/groups", **group(program, task, error="no such level"))
    assert status == 200
    with pytest.raises(TaskError, match="group 3: the program 'adder' cannot play it: no such lev"):
        await playing


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"sampling": {"top_k": 5}}, "posted tokens have no kept ids"),
        ({"evaluate": {"engines": 1}}, "which external programs do not reach"),
        ({"environment": {"external": "0.0.0.0:8100"}}, "there is no API key; set the environment"),
        ({"environment": {"external": "8100"}}, "external = '8100' is not HOST:PORT"),
        (
            {"environment": {"external": "127.0.0.1:0", "function": "a:b"}},
            "external programs play the episodes; remove function",
        ),
    ],
)
def test_settings_that_external_programs_cannot_serve_are_refused(settings, sentence, monkeypatch):
    monkeypatch.delenv("MILLRACE_API_KEY", raising=False)
    with pytest.raises(ConfigError, match=sentence):
        check_external(
            load_config({"model": "m", "environment": {"external": "127.0.0.1:0"}, **settings})
        )
