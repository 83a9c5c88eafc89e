"""The HTTP server of a run whose episodes external programs play: tasks, groups, and the engines.

Runs on the controller's event loop.
"""

import contextlib
import os
from collections.abc import AsyncIterator, Callable
from typing import TYPE_CHECKING, Any

from millrace.config import RunConfig
from millrace.core.errors import ConfigError
from millrace.environments.rollouts.player import Environment
from millrace.environments.tools.calls import format_of
from millrace.inference.pool import EnginePool
from millrace.models.directory import num_experts, text_config
from millrace.serving.api.openapi import Health
from millrace.serving.external import ExternalEnvironment, add_routes
from millrace.serving.metrics import ServerMetrics
from millrace.serving.options import ServerLimits
from millrace.serving.programs.command_environment import PROGRAM_TIMEOUT_S
from millrace.serving.served_model import ServedModel
from millrace.serving.server import http_listener, make_app
from millrace.serving.settings import KEY_VARIABLE, is_loopback, read_keys

if TYPE_CHECKING:
    from millrace.run.prepare import PreparedRun

MODEL = "policy"  # its name for clients
BODY_BYTES = 32 * 2**20  # about 16 episodes of 32,000 tokens


def check_external(config: RunConfig) -> None:
    """Raise ConfigError for settings that groups of external programs cannot fit."""
    sampling, address = config.sampling, str(config.environment.external)
    if sampling.top_k or sampling.top_p < 1 or sampling.min_p:
        raise ConfigError(
            "environment.external: posted tokens have no kept ids, which sampling.top_k, top_p and"
            " min_p need; remove these settings."
        )
    if config.evaluate.engines:
        raise ConfigError(
            f"evaluate.engines = {config.evaluate.engines} hold single versions, which external"
            " programs do not reach; set evaluate.engines to 0."
        )
    if not read_keys(None, os.environ) and not is_loopback(_split(address)[0]):
        raise ConfigError(
            f"environment.external = {address!r} can be reached from other machines, but there is"
            f" no API key; set the environment variable {KEY_VARIABLE}, or use 127.0.0.1."
        )


def build_external(prepared: "PreparedRun", newest: Callable[[], int]) -> ExternalEnvironment:
    """`newest` returns the newest version that was published."""
    config, model = prepared.config, prepared.config.model
    found = text_config(model.path, trust_remote_code=model.trust_remote_code)
    if config.trainer.replay_routes and num_experts(found) > 0:
        raise ConfigError(
            "environment.external: posted tokens have no expert routes; set trainer.replay_routes"
            " to false."
        )
    return ExternalEnvironment(
        renderer=prepared.renderer,
        num_tokens=found.vocab_size,
        limit=config.buffer.limit,
        newest=newest,
        lease_s=config.environment.episode_timeout_s or PROGRAM_TIMEOUT_S,
    )


@contextlib.asynccontextmanager
async def external_server(
    environment: Environment, *, prepared: "PreparedRun", engines: EnginePool
) -> AsyncIterator[None]:
    """Serve an ExternalEnvironment inside the context; any other needs no server."""
    if not isinstance(environment, ExternalEnvironment):
        yield
        return
    config = prepared.config
    host, port = _split(str(config.environment.external))
    keys, limits = read_keys(None, os.environ), ServerLimits(body_bytes=BODY_BYTES)
    count = config.engine.num_local + config.engine.remote
    served = ServedModel(
        engines,
        tokenizer=prepared.tokenizer,
        name=MODEL,
        adapters=tuple(config.engine.adapters),
        max_context=prepared.max_context,
        max_sequences=count * config.engine.max_sequences,
        tool_format=format_of(
            config.environment.tool_format, template=prepared.renderer.chat_template
        ),
        metrics=ServerMetrics(),
    )
    app = make_app(
        served,
        keys=keys,
        hosts=[host],
        limits=limits,
        health=lambda: Health.of(serving=engines.num_engines, engines=count),
    )
    info: dict[str, Any] = {
        "model": MODEL,
        "model_path": config.model.path,
        "num_tokens": environment.num_tokens,
        "max_context": prepared.max_context,
        "max_staleness": environment.limit.max_staleness,
    }
    add_routes(app, environment, info=info)
    with contextlib.closing(served):
        async with http_listener(app, host=host, port=port, limits=limits) as url:
            print(f"External programs post groups at {url}", flush=True)
            yield


def _split(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)
