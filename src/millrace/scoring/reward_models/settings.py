"""What reward models of both kinds are told: the model, its device, and how sequences are laid
before it; and what of that can be known to be wrong before any process starts.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, Self, get_args

from millrace.core.errors import ConfigError
from millrace.core.records import Task
from millrace.models.directory import load_tokenizer, text_config
from millrace.scoring.scorer_kind import CallRules

Template = Literal["auto", "chat", "text", "ids"]
Dtype = Literal["float32", "bfloat16", "float16"]


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelSettings:
    """The fields are keys of [[scorer]]."""

    model: str
    """Directory or hub name."""
    label: int | None = None
    """Of a model with several: the one whose probability is the value. With one label the value is
    its logit."""
    template: Template = "auto"
    """How a conversation is laid before it: "chat" = through the chat template of its own
    tokenizer, "text" = prompt and completion as text, "ids" = the policy's own tokens, for a model
    with the same tokenizer; "auto" = chat for messages, if it has a template, else text."""
    device: str = "auto"
    dtype: Dtype = "float32"
    threads: int = 1
    """On a CPU."""
    batch_tokens: int = 8192
    """Of one forward pass, with padding; one longer sequence still gets a pass of its own."""
    max_length: int | None = None
    """Longest sequence; the model's own limit if not given."""
    trust_remote_code: bool = False

    def __post_init__(self) -> None:
        check_choice("template", self.template, get_args(Template))
        check_choice("dtype", self.dtype, get_args(Dtype))
        check_counts(self, "threads", "batch_tokens", "max_length")

    def rules(self, *, num_workers: int) -> CallRules:
        """Episodes come as they finish and are batched over there. What it cannot read, it could
        not read again either, and a lost process is replaced without further ado."""
        return CallRules(timeout_s=300.0, concurrency=1024, batch=1, retries=0, breaker_failures=0)

    def check(self, tasks: Sequence[Task], *, name: str) -> None:
        self.checked(scorer=name)

    def checked(self, *, scorer: str) -> Self:
        """With the longest sequence that the model can take; raises ConfigError for what its files
        rule out. Reads no weights."""
        config = text_config(
            self.model,
            trust_remote_code=self.trust_remote_code,
            setting=f"model of scorer {scorer!r}",
        )
        self._check_label([str(name) for name in (config.id2label or {}).values()], scorer=scorer)
        limit = getattr(config, "max_position_embeddings", None)
        wanted = self.max_length
        if wanted is not None and limit is not None and wanted > limit:
            raise ConfigError(
                f"Scorer {scorer!r}: max_length = {wanted} is more than the {limit} tokens that"
                f" {self.model!r} reads; lower it."
            )
        if self.template == "chat" and not self._tokenizer().chat_template:
            raise ConfigError(
                f"Scorer {scorer!r}: template = 'chat', but the tokenizer of {self.model!r} has no"
                " chat template; set it to 'text'."
            )
        return replace(self, max_length=wanted if wanted is not None else limit)

    def has_same_tokens(self, policy: Any) -> bool:
        """Whether the policy's token ids mean the same to this model; `policy` is its tokenizer."""
        return self._tokenizer().get_vocab() == policy.get_vocab()

    def require_same_tokens(self, policy: Any, *, scorer: str) -> None:
        if not self.has_same_tokens(policy):
            raise ConfigError(
                f"Scorer {scorer!r}: template = 'ids' hands it the policy's tokens, but the"
                f" tokenizer of {self.model!r} is another; set template to 'chat' or 'text'."
            )

    def _check_label(self, names: list[str], *, scorer: str) -> None:
        if self.label is None and len(names) > 1:
            listed = ", ".join(f"{number} = {name!r}" for number, name in enumerate(names))
            raise ConfigError(
                f"Scorer {scorer!r}: model {self.model!r} has {len(names)} labels ({listed}); set"
                " label to the number of the one whose probability is the score."
            )
        if self.label is not None and not (len(names) > 1 and 0 <= self.label < len(names)):
            raise ConfigError(
                f"Scorer {scorer!r}: label = {self.label} does not name one of several labels of"
                f" model {self.model!r}, which has {len(names)}; set one of these from 0 on, or"
                " leave it out if there is only one."
            )

    def _tokenizer(self) -> Any:
        return load_tokenizer(self.model, trust_remote_code=self.trust_remote_code)


def check_counts(settings: Any, *names: str) -> None:
    for name in names:
        value = getattr(settings, name)
        if value is not None and not (isinstance(value, int) and value > 0):
            raise ValueError(f"{name} = {value!r} must be a whole number above 0")


def check_choice(name: str, value: Any, known: tuple[Any, ...]) -> None:
    if value not in known:
        names = ", ".join(repr(one) for one in known if one is not None)
        raise ValueError(f"{name} = {value!r} must be one of {names}")
