"""Millrace: asynchronous reinforcement-learning post-training of language models.

import millrace as mr
mr.train(model="path/to/model", tasks=[...], scorers=[my_reward])
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from millrace import verifiers
    from millrace.adapters.environment_factory import EnvironmentFactory
    from millrace.adapters.gym import GymEnvironment
    from millrace.adapters.verifiers_env import VerifiersEnvironment
    from millrace.config import RunConfig, load_config
    from millrace.core.errors import MillraceError
    from millrace.core.records import Task
    from millrace.episodes.agent import Agent, Reply
    from millrace.episodes.limits import EpisodeOver
    from millrace.episodes.mcp_server import McpServer
    from millrace.episodes.tools import ToolError
    from millrace.run import RunResult, train
    from millrace.serving.blackbox import Blackbox
    from millrace.serving.gateway import Gateway

__version__ = "0.1.0"
__all__ = [
    "Agent",
    "Blackbox",
    "EnvironmentFactory",
    "EpisodeOver",
    "Gateway",
    "GymEnvironment",
    "McpServer",
    "MillraceError",
    "Reply",
    "RunConfig",
    "RunResult",
    "Task",
    "ToolError",
    "VerifiersEnvironment",
    "__version__",
    "load_config",
    "train",
    "verifiers",
]

_HOMES = {
    "Agent": "millrace.episodes.agent",
    "Blackbox": "millrace.serving.blackbox",
    "EnvironmentFactory": "millrace.adapters.environment_factory",
    "EpisodeOver": "millrace.episodes.limits",
    "Gateway": "millrace.serving.gateway",
    "GymEnvironment": "millrace.adapters.gym",
    "McpServer": "millrace.episodes.mcp_server",
    "MillraceError": "millrace.core.errors",
    "Reply": "millrace.episodes.agent",
    "RunConfig": "millrace.config",
    "RunResult": "millrace.run",
    "Task": "millrace.core.records",
    "ToolError": "millrace.episodes.tools",
    "VerifiersEnvironment": "millrace.adapters.verifiers_env",
    "load_config": "millrace.config",
    "train": "millrace.run",
}


def __getattr__(name: str) -> Any:
    """Public names load on first use, so that workers and the command line start fast."""
    import importlib

    if name == "verifiers":
        return importlib.import_module("millrace.verifiers")
    if name not in _HOMES:
        raise AttributeError(f"module 'millrace' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
