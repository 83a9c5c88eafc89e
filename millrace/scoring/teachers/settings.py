"""How a model in scoring mode is run, whoever asks it: keys of every [[scorer]] that is one."""

from dataclasses import dataclass, fields
from typing import Any, Literal, get_args

Dtype = Literal["float32", "bfloat16", "float16"]


@dataclass(frozen=True, kw_only=True, slots=True)
class ReaderSettings:
    device: str = "auto"
    dtype: Dtype = "float32"
    threads: int | None = None
    """CPU threads; by default the cores are shared out evenly."""
    pass_tokens: int = 8192
    """Token budget of one forward pass; one longer sequence still gets a pass of its own."""
    logprob_chunk: int = 1024
    """Tokens whose logits exist at one time."""

    def __post_init__(self) -> None:
        if self.dtype not in get_args(Dtype):
            raise ValueError(f"dtype = {self.dtype!r} must be one of {', '.join(get_args(Dtype))}")
        for name in ("threads", "pass_tokens", "logprob_chunk"):
            value = getattr(self, name)
            if not (value is None and name == "threads"):
                check_whole(name, value, least=1)


def reader_settings(kind: Any) -> dict[str, Any]:
    """Those of `kind`, which has them among its own, as plain data."""
    return {field.name: getattr(kind, field.name) for field in fields(ReaderSettings)}


def check_whole(name: str, value: Any, *, least: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ValueError(f"{name} = {value!r} must be a whole number, at least {least}")
