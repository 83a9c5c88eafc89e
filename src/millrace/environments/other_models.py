"""Models of environment.models: frozen models that roles can use besides the policy.

Promise: each model is rendered with its own tokenizer, chat template and tool-call format. Its
settings are checked before any engine starts.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from millrace.config import RoleModelConfig
from millrace.core.files import check_file_name
from millrace.environments.rollouts.renderer import Renderer
from millrace.environments.tools.calls import ToolFormat, format_of
from millrace.models.directory import check_directory, context_length, load_tokenizer


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class OtherModel:
    path: str
    renderer: Renderer
    tool_format: ToolFormat
    max_context: int


def load_other_models(settings: Mapping[str, RoleModelConfig]) -> dict[str, OtherModel]:
    """Load tokenizers and configurations, without weights; raise ConfigError if one is wrong."""
    return {name: _load(name, row) for name, row in settings.items()}


def _load(name: str, settings: RoleModelConfig) -> OtherModel:
    section, path = f"environment.models.{name}", settings.path
    trust_remote_code = settings.trust_remote_code
    check_file_name(name, of="One of environment.models")
    check_directory(path, setting=f"{section}.path")
    tokenizer = load_tokenizer(path, trust_remote_code=trust_remote_code)
    renderer = Renderer(tokenizer, template_settings=settings.template)
    return OtherModel(
        path=path,
        renderer=renderer,
        tool_format=format_of("auto", template=renderer.chat_template),
        max_context=context_length(
            path,
            wanted=settings.engine.max_context,
            setting=f"{section}.max_context",
            trust_remote_code=trust_remote_code,
        ),
    )
