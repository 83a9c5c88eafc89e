"""Structured output: a response_format or tools of the OpenAI API as a grammar and token masks.

llguidance does the work (extra millrace[structured]). A grammar is text, so it is sent with the
other settings of a request. Torch-free.

Promise: an invalid grammar is a TaskError that gives the reason, raised where it is requested. JSON
sampled within the mask at every token, up to an eos token, is valid and fits its schema.
"""

import json
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from millrace.core.errors import TaskError, printable

_NUM_CACHED = 32  # compiled grammars
MAX_SCHEMA_CHARACTERS = 2**15  # compiling takes time in proportion, in the server and the engine
MAX_SCHEMA_ITEMS = 2**14  # each item that a list must or may have becomes a part of the grammar
# JSON without whitespace: an uncertain model might sample whitespace forever.
_WHITESPACE = {"whitespace_flexible": False}


def grammar_of(response_format: Mapping[str, Any] | None) -> str | None:
    """The grammar of a response_format; None = any text."""
    match response_format:
        case None | {"type": "text"}:
            return None
        case {"type": "json_object"}:
            schema: Any = {"type": "object"}
        case {"type": "json_schema", "json_schema": {"schema": dict() as schema}}:
            pass
        case _:
            raise TaskError(
                f"response_format = {response_format!r:.80} is unknown; its type is 'text',"
                " 'json_object', or 'json_schema' with a json_schema that has a schema."
            )
    _check_size(schema, source="response_format")
    matcher = _llguidance("response_format").LLMatcher
    try:
        grammar = matcher.grammar_from_json_schema(schema, overrides=_WHITESPACE)
    except ValueError as error:  # a number that is too large for it
        raise TaskError(f"response_format has a schema that cannot be read: {error}.") from None
    return _checked(matcher, grammar, source="response_format has a schema")


def call_grammar(
    functions: Sequence[Mapping[str, Any]], *, before: str, after: str, arguments: str
) -> str:
    """The grammar of a call of one of these functions: `before`, an object with its name and, under
    the key `arguments`, its arguments, and `after`."""
    definitions: dict[str, Any] = {}  # "#/$defs/..." refers to the whole schema
    calls: list[dict[str, Any]] = []
    for function in functions:
        own: dict[str, Any] = {**(function.get("parameters") or {"type": "object"})}
        for name, definition in dict(own.pop("$defs", {})).items():
            if definitions.setdefault(name, definition) != definition:
                raise TaskError(f"Two tools have different $defs named {name!r}; rename one.")
        properties = {"name": {"const": function["name"]}, arguments: own}
        required = {"required": list(properties), "additionalProperties": False}
        calls.append({"type": "object", "properties": properties, **required})
    schema = {"anyOf": calls, "$defs": definitions, "x-guidance": _WHITESPACE}
    _check_size(schema, source="tool_choice")
    first, last = (json.dumps(text) if text else "" for text in (before, after))
    matcher = _llguidance("tool_choice").LLMatcher
    grammar = matcher.grammar_from_lark(
        f"start: {first} call {last}\ncall: %json {json.dumps(schema)}"
    )
    return _checked(matcher, grammar, source="tool_choice requires tools with schemas")


def _check_size(schema: Any, *, source: str) -> None:
    if (size := len(json.dumps(schema, default=repr))) > MAX_SCHEMA_CHARACTERS:
        raise TaskError(
            f"{source} needs a schema of {size} characters, but at most {MAX_SCHEMA_CHARACTERS}"
            " are compiled; simplify it."
        )
    if (num_items := _num_items(schema)) > MAX_SCHEMA_ITEMS:
        raise TaskError(
            f"{source} has a schema whose minItems and maxItems add up to {num_items:g}, but at"
            f" most {MAX_SCHEMA_ITEMS} are compiled; lower or remove them."
        )


def _num_items(schema: Any) -> float:
    """The sum of all limits of lists in a schema."""
    num_items, parts = 0.0, [schema]
    while parts:
        part = parts.pop()
        if isinstance(part, Mapping):
            limits = (part.get("minItems"), part.get("maxItems"))
            num_items += sum(float(each) for each in limits if isinstance(each, int | float))
            parts += part.values()
        elif isinstance(part, list):
            parts += part
    return num_items


def _checked(matcher: Any, grammar: str, *, source: str) -> str:
    is_error, words = matcher.validate_grammar_with_warnings(grammar)
    if is_error:
        first = words[0].splitlines()[0]  # the rest points into the generated grammar
        raise TaskError(f"{source} that cannot be compiled: {first}.")
    return grammar


class GrammarMatcher:
    """The position of one completion in its grammar."""

    def __init__(self, matcher: Any, *, eos_ids: Sequence[int]) -> None:
        self.matcher = matcher  # of llguidance
        self._eos_ids = list(eos_ids)
        self._num_read = 0

    def unread(self, sampled: np.ndarray) -> list[int]:
        """The tokens of the completion so far, `sampled` [N], that follow those it had before."""
        tokens, self._num_read = sampled[self._num_read :].tolist(), len(sampled)
        return tokens

    def end(self, mask: np.ndarray) -> None:
        """Allow the eos tokens: a limit of the parser was reached. The completion ends here; its
        reader sees that it is not whole."""
        error, *_ = self.matcher.get_error().splitlines() or [""]  # the rest is the grammar
        print(f"A grammar ended early: {printable(error)}", flush=True)
        bits = np.zeros(32 * len(mask), dtype=np.uint8)
        bits[self._eos_ids] = 1
        mask[:] = np.packbits(bits, bitorder="little").view("<i4")


class GrammarCompiler:
    """Compiles grammars for one tokenizer, with a cache. Called by the engine's thread."""

    def __init__(self, tokenizer: Any, *, vocab_size: int, eos_ids: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._eos_ids = list(eos_ids)
        self._vocabulary: Any = None  # of llguidance; takes a second to build
        self._compiled = lru_cache(_NUM_CACHED)(self._compile)  # matchers at the start
        self._executor: Any = None  # threads of llguidance

    def matcher(self, grammar: str | None, *, cache_salt: str = "") -> GrammarMatcher | None:
        """A new matcher for one completion; None without a grammar. It is compiled again for each
        salt: the time would tell a client whether another one has sent the same schema."""
        if grammar is None:
            return None
        compiled = self._compiled(grammar, cache_salt)
        return GrammarMatcher(compiled.deep_copy(), eos_ids=self._eos_ids)

    def masks(
        self,
        guides: Sequence[GrammarMatcher | None],
        sampled: Sequence[np.ndarray],
        *,
        out: np.ndarray | None = None,
    ) -> np.ndarray:  # [R, V / 32] int32; the lowest bit first
        """The tokens that may follow each of these completions so far, [N] each; None = all. In
        threads, and in the rows of `out`: each token of a batch waits for this."""
        self._executor = self._executor or _llguidance("response_format").LLExecutor()
        if out is None:
            out = np.empty((len(guides), -(-self._vocab_size // 32)), dtype=np.int32)
        guided = [(row, guide) for row, guide in enumerate(guides) if guide is not None]
        unread = [(guide.matcher, guide.unread(sampled[row])) for row, guide in guided]
        while heads := [(matcher, tokens.pop(0)) for matcher, tokens in unread if tokens]:
            self._executor.consume_token_par(heads)
        live = [(guide.matcher, row) for row, guide in guided if not guide.matcher.is_error()]
        from llguidance.numpy import fill_next_token_bitmask_par

        if live:
            fill_next_token_bitmask_par(self._executor, live, out)
        filled = {row for _, row in live}
        for row, guide in enumerate(guides):
            if guide is None:
                out[row] = -1
            elif row not in filled or not out[row].any():
                guide.end(out[row])
        return out

    def _compile(self, grammar: str, _cache_salt: str) -> Any:
        llguidance = _llguidance("response_format")
        if self._vocabulary is None:
            from llguidance.hf import from_tokenizer

            try:
                self._vocabulary = from_tokenizer(
                    self._tokenizer,
                    n_vocab=self._vocab_size,
                    eos_token=self._eos_ids[0] if self._eos_ids else None,
                )
            except ValueError as error:
                raise TaskError(
                    f"This model's tokenizer does not support a response_format: {error}."
                ) from error
        matcher = llguidance.LLMatcher(self._vocabulary, grammar, log_level=0)
        if matcher.is_error():
            raise TaskError(f"The grammar cannot be compiled: {matcher.get_error()}.")
        return matcher


def _llguidance(feature: str) -> Any:
    """The package that `feature` needs."""
    try:
        import llguidance
    except ImportError:
        raise TaskError(
            f"{feature} needs llguidance, which is not installed; install millrace[structured] for"
            " the server and its engines."
        ) from None
    return llguidance
