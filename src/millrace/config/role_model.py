"""[environment.models.NAME]: a model besides the policy that roles may be, never trained.
Torch-free."""

from typing import Any, Literal

from pydantic import Field

from millrace.config.sections import DecodingConfig, EngineConfig, ModelConfig, PositiveInt

ToolFormatName = Literal["auto", "hermes", "llama3", "mistral", "gemma"]


class RoleModelConfig(DecodingConfig, ModelConfig):
    count: PositiveInt = 1
    """Engine processes that serve it, on this host."""
    tool_format: ToolFormatName = "auto"
    """As environment.tool_format, for this model."""
    template: dict[str, Any] = Field(default={})
    """As environment.template, for this model."""

    @property
    def model(self) -> ModelConfig:
        return ModelConfig(**self._those_of(ModelConfig))

    @property
    def engine(self) -> EngineConfig:
        return EngineConfig(count=self.count, **self._those_of(DecodingConfig))

    def _those_of(self, section: type[ModelConfig | DecodingConfig]) -> dict[str, Any]:
        return {name: getattr(self, name) for name in section.model_fields}
