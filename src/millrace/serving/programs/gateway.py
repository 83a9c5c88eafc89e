"""The OpenAI API for programs that play episodes: each has an address and a key of its own.

    gateway = Gateway()

    async def play(task, agent):
        async with gateway.open(agent) as door:
            result = await door.guard(my_program(door.base_url, door.key, task.prompt))
        return reward_of(result)

Every call through a door is a turn of that door's agent, recorded as its environment's own would
be. How is sampled is up to the run: what a program says about temperature, top_p or seed is not
used; max_tokens can only lower the run's.

Clients that keep one address for all their episodes are let in together: shared() gives the address
and a key, admit() says which sessions, named in a header of each request, belong to which door.

Promise: a call with a wrong key gets 401, one after the episode's end 410, one that cannot be
served 400; none of these touches another episode. Listens on this machine only, from the first
door on until its event loop ends. Belongs to that loop, the one of the environments.
"""

import asyncio
import contextlib
import copy
import secrets
from collections import OrderedDict
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Coroutine
from typing import Any, TypeVar

import numpy as np
from aiohttp import web

from millrace.core.errors import TaskError
from millrace.environments.agent import Agent, Reply
from millrace.environments.limits import EpisodeOver
from millrace.environments.tools.functions import Tool
from millrace.serving.api.bodies import ChatBody, CompletionBody, OpenAIBody
from millrace.serving.api.chat import ChatReply, logprob_rows
from millrace.serving.api.errors import ApiError, json_response
from millrace.serving.api.messages import read_messages
from millrace.serving.api.streaming import send_events
from millrace.serving.listening import listening
from millrace.serving.served import TokenUsage
from millrace.serving.server import check_key, read_request, telling_errors

SESSION_HEADER = "X-Session-ID"
_REMEMBERED = 4096  # doors that are closed, to tell those who come late from strangers
T = TypeVar("T")


class GatewaySession:
    """Where a program reaches the agent of one episode."""

    def __init__(self, agent: Agent, *, root: str, id: str) -> None:
        self.key = secrets.token_urlsafe(24)
        self.base_url = f"{root}/episodes/{id}/v1"
        self.agent = agent
        self._answered: list[Agent] = []  # who answered each call
        self._failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    @property
    def num_calls(self) -> int:
        """That were answered, also beside it."""
        return len(self._answered)

    def beside(self, agent: Agent) -> "GatewaySession":
        """The same door, to another agent of the episode."""
        other = copy.copy(self)
        other.agent = agent
        return other

    def answered(self) -> None:
        self._answered.append(self.agent)

    @property
    def environment(self) -> dict[str, str]:
        """What tells clients of the OpenAI API where to go."""
        return {
            "OPENAI_BASE_URL": self.base_url,
            "OPENAI_API_KEY": self.key,
            "OPENAI_MODEL": "policy",
        }

    async def guard(self, playing: Coroutine[Any, Any, T]) -> T:
        """Its result; but if the episode cannot go on meanwhile, that error at once."""
        task = asyncio.create_task(playing)
        try:
            await asyncio.wait({task, self._failed}, return_when=asyncio.FIRST_COMPLETED)
            if self._failed.done():
                self._failed.result()
            return await task
        finally:
            if not task.cancelling():  # a second one would interrupt its cleaning up
                task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    def fail(self, error: BaseException) -> None:
        if not self._failed.done():
            self._failed.set_exception(error)
            self._failed.exception()  # who does not ask is not told that nobody did


class Gateway:
    def __init__(self) -> None:
        self._doors: dict[str, GatewaySession] = {}
        self._closed: OrderedDict[str, str] = OrderedDict()  # id -> key
        self._sessions: dict[str, GatewaySession] = {}  # of those that come by the shared address
        self._shared_key = secrets.token_urlsafe(24)
        self._opening: asyncio.Lock | None = None
        self._listening: asyncio.Task[None] | None = None
        self._root = ""

    @contextlib.asynccontextmanager
    async def open(self, agent: Agent) -> AsyncIterator[GatewaySession]:
        """A door to this agent, for as long as the context lasts."""
        await self._start()
        id = secrets.token_hex(8)
        door = self._doors[id] = GatewaySession(agent, root=self._root, id=id)
        try:
            yield door
        finally:
            del self._doors[id]
            for session in [s for s, other in self._sessions.items() if other.key == door.key]:
                del self._sessions[session]
            self._closed[id] = door.key
            if len(self._closed) > _REMEMBERED:
                self._closed.popitem(last=False)

    async def shared(self) -> tuple[str, str]:
        """Base URL and key of all doors together."""
        await self._start()
        return f"{self._root}/sessions/v1", self._shared_key

    def admit(self, session: str, door: GatewaySession) -> None:
        """Let requests of this session in by the shared address, while the door is open."""
        self._sessions[session] = door

    async def _start(self) -> None:
        """Listen, if this loop's gateway does not already; one that ended with its loop is
        forgotten."""
        loop = asyncio.get_running_loop()
        if self._listening is not None and self._listening.get_loop() is not loop:
            self._opening = self._listening = None
        self._opening = self._opening or asyncio.Lock()
        async with self._opening:
            if self._listening is None:
                ready: asyncio.Future[int] = loop.create_future()
                self._listening = loop.create_task(self._listen(ready), name="gateway")
                self._root = f"http://127.0.0.1:{await ready}"

    async def _listen(self, ready: asyncio.Future[int]) -> None:
        """Ends when it is cancelled, with all of its loop."""
        app = web.Application(middlewares=[telling_errors], client_max_size=64 * 2**20)
        for root in ("/episodes/{id}/v1", "/sessions/v1"):
            app.router.add_get(f"{root}/models", self._models)
            app.router.add_post(f"{root}/chat/completions", self._chat)
            app.router.add_post(f"{root}/completions", self._complete)
        try:
            async with listening(app, host="127.0.0.1", port=0) as port:
                ready.set_result(port)
                await asyncio.Event().wait()
        except OSError as error:
            ready.set_exception(error)

    def _door(self, request: web.Request) -> GatewaySession:
        if "id" not in request.match_info:
            return self._shared_door(request)
        id = request.match_info["id"]
        door = self._doors.get(id)
        # A stranger is not told which episodes there are.
        check_key(request, door.key if door else self._closed.get(id, secrets.token_hex()))
        if door is None:
            raise _over("its environment has returned")
        return door

    def _shared_door(self, request: web.Request) -> GatewaySession:
        check_key(request, self._shared_key)
        door = self._sessions.get(request.headers.get(SESSION_HEADER, ""))
        if door is None:
            raise _over("no open one has this session")
        return door

    async def _models(self, request: web.Request) -> web.Response:
        self._door(request)
        model = {"id": "policy", "object": "model", "created": 0, "owned_by": "millrace"}
        return json_response({"object": "list", "data": [model]})

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        door = self._door(request)
        body = await read_request(request, ChatBody)
        if body.chat_template_kwargs:
            raise ApiError(
                "In an episode, what the chat template is told is up to the run; leave out"
                " chat_template_kwargs, and set environment.template.",
                param="chat_template_kwargs",
            )
        messages = read_messages(body.messages, form=door.agent.tool_format)
        tools = [_tool(schema["function"]) for schema in body.offered_tools]
        settings = _settings(body, door.agent, most_tokens=body.most_tokens)
        settings["grammar"] = body.grammar(door.agent.tool_format)
        replies = await _replies(door, body, lambda: door.agent.chat(messages, tools, **settings))
        head = ChatReply(model=body.model)
        choices = [_chat_choice(head, i, reply, door, body) for i, reply in enumerate(replies)]
        whole = head.whole(choices, usage=_usage(replies).body())
        if body.stream:
            return await send_events(request, _as_chunks(head, whole, body))
        return json_response(whole)

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        door = self._door(request)
        body = await read_request(request, CompletionBody)
        if not isinstance(body.prompt, str) or body.stream or body.logprobs is not None:
            raise ApiError(
                "In an episode, /v1/completions takes one prompt that is a text, without stream"
                " and logprobs; use /v1/chat/completions.",
                param="prompt",
            )
        prompt = body.prompt
        settings = _settings(body, door.agent, most_tokens=body.max_tokens)
        replies = await _replies(door, body, lambda: door.agent.complete(prompt, **settings))
        choices = [
            {"index": i, "text": reply.text, "logprobs": None, "finish_reason": reply.finish}
            for i, reply in enumerate(replies)
        ]
        head = ChatReply(model=body.model).head("text_completion")
        return json_response({**head, "choices": choices, "usage": _usage(replies).body()})


async def _replies(
    door: GatewaySession, body: OpenAIBody, ask: Callable[[], Awaitable[Reply]]
) -> list[Reply]:
    """The agent's, n of them. What is not the program's fault ends its episode."""
    try:
        replies = list(await asyncio.gather(*(ask() for _ in range(body.num_choices))))
    except TaskError as error:
        raise ApiError(str(error)) from None
    except EpisodeOver as error:
        door.fail(error)
        raise _over(error.ending) from None
    except Exception as error:
        door.fail(error)  # the environment raises it, and says what happens then
        raise ApiError(
            "The episode cannot go on.", status=503, kind="server_error", code="episode_failed"
        ) from error
    door.answered()
    return replies


def _over(why: str) -> ApiError:
    return ApiError(
        f"The episode is over ({why}); nothing more is sampled for it.",
        status=410,
        code="episode_over",
    )


def _settings(body: OpenAIBody, agent: Agent, *, most_tokens: int | None) -> dict[str, Any]:
    """What a program may change about sampling."""
    ours = agent.sampling
    most = min(most_tokens or ours.max_new_tokens, ours.max_new_tokens)
    asked = body.sampling(max_new_tokens=most)
    stop = tuple(dict.fromkeys((*ours.stop, *asked.stop)))
    return {"max_new_tokens": most, "stop": stop}


def _chat_choice(
    head: ChatReply, index: int, reply: Reply, door: GatewaySession, body: ChatBody
) -> dict[str, Any]:
    done = reply.exchange.completion
    logprobs = None
    if body.logprobs:
        logprobs = logprob_rows(
            done.tokens, done.logprobs, decode=lambda ids: door.agent.decode(np.array(ids))
        )
    return head.choice(
        index,
        content=reply.message["content"],
        calls=body.allowed_calls(reply.tool_calls),
        finish=reply.finish,
        logprobs=logprobs,
    )


def _tool(function: dict[str, Any]) -> Tool:
    """A tool that the program runs itself."""

    def never(*_arguments: Any, **_named: Any) -> Any:
        raise AssertionError("a tool of a program runs in the program")

    return Tool(
        name=function["name"],
        description=function.get("description", ""),
        parameters=function.get("parameters", {"type": "object", "properties": {}}),
        call=never,
        check=never,
    )


async def _as_chunks(
    head: ChatReply, whole: dict[str, Any], body: ChatBody
) -> AsyncGenerator[dict[str, Any]]:
    """A reply that is there already, as if it were written now."""
    for choice in whole["choices"]:
        index, message = choice["index"], choice["message"]
        calls = [{"index": i, **call} for i, call in enumerate(message.get("tool_calls", ()))]
        delta = {"role": "assistant", "content": message["content"] or ""}
        yield head.chunk(index, delta=delta, logprobs=choice["logprobs"])
        if calls:
            yield head.chunk(index, delta={"tool_calls": calls})
        yield head.chunk(index, delta={}, finish_reason=choice["finish_reason"])
    if body.wants_usage:
        yield head.usage_chunk(whole["usage"])


def _usage(replies: list[Reply]) -> TokenUsage:
    sampled = [len(reply.exchange.completion.tokens) for reply in replies]
    prompt = replies[0].exchange.end - sampled[0]
    return TokenUsage(prompt_tokens=prompt, completion_tokens=sum(sampled))
