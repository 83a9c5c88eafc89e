"""The process of a reward model: its settings, their checks against the model's files, its calls.

The model may have another tokenizer than the policy. Runs on the controller's event loop.
"""

from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any, Literal, Self

from millrace.cluster.messages import ReadSteps, StartRewardModel, StepReading, StepValues
from millrace.config.section import Dtype, PositiveInt
from millrace.core.errors import ConfigError
from millrace.core.plugins import plugin
from millrace.core.records import Task
from millrace.models.directory import load_tokenizer, max_positions, text_config
from millrace.scoring.model_process import MODEL_CALLS, ModelProcess
from millrace.scoring.scorer_type import CallSettings, ScorerContext

Template = Literal["auto", "chat", "text", "ids"]
Head = Literal["token", "sequence"]


class RewardModelProcess(ModelProcess):
    ROLE = "Reward model"
    MODULE = "millrace.scoring.reward_models.worker"

    async def read(self, readings: Sequence[StepReading], *, timeout_s: float) -> list[list[float]]:
        """Return the values of the steps of each reading."""
        reply = await self.ask(ReadSteps(readings=list(readings)), timeout_s=timeout_s)
        assert isinstance(reply, StepValues)
        return reply.values


@plugin
class RewardModelSettings:
    """The fields are keys of [[scorers]]."""

    model: str
    """Directory or hub name."""
    label: int | None = None
    """Number of the label whose probability is the score, for a model with several labels. With a
    single label the score is its logit."""
    template: Template = "auto"
    """Input of the model. "chat": messages through the chat template of its tokenizer. "text":
    prompt and completion as text. "ids": the policy's tokens, for a model with the same tokenizer.
    "auto": chat for messages if the tokenizer has a chat template, otherwise text."""
    dtype: Dtype = "auto"
    """Data type of the model. "auto" is bfloat16 on CUDA and float32 on a CPU."""
    threads: PositiveInt = 1
    """CPU threads."""
    batch_tokens: PositiveInt = 8192
    """Token budget of one forward pass, with padding. A longer sequence gets a pass of its own."""
    max_length: PositiveInt | None = None
    """Longest sequence in tokens. Default: the model's own limit."""
    trust_remote_code: bool = False

    def call_settings(self, *, num_workers: int) -> CallSettings:
        return MODEL_CALLS  # one call per finished episode; the process batches them

    def check(self, tasks: Sequence[Task], *, name: str) -> None:
        self.checked(scorer=name)

    def checked(self, *, scorer: str) -> Self:
        """Return the settings with max_length filled in; raises ConfigError if they do not fit the
        model's files. Reads no weights."""
        config = text_config(
            self.model,
            trust_remote_code=self.trust_remote_code,
            setting=f"model of scorer {scorer!r}",
        )
        self._check_label([str(name) for name in (config.id2label or {}).values()], scorer=scorer)
        limit = max_positions(config)
        wanted = self.max_length
        if wanted is not None and limit is not None and wanted > limit:
            raise ConfigError(
                f"Scorer {scorer!r}: max_length = {wanted} is more than the {limit} tokens that"
                f" {self.model!r} reads; lower it."
            )
        if self.template == "chat" and not self._tokenizer().chat_template:
            raise ConfigError(
                f"Scorer {scorer!r}: template = 'chat', but the tokenizer of {self.model!r} has no"
                " chat template; set template to 'text'."
            )
        return replace(self, max_length=wanted if wanted is not None else limit)

    def has_same_tokens(self, policy: Any) -> bool:
        """True if the policy's token ids mean the same to this model; `policy` is its tokenizer."""
        return self._tokenizer().get_vocab() == policy.get_vocab()

    def require_same_tokens(self, policy: Any, *, scorer: str) -> None:
        if not self.has_same_tokens(policy):
            raise ConfigError(
                f"Scorer {scorer!r}: template = 'ids' sends the policy's tokens, but the tokenizer"
                f" of {self.model!r} differs; set template to 'chat' or 'text'."
            )

    def start_message(self, **options: Any) -> StartRewardModel:
        own = {field.name: getattr(self, field.name) for field in fields(RewardModelSettings)}
        return StartRewardModel(settings=own, **options)

    def make_process(self, name: str, context: ScorerContext, **options: Any) -> RewardModelProcess:
        return RewardModelProcess(
            name,
            start=self.start_message(device=context.device_of(name), **options),
            worker_pool=context.worker_pool,
            start_timeout_s=context.start_timeout_s,
        )

    def _check_label(self, names: list[str], *, scorer: str) -> None:
        if self.label is None and len(names) > 1:
            labels = ", ".join(f"{number} = {name!r}" for number, name in enumerate(names))
            raise ConfigError(
                f"Scorer {scorer!r}: model {self.model!r} has {len(names)} labels ({labels}); set"
                " label to the number of the one whose probability is the score."
            )
        if self.label is not None and not (len(names) > 1 and 0 <= self.label < len(names)):
            raise ConfigError(
                f"Scorer {scorer!r}: label = {self.label} does not exist in model {self.model!r},"
                f" which has {len(names)}; set a number from 0 on, or remove label if there is only"
                " one."
            )

    def _tokenizer(self) -> Any:
        return load_tokenizer(self.model, trust_remote_code=self.trust_remote_code)
