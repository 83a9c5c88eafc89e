"""Request bodies with the field names of the OpenAI API, checked by pydantic.

Unknown fields are refused. So are known fields with a value that would change the result but is not
supported: nothing that a client requests is silently ignored. Fields that concern only OpenAI's own
service (billing, logging) are accepted and ignored.
"""

import secrets
from collections.abc import Callable, Sequence
from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import (
    AfterValidator,
    Field,
    ValidationError,
    WrapValidator,
    model_validator,
)
from pydantic_core import PydanticCustomError

from millrace.core.errors import TaskError
from millrace.core.records import Sampling
from millrace.environments.tools.calls import ToolCall, ToolFormat
from millrace.models.grammars import call_grammar, grammar_of
from millrace.serving.api.errors import ApiError
from millrace.serving.api.reading import WRONG_TOKEN, Body

MAX_CHOICES = 128
MAX_PROMPTS = 256
MAX_MESSAGES = 8192
MAX_TOOLS = 1024
MAX_TOP_LOGPROBS = 20
MAX_BIASES = 1024
_PIECE_TOKENS = 2**14
# Smaller values exceed the range of float32; the client means greedy sampling.
MIN_TEMPERATURE = 1e-5
MIN_TOP_P = 1e-6

Text = Annotated[str, Field(min_length=1)]
# Text that may become a stop string is read again with each token.
StopText = Annotated[str, Field(min_length=1, max_length=1024)]
Count = Annotated[int, Field(strict=True, ge=1)]
TokenId = Annotated[int, Field(strict=True, ge=0, le=2**31 - 1)]


def _in_pieces(ids: Any, check: Callable[[Any], Any]) -> Any:
    """Check a long list in several calls. Each call blocks all threads, also the event loop's."""
    if not isinstance(ids, list) or len(ids) <= _PIECE_TOKENS:
        return check(ids)
    for start in range(0, len(ids), _PIECE_TOKENS):
        try:
            check(ids[start : start + _PIECE_TOKENS])
        except ValidationError as error:
            if start == 0:
                raise
            (detail,) = error.errors()
            wrong = {"at": start + detail["loc"][0], "message": detail["msg"]}  # pyright: ignore
            raise PydanticCustomError(WRONG_TOKEN, "Item {at}: {message}", wrong) from None
    return ids


TokenIds = Annotated[list[TokenId], Field(min_length=1, fail_fast=True), WrapValidator(_in_pieces)]
Number = Annotated[float, Field(allow_inf_nan=False)]
Penalty = Annotated[Number, Field(ge=-2, le=2)]
TokenKey = Annotated[str, Field(pattern="^[0-9]{1,9}$")]  # a token id
Bias = Annotated[Number, Field(ge=-100, le=100)]
T = TypeVar("T")
Prompts = Annotated[list[T], Field(min_length=1, max_length=MAX_PROMPTS, fail_fast=True)]
Temperature = Annotated[Number, Field(ge=0, le=100)]
TopP = Annotated[Number, Field(gt=0, le=1)]
NumTop = Annotated[int, Field(strict=True, ge=0, le=MAX_TOP_LOGPROBS)]
# Arguments of apply_chat_template that would replace the template or change the type of result.
_FORBIDDEN = """
conversation messages tools documents chat_template add_generation_prompt continue_final_message
tokenize padding truncation max_length return_tensors return_dict return_assistant_tokens_mask
tokenizer_kwargs
"""


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
    stop: StopText | Annotated[list[StopText], Field(max_length=16, fail_fast=True)] | None = None
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
