"""The run's settings: TOML, dicts or keyword arguments in; one frozen, checked RunConfig out.

Promise: a wrong key, type or combination fails here, with the field, the value and the remedy,
before any worker starts. Nothing is accepted and ignored. Torch-free.
"""

from millrace.config.environment import EnvironmentConfig, McpConfig
from millrace.config.journal import JournalConfig
from millrace.config.loading import load_config, parse_override
from millrace.config.role_model import RoleModelConfig
from millrace.config.run_config import RunConfig
from millrace.config.scorer import ScorerConfig
from millrace.config.sections import (
    ALL_LINEAR,
    CriticConfig,
    EngineConfig,
    Interrupt,
    LoraConfig,
    ReplayConfig,
    TrainerConfig,
)
from millrace.config.tasks import EvaluateConfig, TaskPlace, TasksConfig

__all__ = [
    "ALL_LINEAR",
    "CriticConfig",
    "EngineConfig",
    "EnvironmentConfig",
    "EvaluateConfig",
    "Interrupt",
    "JournalConfig",
    "LoraConfig",
    "McpConfig",
    "ReplayConfig",
    "RoleModelConfig",
    "RunConfig",
    "ScorerConfig",
    "TaskPlace",
    "TasksConfig",
    "TrainerConfig",
    "load_config",
    "parse_override",
]
