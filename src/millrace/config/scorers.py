"""Settings of scoring: the scorers, and how their scores become advantages. Torch-free."""

from typing import Any, Self

from pydantic import ConfigDict, Field, model_validator

from millrace.config.section import (
    Float,
    NonNegativeInt,
    Plugin,
    PositiveFloat,
    PositiveInt,
    Section,
    forbid,
)

# Keys of every scorer in earlier versions.
REMOVED = ("device", "backoff_s", "breaker_failures", "breaker_s", "priority")


class ScorerConfig(Section):
    model_config = ConfigDict(extra="allow")

    function: str | None = None
    """Reward function with TRL's signature, sync or async: "module:name" or "file.py:name". A
    scorer has either a function or a type."""
    type: str | None = None
    """Built-in scorer: a verifier ("exact", "numeric", "regex", "json_schema", "math",
    "python_tests", "reasoning_gym"), a service ("http", "judge"), a model ("reward_model",
    "process_reward_model", "teacher", "self_teacher", "reference"), or "module:Name". Its own
    settings are keys of the same table; see docs/how-to/verifiers.md, docs/how-to/scorers.md,
    docs/how-to/reward-models.md and docs/how-to/teachers.md."""
    name: str | None = None
    """Name in metrics and in placement.models. By default the name of the function, or the
    type."""
    weight: Float = 1.0
    """Factor of the scorer's score in the total reward."""
    when: str | None = None
    """Condition on another scorer's score, such as "format >= 1". Only episodes that meet it are
    scored."""
    timeout_s: PositiveFloat | None = None
    """Time limit in seconds for one call; for a function from the moment a scorer process is free.
    By default 30, and 300 for models."""
    concurrency: PositiveInt | None = None
    """Maximum number of calls in flight. By default 64, and for a function the number of scorer
    processes."""
    batch: NonNegativeInt | None = None
    """Maximum number of episodes of a group per call; 0 = the whole group. By default 0 for
    functions and 1 for services."""
    retries: NonNegativeInt | None = None
    """Number of retries of a call that failed temporarily. By default 5, and 1 for functions,
    where it covers a lost process."""

    @property
    def type_settings(self) -> dict[str, Any]:
        """The name and the keys of the type."""
        return {"type": self.type, **(self.model_extra or {})}

    @property
    def call_settings(self) -> dict[str, Any]:
        """The keys of CallSettings that are set."""
        names = {"timeout_s", "concurrency", "batch", "retries"}
        return self.model_dump(include=names, exclude_none=True)

    @model_validator(mode="before")
    @classmethod
    def _may_be_a_name(cls, value: Any) -> Any:
        """ "exact" is a type; "rewards.py:digits" is a function."""
        if not isinstance(value, str):
            return value
        return {"function": value} if ":" in value else {"type": value}

    @model_validator(mode="after")
    def _has_no_removed_key(self) -> Self:
        # A class of the user's own may have such a key.
        if self.type is not None and ":" not in self.type:
            found = {key: value for key, value in self.type_settings.items() if key in REMOVED}
            if found:
                forbid(type(self).__name__, found)
        return self

    @model_validator(mode="after")
    def _is_a_function_or_a_type(self) -> Self:
        if (self.function is None) == (self.type is None):
            raise ValueError("a scorer has either a function or a type; set one of the two")
        if self.function is not None and self.model_extra:
            forbid(type(self).__name__, self.model_extra)
        return self


class ScoringConfig(Section):
    workers: PositiveInt = 2
    """Number of processes that run reward functions. A hung or crashed one is replaced."""
    advantages: Plugin = Field(default={"type": "auto"})
    """Estimator that turns scores into advantages: "group" (minus the group's mean, over its
    standard deviation), "leave_one_out", "batch", "returns", "best_worst", "tree" (for
    environment.recipe), "gae" (with [critic], such as {type = "gae", gae_lambda = 0.95}), or
    "module:Name". "auto" is the one that belongs to the loss, mostly "group"; see
    docs/reference/losses.md."""
    penalty: tuple[Plugin, ...] = ()
    """Length penalties, each a part of the score: "soft_overlong", "linear", "cosine", or
    "module:Name"; see docs/how-to/shape-training-data.md."""
