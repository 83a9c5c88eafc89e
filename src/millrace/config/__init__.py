"""The run's settings: TOML, dicts or keyword arguments in; one frozen, checked RunConfig out.

Promise: a wrong key, type or combination fails here, with the field, the value and the remedy,
before any worker starts. Nothing is accepted and ignored. Torch-free.
"""

from millrace.config.environment import EnvironmentConfig, McpConfig, RoleModelConfig
from millrace.config.generation import (
    EngineConfig,
    Interrupt,
    ModelConfig,
    SamplingConfig,
    WeightsConfig,
)
from millrace.config.loading import load_config, parse_override
from millrace.config.operations import PlacementConfig, SupervisionConfig, TrackerConfig
from millrace.config.run_config import RunConfig
from millrace.config.scorers import ScorerConfig
from millrace.config.tasks import HUB, EvaluateConfig, TaskPlace, TasksConfig
from millrace.config.training import (
    ALL_LINEAR,
    CriticConfig,
    JournalConfig,
    LoraConfig,
    OptimizerConfig,
    ReplayConfig,
    TrainerConfig,
)

__all__ = [
    "ALL_LINEAR",
    "HUB",
    "CriticConfig",
    "EngineConfig",
    "EnvironmentConfig",
    "EvaluateConfig",
    "Interrupt",
    "JournalConfig",
    "LoraConfig",
    "McpConfig",
    "ModelConfig",
    "OptimizerConfig",
    "PlacementConfig",
    "ReplayConfig",
    "RoleModelConfig",
    "RunConfig",
    "SamplingConfig",
    "ScorerConfig",
    "SupervisionConfig",
    "TaskPlace",
    "TasksConfig",
    "TrackerConfig",
    "TrainerConfig",
    "WeightsConfig",
    "load_config",
    "parse_override",
]
