"""Request bodies with the field names of the OpenAI API, checked by pydantic.

Unknown fields are refused. So are known fields with a value that would change the result but is not
supported: nothing that a client requests is silently ignored. Fields that concern only OpenAI's own
service (billing, logging) are accepted and ignored.

Promise: reading a body takes time in proportion to its size, whatever it contains. A list is
checked up to its first error, and very many parts or errors are refused without naming them.
"""

import json
import secrets
from collections.abc import Mapping, Sequence
from itertools import islice
from typing import Annotated, Any, Literal, Self, TypeVar

import msgspec
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, model_validator
from pydantic_core import PydanticCustomError

from millrace.core.errors import TaskError
from millrace.core.records import Sampling
from millrace.environments.tools.calls import ToolCall, ToolFormat
from millrace.models.grammars import call_grammar, grammar_of
from millrace.serving.api.errors import ApiError

MAX_CHOICES = 128
MAX_PROMPTS = 256
MAX_MESSAGES = 8192
MAX_TOOLS = 1024
MAX_TOP_LOGPROBS = 20
MAX_BIASES = 1024
MAX_ERRORS = 100  # that are looked at
# Parts of a body. The characters { [ and , in its texts count, too.
MAX_OBJECTS = 2**17
MAX_VALUES = 2**19
MAX_STRINGS = 2**16  # names of fields included
_UNKNOWN = "unknown_field"  # type of an error of pydantic
# Smaller values exceed the range of float32; the client means greedy sampling.
MIN_TEMPERATURE = 1e-5
MIN_TOP_P = 1e-6

Text = Annotated[str, Field(min_length=1)]
Count = Annotated[int, Field(strict=True, ge=1)]
TokenId = Annotated[int, Field(strict=True, ge=0, le=2**31 - 1)]
TokenIds = Annotated[list[TokenId], Field(min_length=1, fail_fast=True)]
Number = Annotated[float, Field(allow_inf_nan=False)]
Penalty = Annotated[Number, Field(ge=-2, le=2)]
TokenKey = Annotated[str, Field(pattern="^[0-9]{1,9}$")]  # a token id
Bias = Annotated[Number, Field(ge=-100, le=100)]
T = TypeVar("T")
Prompts = Annotated[list[T], Field(min_length=1, max_length=MAX_PROMPTS, fail_fast=True)]
B = TypeVar("B", bound="Body")
Temperature = Annotated[Number, Field(ge=0, le=100)]
TopP = Annotated[Number, Field(gt=0, le=1)]
NumTop = Annotated[int, Field(strict=True, ge=0, le=MAX_TOP_LOGPROBS)]
# Arguments of apply_chat_template that would replace the template or change the type of result.
_FORBIDDEN = """
conversation messages tools documents chat_template add_generation_prompt continue_final_message
tokenize padding truncation max_length return_tensors return_dict return_assistant_tokens_mask
tokenizer_kwargs
"""


class Body(BaseModel):
    # Strict, as /openapi.json says: "yes" is not a boolean and "1" is not a number.
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    @model_validator(mode="before")
    @classmethod
    def _refuse_first_unknown_field(cls, value: Any) -> Any:
        if isinstance(value, dict):
            for name in value:
                if name not in cls.model_fields:
                    raise PydanticCustomError(_UNKNOWN, "unknown field", {"name": name})
        return value


class StreamOptions(Body):
    include_usage: bool = False
    include_obfuscation: bool = False  # accepted, without effect


class GenerationBody(Body):
    """Fields that all endpoints share that generate."""

    model: str
    temperature: Temperature | None = None
    top_p: TopP | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: Any = None
    metadata: Any = None
    store: Any = None
    service_tier: Any = None
    safety_identifier: Any = None
    prompt_cache_key: Any = None  # a text names a conversation; its turns go to one engine


class OpenAIBody(GenerationBody):
    """Fields that both completion endpoints share."""

    n: Annotated[int, Field(strict=True, ge=1, le=MAX_CHOICES)] | None = None
    top_k: Annotated[int, Field(strict=True, ge=0, lt=2**31)] | None = None  # not in the OpenAI API
    min_p: Annotated[Number, Field(ge=0, lt=1)] | None = None  # not in the OpenAI API
    stop: Text | Annotated[list[Text], Field(max_length=16, fail_fast=True)] | None = None
    seed: Annotated[int, Field(strict=True, ge=-(2**63), lt=2**63)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    logit_bias: Annotated[dict[TokenKey, Bias], Field(max_length=MAX_BIASES)] | None = None

    @property
    def num_choices(self) -> int:
        return self.n or 1

    @property
    def num_completions(self) -> int:
        return self.num_choices

    def drawn_seed(self) -> int:
        return secrets.randbits(63) if self.seed is None else self.seed

    def sampling(self, *, max_new_tokens: int, grammar: str | None = None) -> Sampling:
        stop = [self.stop] if isinstance(self.stop, str) else self.stop or []
        temperature = 1.0 if self.temperature is None else self.temperature
        return Sampling(
            max_new_tokens=max_new_tokens,
            temperature=temperature if temperature >= MIN_TEMPERATURE else 0.0,
            top_p=1.0 if self.top_p is None else max(self.top_p, MIN_TOP_P),
            top_k=self.top_k or 0,
            min_p=self.min_p or 0.0,
            stop=tuple(stop),
            grammar=grammar,
            presence_penalty=self.presence_penalty or 0.0,
            frequency_penalty=self.frequency_penalty or 0.0,
            logit_bias=tuple((int(id), bias) for id, bias in (self.logit_bias or {}).items()),
            top_logprobs=self.num_top,
        )

    @property
    def num_top(self) -> int:
        """The number of likeliest tokens to report with each sampled token."""
        return 0

    @property
    def wants_logprobs(self) -> bool:
        return False

    @property
    def wants_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage

    @model_validator(mode="after")
    def _options_need_a_stream(self) -> Self:
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options need stream = true")
        return self


class ResponseFormat(Body):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: dict[str, Any] | None = None


def check_function(tool: dict[str, Any]) -> dict[str, Any]:
    """Check the shape of a tool; its JSON schema is not checked."""
    match tool:
        case {"type": "function", "function": {"name": str() as name, **more}} if name:
            parameters = more.get("parameters", {})
            if isinstance(parameters, dict):
                inner = (parameters.get(key, {}) for key in ("properties", "$defs"))
                if all(isinstance(each, dict) for each in inner):
                    return tool
    raise ValueError(
        "a tool is an object with type = 'function' and a function with a name and optional"
        " parameters, which are a JSON schema"
    )


Tool = Annotated[dict[str, Any], AfterValidator(check_function)]


class NamedFunction(Body):
    name: Text


class NamedTool(Body):
    type: Literal["function"]
    function: NamedFunction


class ChatBody(OpenAIBody):
    """The body of /v1/chat/completions."""

    messages: Annotated[
        list[dict[str, Any]], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)
    ]
    max_tokens: Count | None = None
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: NumTop | None = None
    tools: Annotated[list[Tool], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = None
    tool_choice: Literal["auto", "none", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    response_format: ResponseFormat | None = None
    chat_template_kwargs: dict[str, Any] | None = None  # not in the OpenAI API

    def grammar(self, form: ToolFormat) -> str | None:
        """Return the grammar of the reply; None = unconstrained."""
        wanted = self.response_format and self.response_format.model_dump(exclude_none=True)
        try:
            grammar = grammar_of(wanted)
        except TaskError as error:
            raise ApiError(str(error), param="response_format") from None
        if grammar is None:
            return self._call_grammar(form)
        if self.offered_tools:
            raise ApiError(
                "With a response_format, the reply is JSON and cannot call tools; remove one of the"
                " two, or set tool_choice to 'none'.",
                param="response_format",
            )
        return grammar

    @property
    def num_top(self) -> int:
        return self.top_logprobs or 0

    @property
    def wants_logprobs(self) -> bool:
        return bool(self.logprobs)

    @property
    def token_limit(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def offered_tools(self) -> list[dict[str, Any]]:
        return [] if self.tool_choice == "none" else self.tools or []

    def allowed_calls(self, calls: Sequence[ToolCall]) -> Sequence[ToolCall]:
        return calls[:1] if self.parallel_tool_calls is False else calls

    def _call_grammar(self, form: ToolFormat) -> str | None:
        """Return the grammar of a required tool call; None if no call is required."""
        if self.tool_choice in (None, "auto", "none"):
            return None
        functions = [tool["function"] for tool in self.offered_tools]
        if isinstance(self.tool_choice, NamedTool):
            name = self.tool_choice.function.name
            functions = [function for function in functions if function["name"] == name]
        if not functions:
            raise ApiError("tool_choice requires a tool that is not in tools.", param="tool_choice")
        if form.frame is None:
            raise ApiError(
                "The tool format of this model does not support required calls; set tool_choice to"
                " 'auto' or 'none'.",
                param="tool_choice",
            )
        before, after, key = form.frame
        try:
            return call_grammar(functions, before=before, after=after, arguments=key)
        except TaskError as error:
            raise ApiError(str(error), param="tool_choice") from None

    @model_validator(mode="after")
    def _check_fields(self) -> Self:
        if self.top_logprobs and not self.logprobs:
            raise ValueError("top_logprobs need logprobs = true")
        if names := set(_FORBIDDEN.split()).intersection(self.chat_template_kwargs or ()):
            raise ValueError(f"chat_template_kwargs cannot set {min(names)!r}; remove it")
        return self


class CompletionBody(OpenAIBody):
    """The body of /v1/completions."""

    prompt: str | Prompts[str] | TokenIds | Prompts[TokenIds]
    max_tokens: Annotated[int, Field(strict=True, ge=0)] | None = 16
    logprobs: NumTop | None = None
    echo: bool | None = None
    suffix: None = None
    best_of: Literal[1] | None = None
    return_token_ids: bool | None = None  # not in the OpenAI API; also returns versions

    @property
    def num_top(self) -> int:
        return self.logprobs or 0

    @property
    def wants_logprobs(self) -> bool:
        return self.logprobs is not None

    @model_validator(mode="after")
    def _check_echo(self) -> Self:
        if self.echo and self.stream:
            raise ValueError("echo is not possible with stream = true")
        if self.max_tokens == 0 and not self.echo:
            raise ValueError("max_tokens = 0 needs echo = true")
        return self

    @property
    def prompts(self) -> list[str | list[int]]:
        match self.prompt:
            case str() | [int(), *_]:
                return [self.prompt]  # pyright: ignore[reportReturnType]
            case several:
                return list(several)  # pyright: ignore[reportReturnType]

    @property
    def num_completions(self) -> int:
        return len(self.prompts) * self.num_choices


def read_body(kind: type[B], data: bytes) -> B:
    """Parse and check a request body; raises ApiError."""
    num_objects, num_values = data.count(b"{") + data.count(b"["), data.count(b",")
    if num_objects > MAX_OBJECTS or num_values > MAX_VALUES:
        raise ApiError(
            f"The body has {num_objects} objects and lists and {num_values} values, but at most"
            f" {MAX_OBJECTS} and {MAX_VALUES} are read; send several smaller ones.",
            status=413,
        )
    if (num_quotes := data.count(b'"')) > 2 * MAX_STRINGS:
        num_strings = (num_quotes - data.count(b'\\"')) // 2
        if num_strings > MAX_STRINGS:
            raise ApiError(
                f"The body has {num_strings} strings, but at most {MAX_STRINGS} are read; send"
                " several smaller ones.",
                status=413,
            )
    try:
        table = msgspec.json.decode(data)  # several times as fast as the standard library
    except (ValueError, RecursionError) as error:  # also invalid UTF-8 and lone surrogates
        raise ApiError(f"The body is not valid JSON: {error}.") from None
    if not isinstance(table, dict):
        raise ApiError(f"The body is JSON, but not an object: {_brief(table)}.")
    return validate_body(kind, table)


def validate_body(kind: type[B], table: dict[str, Any]) -> B:
    try:
        return kind.model_validate(table)
    except ValidationError as error:
        raise _refusal(error) from None


def _brief(value: Any) -> str:
    """The beginning of a value as JSON, without a look at the rest."""
    parts = json.JSONEncoder().iterencode(value[:80] if isinstance(value, str) else value)
    return "".join(islice(parts, 80))[:80]


def _refusal(error: ValidationError) -> ApiError:
    if (count := error.error_count()) > MAX_ERRORS:
        return ApiError(f"The body has {count} unknown fields or wrong values; correct them.")
    # Each branch of a union reports an error. The deepest one is the most specific, preferably one
    # that is not about the type.
    first = max(
        error.errors(),
        key=lambda detail: (len(_place(detail)), not detail["type"].endswith("_type")),
    )
    where = ".".join(str(part) for part in _place(first) if not _is_branch(part))
    if first["type"] == _UNKNOWN:
        return ApiError(f"Unknown field {where!r}; remove it.", param=where, code="unknown_field")
    if first["type"] == "missing":
        return ApiError(f"Field {where!r} is missing.", param=where)
    message = first["msg"].removeprefix("Value error, ").rstrip(".")
    if not where:
        return ApiError(f"{message[0].upper()}{message[1:]}.")
    if (only := _supported_value(first)) is not None:
        message = f"only {only} is supported here"
    return ApiError(f"Field {where!r} = {_brief(first['input'])}: {message}.", param=where)


def _place(detail: Mapping[str, Any]) -> tuple[int | str, ...]:
    unknown = (detail["ctx"]["name"],) if detail["type"] == _UNKNOWN else ()
    return (*detail["loc"], *unknown)


def _supported_value(detail: Mapping[str, Any]) -> str | None:
    """Return the only supported value of a field, as JSON; None if there are several."""
    match detail:
        case {"type": "literal_error", "ctx": {"expected": str(expected)}}:
            return expected.replace("False", "false")
        case {"type": "none_required"}:
            return "null"
        case {"type": "too_long", "ctx": {"max_length": 0}}:
            return "{}"
        case _:
            return None


def _is_branch(part: int | str) -> bool:
    """True for the name of a union branch, which pydantic adds to the location."""
    return isinstance(part, str) and (part in ("str", "constrained-str") or "[" in part)
