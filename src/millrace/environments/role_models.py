"""The models of an episode: the policy, and the frozen models of environment.models.

Promise: each model is rendered with its own tokenizer, chat template and tool-call format. Its
settings are checked before any engine starts.
"""

from dataclasses import dataclass

from millrace.config import RoleModelConfig
from millrace.core.files import check_file_name
from millrace.environments.replay.schema import ModelRow
from millrace.environments.rollouts.renderer import Renderer
from millrace.environments.tools.calls import FORMATS, ToolFormat, ToolFormatName, format_of
from millrace.models.directory import check_directory, context_length, load_tokenizer


@dataclass(frozen=True, slots=True, eq=False)
class RoleModel:
    row: ModelRow
    renderer: Renderer

    @property
    def tool_format(self) -> ToolFormat:
        return FORMATS[self.row.tool_format]


def role_model(
    renderer: Renderer, *, path: str = "", max_context: int, tool_format: ToolFormatName = "auto"
) -> RoleModel:
    row = ModelRow(
        path=path,
        max_context=max_context,
        tool_format=format_of(tool_format, template=renderer.chat_template).name,
        template=renderer.template_settings,
    )
    return RoleModel(row, renderer)


def load_role_model(name: str, settings: RoleModelConfig) -> RoleModel:
    """Load tokenizer and configuration, without weights; raise ConfigError if one is wrong."""
    section, path = f"environment.models.{name}", settings.path
    trust_remote_code = settings.trust_remote_code
    check_file_name(name, of="One of environment.models")
    check_directory(path, setting=f"{section}.path")
    tokenizer = load_tokenizer(path, trust_remote_code=trust_remote_code)
    max_context = context_length(
        path,
        wanted=settings.engine.max_context,
        setting=f"{section}.max_context",
        trust_remote_code=trust_remote_code,
    )
    renderer = Renderer(tokenizer, template_settings=settings.template)
    return role_model(renderer, path=path, max_context=max_context)
