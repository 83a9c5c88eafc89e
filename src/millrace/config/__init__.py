"""The run's settings: TOML, dicts or keyword arguments in; one frozen, checked RunConfig out.

Promise: a wrong key, type or combination fails here, with the field, the value and the remedy,
before any worker starts. Nothing is accepted and ignored. Torch-free.
"""

from millrace.config.episodes import HUB, RoleModelConfig, ScorerConfig, TaskPlace, TasksConfig
from millrace.config.generation import FASTEST, EngineConfig, Interrupt, ModelConfig, WeightsConfig
from millrace.config.loading import anchored, load_config, parse_overrides, settings_table
from millrace.config.run_config import PolicyConfig, RunConfig
from millrace.config.training import ALL_LINEAR, CriticConfig, JournalConfig, LoraConfig

__all__ = [
    "ALL_LINEAR",
    "FASTEST",
    "HUB",
    "CriticConfig",
    "EngineConfig",
    "Interrupt",
    "JournalConfig",
    "LoraConfig",
    "ModelConfig",
    "PolicyConfig",
    "RoleModelConfig",
    "RunConfig",
    "ScorerConfig",
    "TaskPlace",
    "TasksConfig",
    "WeightsConfig",
    "anchored",
    "load_config",
    "parse_overrides",
    "settings_table",
]
