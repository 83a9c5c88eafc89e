"""External programs as environments: they fetch tasks over HTTP and post groups of episodes.

    POST /register {"name": "mine"}                  a client id, and what its groups have to fit
    POST /tasks    {"client": ..., "count": 4}       tasks, for one group each
    POST /groups   {"client": ..., "task": ..., "episodes": [...]}
    GET  /status                                     the newest version, and counts

Promise: what a program posts is checked like any other data of a run before it counts: lengths,
token ids, finite logprobs and rewards, known versions that are not too stale. A group is accepted
once. A task whose program posts nothing within `lease_s` is offered again. Admission bounds the
open tasks, so a program that is too fast gets 429 when it fetches.

Runs on the controller's event loop; bodies are decoded in threads.
"""

import asyncio
import itertools
import math
import secrets
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Annotated, Any

import msgspec
import numpy as np
from aiohttp import web
from pydantic import Field

from millrace.core.errors import TaskError
from millrace.core.records import Ending, Episode, Rollout, Task, Turn
from millrace.core.staleness import StalenessLimit, TokenVersions
from millrace.environments.rollouts.player import GroupPolicy
from millrace.environments.rollouts.renderer import Renderer
from millrace.serving.api.bodies import Count, Text
from millrace.serving.api.errors import ApiError, json_response
from millrace.serving.api.reading import Body
from millrace.serving.server import read_bytes, read_request

MAX_CLIENTS = 4096  # registered; the oldest are dropped
MAX_TASKS = 1024  # per request
# Rounding may put a sure token slightly above 0.
MAX_LOGPROB = 1e-3

Id = Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]
SampledBy = Annotated[int, msgspec.Meta(ge=-1, le=2**31 - 1)]


class RegisterBody(Body):
    name: Annotated[Text, Field(max_length=200)]


class TasksBody(Body):
    client: str
    count: Annotated[Count, Field(le=MAX_TASKS)] = 1


class _Posted(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Part of the body of /groups. Decoded by msgspec: it may hold millions of numbers."""


class PostedRollout(_Posted, frozen=True, kw_only=True):
    tokens: list[Id]
    logprobs: list[float]  # 0 where the version is -1
    versions: list[SampledBy]  # -1 = not sampled by the policy, or not trained


class PostedEpisode(_Posted, frozen=True, kw_only=True):
    rollouts: Annotated[list[PostedRollout], msgspec.Meta(min_length=1)]
    reward: float | None = None  # None leaves it to the scorers
    ending: Ending = "done"


class GroupBody(_Posted, frozen=True, kw_only=True):
    client: str
    task: str
    episodes: list[PostedEpisode] = []
    error: str | None = None  # why the task cannot be played


@dataclass(kw_only=True, slots=True, eq=False)
class _OpenTask:
    id: str
    task: Task
    policy: GroupPolicy
    num_episodes: int
    prompt: np.ndarray  # [P] int32
    posted: asyncio.Future[list[Episode]]
    leased_until_s: float = -math.inf


@dataclass(kw_only=True, eq=False)
class ExternalEnvironment:
    """Implements Environment of player.py: an episode is played wherever a program runs."""

    renderer: Renderer
    num_tokens: int  # ids of the vocabulary
    limit: StalenessLimit
    newest: Callable[[], int]  # newest version of the policy that was published
    lease_s: float
    clock: Callable[[], float] = time.monotonic
    counts: Counter[str] = field(default_factory=Counter[str])
    _open: dict[str, _OpenTask] = field(default_factory=dict[str, _OpenTask])  # by id
    _clients: dict[str, str] = field(default_factory=dict[str, str])  # names, by id

    async def play(self, task: Task, policy: GroupPolicy, n: int) -> list[Episode]:
        id, prompt = secrets.token_hex(8), self.renderer.render(task.prompt)
        posted = asyncio.get_running_loop().create_future()
        self._open[id] = _OpenTask(
            id=id, task=task, policy=policy, num_episodes=n, prompt=prompt, posted=posted
        )
        try:
            return await posted
        finally:
            del self._open[id]

    def register(self, name: str) -> str:
        client = secrets.token_hex(8)
        self._clients[client] = name
        if len(self._clients) > MAX_CLIENTS:
            del self._clients[next(iter(self._clients))]
        return client

    def fetch(self, client: str, count: int) -> list[_OpenTask]:
        """Lease up to `count` tasks, the oldest first; raises ApiError if there is none."""
        self._check_client(client)
        now = self.clock()
        free = (t for t in self._open.values() if t.leased_until_s <= now and not t.posted.done())
        taken = list(itertools.islice(free, count))
        if not taken:
            self.counts["waits"] += 1
            raise ApiError(
                f"No task is free: {len(self._open)} are being played, and the run admits no more"
                " now; try again later.",
                status=429,
                code="no_task",
                retry_after_s=1,
            )
        for task in taken:
            self.counts["leases_ended"] += task.leased_until_s > -math.inf
            task.leased_until_s = now + self.lease_s
        return taken

    def post(self, body: GroupBody) -> None:
        """Accept a group, or raise ApiError with the first reason against it."""
        name = self._check_client(body.client)
        try:
            task = self._open.get(body.task)
            if task is None or task.posted.done():
                raise ApiError(
                    f"Task {body.task!r:.80} is not open: its group was posted, or its attempt is"
                    " over; fetch another.",
                    status=409,
                    code="task_closed",
                )
            if body.error is not None:
                reason = f"the program {name!r} cannot play it: {body.error[:300]}"
                task.posted.set_exception(TaskError(f"{task.policy.name}: {reason}"))
                return
            episodes = self._episodes(task, body)
        except ApiError:
            self.counts["refused"] += 1
            raise
        self.counts["accepted"] += 1
        task.posted.set_result(episodes)

    def status(self) -> dict[str, Any]:
        now = self.clock()
        leased = sum(task.leased_until_s > now for task in self._open.values())
        return {
            "version": self.newest(),
            "open": len(self._open),
            "leased": leased,
            "clients": len(self._clients),
            **{key: self.counts[key] for key in ("accepted", "refused", "leases_ended", "waits")},
        }

    def _check_client(self, client: str) -> str:
        name = self._clients.get(client)
        if name is None:
            raise ApiError(
                f"Client {client!r:.80} is not registered with this run; POST /register first.",
                status=404,
                code="unknown_client",
            )
        return name

    def _episodes(self, task: _OpenTask, body: GroupBody) -> list[Episode]:
        if len(body.episodes) != task.num_episodes:
            raise ApiError(
                f"The group has {len(body.episodes)} episodes, but its task needs"
                f" {task.num_episodes}; post them all together.",
                param="episodes",
            )
        episodes = [self._episode(task, index, row) for index, row in enumerate(body.episodes)]
        if task.policy.is_trained:
            token_versions = TokenVersions.joined(
                TokenVersions.of_rollout(rollout)
                for episode in episodes
                for rollout in episode.rollouts
            )
            version = self.newest()
            if not self.limit.allows(token_versions, version=version):
                task.leased_until_s = -math.inf  # another group may be in time
                raise ApiError(
                    f"The group is too stale: its oldest token is of version"
                    f" {token_versions.oldest}, the newest version is {version}, and"
                    f" buffer.max_staleness = {self.limit.max_staleness}; play the task again.",
                    status=409,
                    code="too_stale",
                )
        return episodes

    def _episode(self, task: _OpenTask, index: int, posted: PostedEpisode) -> Episode:
        if posted.reward is not None and not math.isfinite(posted.reward):
            raise _refused(f"episodes[{index}]", "its reward is not a finite number")
        rollouts = [
            self._rollout(row, task.policy, where=f"episodes[{index}].rollouts[{number}]")
            for number, row in enumerate(posted.rollouts)
        ]
        return Episode(
            turns=(self._turn(task.task, rollouts[-1]),),
            rollouts=tuple(rollouts),
            reward=posted.reward,
            ending=posted.ending,
        )

    def _rollout(self, row: PostedRollout, policy: GroupPolicy, *, where: str) -> Rollout:
        tokens, versions = np.array(row.tokens, np.int32), np.array(row.versions, np.int32)
        with np.errstate(over="ignore"):  # to infinity, which is refused
            logprobs, mask = np.array(row.logprobs, np.float32), versions >= 0
        if not len(tokens) == len(logprobs) == len(versions):
            sizes = f"{len(tokens)} tokens, {len(logprobs)} logprobs and {len(versions)} versions"
            raise _refused(where, f"it has {sizes}, but needs one of each per token")
        if not 2 <= len(tokens) <= policy.max_context:
            limits = f"2 to {policy.max_context}"
            raise _refused(where, f"it has {len(tokens)} tokens, and {limits} are possible")
        if tokens.max() >= self.num_tokens:
            ids = f"ids end at {self.num_tokens - 1}"
            raise _refused(where, f"token id {tokens.max()} is not in the vocabulary, whose {ids}")
        if not mask.any():
            raise _refused(where, "no token of it was sampled by the policy")
        if mask[0]:
            raise _refused(where, "its first token has a version, but follows no prompt")
        if versions.max() > (newest := self.newest()):
            raise _refused(where, f"version {versions.max()} is unknown; the newest is {newest}")
        sampled = logprobs[mask]
        if not np.isfinite(sampled).all() or (sampled > MAX_LOGPROB).any():
            raise _refused(where, "a logprob is positive or not finite")
        return Rollout(
            tokens=tokens,
            mask=mask,
            engine_logprobs=np.where(mask, np.minimum(logprobs, 0.0), 0.0).astype(np.float32),
            versions=versions,
            sampling=policy.sampling,
        )

    def _turn(self, task: Task, rollout: Rollout) -> Turn:
        """The last sampled stretch of a rollout, for scorers and for people who read it."""
        sampled = np.flatnonzero(rollout.mask)
        begin = 1 + int(np.max(np.flatnonzero(~rollout.mask[: sampled[-1]])))
        tokens = rollout.tokens[begin : sampled[-1] + 1]
        has_end = int(tokens[-1]) in self.renderer.special_ids
        text = self.renderer.decode(tokens[:-1] if has_end else tokens)
        finish = "stop" if has_end else "length"
        return Turn(prompt=task.prompt, completion=text, finish=finish)


def _refused(where: str, problem: str) -> ApiError:
    return ApiError(f"{where} is refused: {problem}.", param=where)


def add_routes(
    app: web.Application, environment: ExternalEnvironment, *, info: dict[str, Any]
) -> None:
    """Serve the environment's tasks. `info` describes the run to clients that register."""

    async def register(request: web.Request) -> web.Response:
        body = await read_request(request, RegisterBody)
        client = environment.register(body.name)
        return json_response({"client": client, "version": environment.newest(), **info})

    async def tasks(request: web.Request) -> web.Response:
        body = await read_request(request, TasksBody)
        rows = [_described(task) for task in environment.fetch(body.client, body.count)]
        head = {"version": environment.newest(), "lease_s": environment.lease_s}
        data = msgspec.json.encode({**head, "tasks": rows}, enc_hook=_plain)
        return web.Response(body=data, content_type="application/json")

    async def groups(request: web.Request) -> web.Response:
        data = await read_bytes(request)
        try:
            body = await asyncio.to_thread(msgspec.json.decode, data, type=GroupBody)
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:
            raise ApiError(f"The body is not a group: {error}.") from None
        environment.post(body)
        return json_response({"version": environment.newest()})

    async def status(_request: web.Request) -> web.Response:
        return json_response(environment.status())

    app.router.add_post("/register", register)
    app.router.add_post("/tasks", tasks)
    app.router.add_post("/groups", groups)
    app.router.add_get("/status", status)


def _described(task: _OpenTask) -> dict[str, Any]:
    sampling = task.policy.sampling
    return {
        "task": task.id,
        "name": task.policy.name,
        "prompt": task.task.prompt,
        "prompt_tokens": task.prompt.tolist(),
        "columns": task.task.columns,
        "num_episodes": task.num_episodes,
        "seed": task.policy.seed,
        "is_trained": task.policy.is_trained,
        "sampling": {  # parameters of /v1/completions
            "max_tokens": sampling.max_new_tokens,
            "temperature": sampling.temperature,
            "stop": list(sampling.stop),
        },
    }


def _plain(value: Any) -> Any:
    """A task column that JSON cannot hold: an array as lists, anything else as text."""
    return value.tolist() if isinstance(value, np.ndarray | np.generic) else str(value)
