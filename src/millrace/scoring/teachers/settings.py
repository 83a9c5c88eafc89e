"""Keys of the [[scorer]] tables that are language models; see docs/how-to/teachers.md.

N.B. these are the kinds' own: name, weight, timeout_s and the like belong to every scorer.
"""

from dataclasses import dataclass, fields
from typing import Any, Literal, get_args

Dtype = Literal["float32", "bfloat16", "float16"]
Divergence = Literal["reverse_kl", "forward_kl", "jsd"]
TOP_K = 32  # where a loss compares distributions and nothing else is said


@dataclass(frozen=True, kw_only=True, slots=True)
class ReaderSettings:
    """How a model in scoring mode is run, whoever asks it."""

    device: str = "auto"
    dtype: Dtype = "float32"
    threads: int = 1
    """On a CPU."""
    pass_tokens: int = 8192
    """Token budget of one forward pass; one longer sequence still gets a pass of its own."""
    logprob_chunk: int = 1024
    """Tokens whose logits exist at one time."""

    def __post_init__(self) -> None:
        check_one_of("dtype", self.dtype, get_args(Dtype))
        for name in ("threads", "pass_tokens", "logprob_chunk"):
            check_whole(name, getattr(self, name), least=1)

    def plain(self) -> dict[str, Any]:
        """These alone, as a teacher process is told them."""
        return {field.name: getattr(self, field.name) for field in fields(ReaderSettings)}


@dataclass(frozen=True, kw_only=True, slots=True)
class TeachingSettings(ReaderSettings):
    """What a teacher is asked, about which tasks, and how it is learned from."""

    loss: Divergence = "reverse_kl"
    """loss.distil, where that is not set; the scorer's weight is loss.distil_weight."""
    beta: float = 0.5
    """With "jsd": loss.distil_beta, where that is not set."""
    top_k: int | None = None
    """Likeliest tokens that are told with their logprobs; by default 0 with "reverse_kl", which
    does not use them, and 32 with the others."""
    temperature: float = 1.0
    """Of the teacher, whatever the tokens were sampled at."""
    tasks: tuple[str, ...] = ()
    """Names of the [[tasks.source]] it teaches; none = all tasks."""
    column: str | None = None
    """Then `tasks` are values of this column of a task."""
    hint: str | None = None
    """A column of the tasks that the teacher is shown and the policy is not."""
    template: str = "{hint}\n\n{prompt}"
    """What it reads then instead of the prompt, or of the last message of a chat."""

    def __post_init__(self) -> None:
        ReaderSettings.__post_init__(self)  # super() does not find its way in a class with slots
        check_one_of("loss", self.loss, get_args(Divergence))
        if self.top_k is not None:
            check_whole("top_k", self.top_k, least=0 if self.loss == "reverse_kl" else 1)
        if not (isinstance(self.temperature, int | float) and self.temperature > 0):
            raise ValueError(f"temperature = {self.temperature!r} must be a number above 0")
        if isinstance(self.tasks, str):
            raise ValueError(f"tasks = {self.tasks!r} must be a list of names")
        if self.column is not None and not self.tasks:
            raise ValueError(f"column = {self.column!r} says nothing without tasks; set both")
        if "{prompt}" not in self.template or "{hint}" not in self.template:
            raise ValueError(
                f"template = {self.template!r} needs a place for {{prompt}} and one for {{hint}}"
            )

    @property
    def num_top(self) -> int:
        if self.top_k is None:
            return 0 if self.loss == "reverse_kl" else TOP_K
        return self.top_k


def check_whole(name: str, value: Any, *, least: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ValueError(f"{name} = {value!r} must be a whole number, at least {least}")


def check_one_of(name: str, value: Any, known: tuple[str, ...]) -> None:
    if value not in known:
        raise ValueError(f"{name} = {value!r} must be one of {', '.join(map(repr, known))}")
