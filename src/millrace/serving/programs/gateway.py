"""The OpenAI API for programs that play episodes; docs/how-to/serve.md has an example.

Each call through a session is a turn of that session's agent. The run decides how tokens are
sampled: temperature, top_p and seed of a program are ignored, and max_tokens can only lower the
run's limit. Each session has its own address and key; clients that use one address for all their
episodes take shared(), and admit() maps the id in a header of each request to a session.

Promise: a call with a wrong key gets 401, a call after the episode's end 410, an invalid call 400.
None of these affects another episode. The gateway listens on this machine only, from the first
session until its event loop ends. It belongs to the event loop of the environments.
"""

import asyncio
import contextlib
import hmac
import secrets
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Coroutine
from typing import Any, TypeVar

import numpy as np
from aiohttp import web

from millrace.core.errors import ConfigError, TaskError
from millrace.environments.agent import Agent, Reply
from millrace.environments.replay.schema import EpisodeOver
from millrace.environments.tools.functions import Tool
from millrace.serving.api import chat
from millrace.serving.api.bodies import ChatBody, CompletionBody, OpenAIBody
from millrace.serving.api.completions import Json, reply_head, usage_of
from millrace.serving.api.errors import ApiError, json_response
from millrace.serving.api.replies import ReplySender
from millrace.serving.api.responses import ResponsesBody, ResponseWriter
from millrace.serving.clients import shows_key, wrong_key
from millrace.serving.server import error_middleware, http_listener, read_request

SESSION_HEADER = "X-Session-ID"
T = TypeVar("T")


class GatewaySession:
    """The address and key by which a program reaches the agent of one episode."""

    def __init__(self, *, base_url: str, key: str) -> None:
        self.base_url = base_url
        self.key = key
        self.num_calls = 0  # answered, including those to other agents of the episode
        self._failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    @property
    def environment(self) -> dict[str, str]:
        """Environment variables that configure a client of the OpenAI API."""
        return {
            "OPENAI_BASE_URL": self.base_url,
            "OPENAI_API_KEY": self.key,
            "OPENAI_MODEL": "policy",
        }

    async def guard(self, playing: Coroutine[Any, Any, T]) -> T:
        """Await the program; raises at once if the episode fails meanwhile."""
        task = asyncio.create_task(playing)
        try:
            await asyncio.wait({task, self._failed}, return_when=asyncio.FIRST_COMPLETED)
            if self._failed.done():
                self._failed.result()
            return await task
        finally:
            if not task.cancelling():  # a second cancel would interrupt its cleanup
                task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    def fail(self, error: BaseException) -> None:
        if not self._failed.done():
            self._failed.set_exception(error)
            self._failed.exception()  # retrieved, or asyncio would log it as never retrieved


class Gateway:
    def __init__(self) -> None:
        # By the id in the address, or in SESSION_HEADER at the shared address.
        self._agents: dict[str, tuple[GatewaySession, Agent]] = {}
        self._secret = secrets.token_bytes(32)  # the keys of all sessions are derived from it
        self._url: asyncio.Future[str] | None = None
        self._listening: asyncio.Task[None] | None = None  # keeps the task alive
        self._replies = ReplySender()

    @contextlib.asynccontextmanager
    async def open(self, agent: Agent) -> AsyncIterator[GatewaySession]:
        """Open a session for the agent of an episode. Its `base_url`, `key` and `environment`
        (variables for OpenAI clients) give a program access to the agent until the block ends."""
        id = secrets.token_hex(8)
        base_url = f"{await self._address()}/episodes/{id}/v1"
        session = GatewaySession(base_url=base_url, key=self._key(id))
        self.admit(id, session, agent)
        try:
            yield session
        finally:
            for admitted in [i for i, (other, _) in self._agents.items() if other is session]:
                del self._agents[admitted]

    async def shared(self) -> tuple[str, str]:
        """Return the base URL and key that all sessions share."""
        return f"{await self._address()}/sessions/v1", self._key("")

    def _key(self, id: str) -> str:
        """Return the key of a session, open or not; "" = the key of the shared address."""
        return hmac.digest(self._secret, id.encode(), "sha256").hex()

    def admit(self, id: str, session: GatewaySession, agent: Agent) -> None:
        """Send requests to the shared address with this id to an agent of an open session."""
        self._agents[id] = session, agent

    async def _address(self) -> str:
        """Listen, unless the gateway already listens on this event loop."""
        loop = asyncio.get_running_loop()
        if self._url is None or self._url.get_loop() is not loop:
            self._url = loop.create_future()
            self._listening = loop.create_task(self._listen(self._url), name="gateway")
        # Shielded: several episodes wait for it, and one of them may be cancelled.
        return await asyncio.shield(self._url)

    async def _listen(self, url_known: asyncio.Future[str]) -> None:
        """Serve until cancelled, at the end of the event loop."""
        self._replies = ReplySender()  # belongs to one event loop
        app = web.Application(middlewares=[error_middleware], client_max_size=64 * 2**20)
        for root in ("/episodes/{id}/v1", "/sessions/v1"):
            app.router.add_get(f"{root}/models", self._models)
            app.router.add_post(f"{root}/chat/completions", self._chat)
            app.router.add_post(f"{root}/completions", self._complete)
            app.router.add_post(f"{root}/responses", self._respond)
        try:
            async with http_listener(app, host="127.0.0.1", port=0) as url:
                url_known.set_result(url)
                await asyncio.Event().wait()
        except ConfigError as error:
            url_known.set_exception(error)

    def _session(self, request: web.Request) -> tuple[GatewaySession, Agent]:
        # Checked first: the answer to a wrong key must not reveal which episodes exist.
        id = request.match_info.get("id", "")
        if not shows_key(request, self._key(id)):
            raise wrong_key()
        found = self._agents.get(id or request.headers.get(SESSION_HEADER, ""))
        if found is None:
            raise _over("its environment has returned" if id else "no open session has this id")
        return found

    async def _models(self, request: web.Request) -> web.Response:
        self._session(request)
        model = {"id": "policy", "object": "model", "created": 0, "owned_by": "millrace"}
        return json_response({"object": "list", "data": [model]})

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        session, agent = self._session(request)
        body = await read_request(request, ChatBody)
        whole = await _chat_reply(session, agent, body)
        return (
            await self._replies.send_events(request, _as_chunks(whole, body))
            if body.stream
            else await self._replies.send(request, whole)
        )

    async def _respond(self, request: web.Request) -> web.StreamResponse:
        session, agent = self._session(request)
        body = await read_request(request, ResponsesBody)
        whole, writer = await _chat_reply(session, agent, body.chat), ResponseWriter(body)
        if body.stream:
            events = writer.events(_as_chunks(whole, body.chat))
            return await self._replies.send_events(request, events)
        return await self._replies.send(request, writer.whole(whole))

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        session, agent = self._session(request)
        body = await read_request(request, CompletionBody)
        wants_tokens = body.logprobs is not None or body.return_token_ids
        if not isinstance(body.prompt, str) or body.stream or wants_tokens or body.echo:
            raise ApiError(
                "In an episode, /v1/completions takes one text prompt, without stream, logprobs,"
                " echo and return_token_ids; use /v1/chat/completions.",
                param="prompt",
            )
        prompt = body.prompt
        settings = _settings(body, agent, max_tokens=body.max_tokens)
        replies = await _replies(session, body, lambda: agent.complete(prompt, **settings))
        choices = [
            {"index": i, "text": reply.text, "logprobs": None, "finish_reason": reply.finish}
            for i, reply in enumerate(replies)
        ]
        head = {**reply_head("cmpl", body), "object": "text_completion"}
        return json_response({**head, "choices": choices, "usage": _usage(replies)})


async def _chat_reply(session: GatewaySession, agent: Agent, body: ChatBody) -> Json:
    """Return the answer of /v1/chat/completions."""
    if body.chat_template_kwargs:
        raise ApiError(
            "In an episode, the run sets the arguments of the chat template; remove"
            " chat_template_kwargs, and set environment.template.",
            param="chat_template_kwargs",
        )
    messages = chat.read_messages(body.messages, form=agent.tool_format)
    tools = [_tool(schema["function"]) for schema in body.offered_tools]
    settings = _settings(body, agent, max_tokens=body.token_limit)
    settings["grammar"] = body.grammar(agent.tool_format)
    replies = await _replies(session, body, lambda: agent.chat(messages, tools, **settings))
    choices = [_chat_choice(i, reply, agent, body) for i, reply in enumerate(replies)]
    head = {**reply_head("chatcmpl", body), "object": "chat.completion"}
    return {**head, "choices": choices, "usage": _usage(replies)}


async def _replies(
    session: GatewaySession, body: OpenAIBody, ask: Callable[[], Awaitable[Reply]]
) -> list[Reply]:
    """Return n replies of the agent. An error that the program did not cause ends its episode."""
    try:
        replies = list(await asyncio.gather(*(ask() for _ in range(body.num_choices))))
    except TaskError as error:
        raise ApiError(str(error)) from None
    except EpisodeOver as error:
        session.fail(error)
        raise _over(error.ending) from None
    except Exception as error:
        session.fail(error)  # guard() raises it in the environment
        raise ApiError("The episode has failed.", status=503, code="episode_failed") from error
    session.num_calls += 1
    return replies


def _over(reason: str) -> ApiError:
    return ApiError(
        f"The episode is over ({reason}); no more tokens are sampled for it.",
        status=410,
        code="episode_over",
    )


def _settings(body: OpenAIBody, agent: Agent, *, max_tokens: int | None) -> dict[str, Any]:
    ours = agent.sampling
    limit = min(max_tokens or ours.max_new_tokens, ours.max_new_tokens)
    asked = body.sampling(max_new_tokens=limit)
    stop = tuple(dict.fromkeys((*ours.stop, *asked.stop)))
    settings = {"max_new_tokens": limit, "stop": stop}
    if asked.adjusts_logits or asked.top_logprobs:  # the agent refuses what cannot be trained
        for name in ("presence_penalty", "frequency_penalty", "logit_bias", "top_logprobs"):
            settings[name] = getattr(asked, name)
    return settings


def _chat_choice(index: int, reply: Reply, agent: Agent, body: ChatBody) -> Json:
    done = reply.exchange.completion
    logprobs = None
    if body.logprobs:
        logprobs = chat.logprob_rows(done, text=lambda token: agent.decode(np.array([token])))
    return chat.chat_choice(
        index,
        content=reply.message["content"],
        calls=body.allowed_calls(reply.tool_calls),
        finish=reply.finish,
        logprobs=logprobs,
    )


def _tool(function: dict[str, Any]) -> Tool:

    def never(*_arguments: Any, **_named: Any) -> Any:
        raise AssertionError("the program runs its own tools")

    return Tool(
        name=function["name"],
        description=function.get("description", ""),
        parameters=function.get("parameters", {"type": "object", "properties": {}}),
        call=never,
        check=never,
    )


async def _as_chunks(whole: Json, body: ChatBody) -> AsyncGenerator[Json]:
    """Stream a reply that is already complete."""
    head = {**{key: whole[key] for key in ("id", "created", "model")}, "object": chat.CHUNK_KIND}
    for choice in whole["choices"]:
        index, message = choice["index"], choice["message"]
        calls = [{"index": i, **call} for i, call in enumerate(message.get("tool_calls", ()))]
        delta = {"role": "assistant", "content": message["content"] or ""}
        chunks = [chat.chunk_choice(index, delta, logprobs=choice["logprobs"])]
        if calls:
            chunks.append(chat.chunk_choice(index, {"tool_calls": calls}))
        chunks.append(chat.chunk_choice(index, {}, finish_reason=choice["finish_reason"]))
        for chunk in chunks:
            yield {**head, "choices": [chunk]}
    if body.wants_usage:
        yield {**head, "choices": [], "usage": whole["usage"]}


def _usage(replies: list[Reply]) -> dict[str, int]:
    sampled = [len(reply.exchange.completion.tokens) for reply in replies]
    return usage_of(replies[0].exchange.end - sampled[0], sum(sampled))
