"""Millrace: asynchronous reinforcement-learning post-training of language models.

import millrace as mr
mr.train(model="path/to/model", tasks=[...], scorers=[my_reward])
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from millrace.config import RunConfig, load_config
    from millrace.core.errors import MillraceError
    from millrace.core.records import Task
    from millrace.environments.adapters import EnvironmentFactory, GymEnvironment
    from millrace.environments.agent import Agent, Reply
    from millrace.environments.replay.schema import EpisodeOver
    from millrace.environments.tools.functions import ToolError
    from millrace.environments.tools.mcp_server import McpServer
    from millrace.monitoring.callbacks import Callback, EarlyStopping, StopTraining
    from millrace.run.execution.execute import RunResult
    from millrace.run.sft.execute import sft
    from millrace.run.train import Run, train, train_async
    from millrace.scoring import verifiers
    from millrace.serving.programs.command_environment import CommandEnvironment
    from millrace.serving.programs.gateway import Gateway
    from millrace.serving.programs.verifiers_env import VerifiersEnvironment

__version__ = "0.1.0"
__all__ = [
    "Agent",
    "Callback",
    "CommandEnvironment",
    "EarlyStopping",
    "EnvironmentFactory",
    "EpisodeOver",
    "Gateway",
    "GymEnvironment",
    "McpServer",
    "MillraceError",
    "Reply",
    "Run",
    "RunConfig",
    "RunResult",
    "StopTraining",
    "Task",
    "ToolError",
    "VerifiersEnvironment",
    "__version__",
    "load_config",
    "sft",
    "train",
    "train_async",
    "verifiers",
]

_HOMES = {
    "Agent": "millrace.environments.agent",
    "Callback": "millrace.monitoring.callbacks",
    "CommandEnvironment": "millrace.serving.programs.command_environment",
    "EarlyStopping": "millrace.monitoring.callbacks",
    "EnvironmentFactory": "millrace.environments.adapters",
    "EpisodeOver": "millrace.environments.replay.schema",
    "Gateway": "millrace.serving.programs.gateway",
    "GymEnvironment": "millrace.environments.adapters",
    "McpServer": "millrace.environments.tools.mcp_server",
    "MillraceError": "millrace.core.errors",
    "Reply": "millrace.environments.agent",
    "Run": "millrace.run.train",
    "RunConfig": "millrace.config",
    "RunResult": "millrace.run.execution.execute",
    "StopTraining": "millrace.monitoring.callbacks",
    "Task": "millrace.core.records",
    "ToolError": "millrace.environments.tools.functions",
    "VerifiersEnvironment": "millrace.serving.programs.verifiers_env",
    "load_config": "millrace.config",
    "sft": "millrace.run.sft.execute",
    "train": "millrace.run.train",
    "train_async": "millrace.run.train",
}


def __getattr__(name: str) -> Any:
    """Public names load on first use, so that workers and the command line start fast."""
    import importlib

    if name == "verifiers":
        return importlib.import_module("millrace.scoring.verifiers")
    if name not in _HOMES:
        raise AttributeError(f"module 'millrace' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
