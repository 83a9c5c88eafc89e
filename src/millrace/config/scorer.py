"""The settings of one scorer: who judges, how much it counts, and how it is called. Torch-free."""

from typing import Any, Self

from pydantic import ConfigDict, ValidationError, model_validator
from pydantic_core import InitErrorDetails

from millrace.config.sections import (
    Float,
    Int,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Section,
)


class ScorerConfig(Section):
    model_config = ConfigDict(extra="allow")

    function: str | None = None
    """ "module:name" or "file.py:name" with the TRL reward signature, sync or async."""
    type: str | None = None
    """Or a ready verifier: "exact", "numeric", "regex", "json_schema", "math", "python_tests"; a
    service: "http", "judge"; a model: "reward_model", "process_reward_model", "teacher",
    "self_teacher", "reference"; or "module:Name" of yours. Its own keys stand beside these; see
    docs/how-to/verifiers.md, docs/how-to/scorers.md, docs/how-to/reward-models.md
    and docs/how-to/teachers.md."""
    name: str | None = None
    """Name in metrics; the function's own name, or the type, if not given."""
    weight: Float = 1.0
    when: str | None = None
    """Judge only episodes to which another scorer gave such a score, as in "format >= 1"."""
    timeout_s: PositiveFloat | None = None
    """For one call; a function's counts from the moment a scorer process is free. By default 30,
    for models 300."""
    concurrency: PositiveInt | None = None
    """Calls in flight at most; by default 64, of a function as many as the scorer processes run."""
    batch: NonNegativeInt | None = None
    """Episodes of a group per call at most; 0 = all of them, in one call. By default 0 for
    functions and 1 for services."""
    retries: NonNegativeInt | None = None
    """Further tries of a call that failed for the moment; by default 5, and 1 for functions, where
    it means a lost process."""
    backoff_s: PositiveFloat = 0.5
    """Before the first further try; doubles with each one, up to 30 s, less a random part."""
    breaker_failures: NonNegativeInt | None = None
    """After so many failures in a row, calls wait; 0 = never. By default 0 for functions and 5 for
    services."""
    breaker_s: PositiveFloat = 10.0
    """So long; then one call goes first, and the others follow if it succeeds."""
    priority: Int = 0
    """Of the calls that wait for a scorer process, those with more of it go first."""

    @property
    def own(self) -> dict[str, Any]:
        """The table of its type: the name of that, and its own keys."""
        return {"type": self.type, **(self.model_extra or {})}

    @property
    def rules(self) -> dict[str, Any]:
        """How it is called, as far as that is set."""
        names = ("timeout_s", "concurrency", "batch", "retries", "breaker_failures")
        chosen = {name: getattr(self, name) for name in names}
        return {
            "backoff_s": self.backoff_s,
            "breaker_s": self.breaker_s,
            "priority": self.priority,
            **{name: value for name, value in chosen.items() if value is not None},
        }

    @model_validator(mode="after")
    def _is_a_function_or_a_type(self) -> Self:
        if (self.function is None) == (self.type is None):
            raise ValueError("a scorer has either a function or a type; set one of the two")
        if self.function is not None and self.model_extra:
            unknown: list[InitErrorDetails] = [
                {"type": "extra_forbidden", "loc": (key,), "input": value}
                for key, value in self.model_extra.items()
            ]
            raise ValidationError.from_exception_data(type(self).__name__, unknown)
        return self
