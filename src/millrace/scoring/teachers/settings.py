"""Settings of the [[scorers]] types that are language models; see docs/how-to/teachers.md.

name, weight, timeout_s and similar keys belong to every scorer and are not listed here.
"""

from dataclasses import dataclass, fields
from typing import Any, Literal, get_args

from millrace.scoring.setting_checks import check_choice, check_integer, check_positive

Dtype = Literal["auto", "float32", "bfloat16", "float16"]
Divergence = Literal["reverse_kl", "forward_kl", "jsd"]
TOP_K = 32  # default for losses that compare distributions


@dataclass(frozen=True, kw_only=True, slots=True)
class LogprobModelSettings:
    """How a model process that computes logprobs is run."""

    dtype: Dtype = "auto"
    """Data type of the model. "auto" is bfloat16 on CUDA and float32 on a CPU."""
    threads: int = 1
    """CPU threads."""
    pass_tokens: int = 8192
    """Token budget of one forward pass. A longer sequence gets a pass of its own."""
    logprob_chunk: int = 1024
    """Number of tokens whose logits are held in memory at once."""

    def __post_init__(self) -> None:
        check_choice("dtype", self.dtype, get_args(Dtype))
        check_integer(
            1, threads=self.threads, pass_tokens=self.pass_tokens, logprob_chunk=self.logprob_chunk
        )

    def process_settings(self) -> dict[str, Any]:
        """The fields of this class alone, without those of subclasses."""
        return {field.name: getattr(self, field.name) for field in fields(LogprobModelSettings)}


@dataclass(frozen=True, kw_only=True, slots=True)
class TeacherSettings(LogprobModelSettings):
    """Which tasks a teacher scores, what it reads, and which loss learns from it."""

    loss: Divergence = "reverse_kl"
    """Default of loss.distil. The scorer's weight is the default of loss.distil_weight."""
    beta: float = 0.5
    """Default of loss.distil_beta with "jsd"."""
    top_k: int | None = None
    """Number of most likely tokens per position whose logprobs the teacher returns. Default: 0 with
    "reverse_kl", which does not use them, otherwise 32."""
    temperature: float = 1.0
    """Temperature of the teacher's distribution, independent of sampling.temperature."""
    tasks: tuple[str, ...] = ()
    """Names of the [[tasks.source]] that the teacher scores; empty means all tasks."""
    column: str | None = None
    """If set, `tasks` lists values of this task column instead."""
    hint: str | None = None
    """Task column that the teacher sees and the policy does not."""
    template: str = "{hint}\n\n{prompt}"
    """With `hint`: text that replaces the prompt, or the last message of a chat."""

    def __post_init__(self) -> None:
        LogprobModelSettings.__post_init__(self)  # super() fails in a dataclass with slots
        check_choice("loss", self.loss, get_args(Divergence))
        if self.top_k is not None:
            check_integer(0 if self.loss == "reverse_kl" else 1, top_k=self.top_k)
        check_positive(temperature=self.temperature)
        if isinstance(self.tasks, str):
            raise ValueError(f"tasks = {self.tasks!r} must be a list of names")
        if self.column is not None and not self.tasks:
            raise ValueError(f"column = {self.column!r} has no effect without tasks; set both")
        if "{prompt}" not in self.template or "{hint}" not in self.template:
            raise ValueError(f"template = {self.template!r} must contain {{prompt}} and {{hint}}")

    @property
    def num_top(self) -> int:
        if self.top_k is None:
            return 0 if self.loss == "reverse_kl" else TOP_K
        return self.top_k
