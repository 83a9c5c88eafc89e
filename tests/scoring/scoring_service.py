"""A scripted HTTP service on a real socket, and a scorer pool that calls it."""

import contextlib
import json
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from typing import Any

from aiohttp import web
from scripted_scorer import group

from millrace.cluster.supervision.pool import WorkerPool
from millrace.config import load_config
from millrace.scoring.advantages import GroupAdvantages
from millrace.scoring.pool import ScorerPool, build_scorer_pool, check_scorers, resolve_scorers

__all__ = ["FakeService", "group", "num_lost", "open_pool", "running", "scores_of"]

SHORT_WAITS = {"backoff_s": 0.001, "breaker_s": 0.01}


class FakeService:
    """`reply` makes the answer to a request from its body. Answers in a list are used first."""

    def __init__(self, reply: Callable[[dict[str, Any]], Any]) -> None:
        self.reply = reply
        self.first: list[Any] = []
        self.bodies: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.url = ""

    async def handle(self, request: web.Request) -> web.StreamResponse:
        self.bodies.append(await request.json())
        self.headers.append(dict(request.headers))
        answer = self.first.pop(0) if self.first else self.reply(self.bodies[-1])
        if callable(answer):
            answer = await answer(request)
        if isinstance(answer, web.StreamResponse):
            return answer
        text = answer if isinstance(answer, str) else json.dumps(answer)
        return web.Response(text=text, content_type="application/json")


@contextlib.asynccontextmanager
async def running(service: FakeService, *, port: int = 0) -> AsyncIterator[FakeService]:
    app = web.Application()
    app.router.add_post("/{tail:.*}", service.handle)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    try:
        site = web.TCPSite(runner, "127.0.0.1", port)
        await site.start()
        service.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        yield service
    finally:
        await runner.cleanup()


def num_lost(pool: ScorerPool) -> int:
    """Processes of reward functions that died or were killed."""
    return sum(replica.num_deaths for replica in pool.workers._replicas)


async def no_process(name: str, module: str):
    raise AssertionError("no process is needed")


@contextlib.asynccontextmanager
async def open_pool(
    *tables: dict[str, Any], folder, warn=print, tasks=(), launch=no_process, **calls: Any
) -> AsyncIterator:
    """Open a pool with these [[scorers]] tables and call settings. Waits are short."""
    config = load_config({"model": "m", "scorers": list(tables)})
    specs = [
        replace(spec, overrides={**SHORT_WAITS, **calls, **spec.overrides})
        for spec in resolve_scorers(config.scorers)
    ]
    check_scorers(specs, tasks)
    async with WorkerPool(launch) as worker_pool:
        pool = build_scorer_pool(
            specs,
            advantages=GroupAdvantages(),
            num_workers=1,
            worker_pool=worker_pool,
            private=folder / "private",
            folder=folder / "scorers",
            warn=warn,
        )
        async with pool:
            yield pool


async def scores_of(pool: ScorerPool, *texts: str, number: int = 0) -> list[float]:
    return [score.total for score in (await pool.score(group(*texts, number=number))).scores]
