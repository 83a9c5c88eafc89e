"""What a completion must be, from a response_format or the tools of the OpenAI API to a grammar and
its masks.

The work is llguidance's (extra millrace[structured]). A grammar is text, so it travels with the
other settings of a request. Torch-free.

Promise: what cannot be a grammar is a TaskError that says why, where it is asked for. JSON that
follows a mask at every token, up to an eos token, is valid and fits its schema.
"""

import json
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from millrace.core.errors import TaskError

_CACHED = 32  # grammars that are kept compiled
# JSON without blanks: a model that is unsure would write them for ever.
_WHITESPACE = {"whitespace_flexible": False}


def grammar_of(response_format: Mapping[str, Any] | None) -> str | None:
    """None if any text will do."""
    match response_format:
        case None | {"type": "text"}:
            return None
        case {"type": "json_object"}:
            schema: Any = {"type": "object"}
        case {"type": "json_schema", "json_schema": {"schema": dict() as schema}}:
            pass
        case _:
            raise TaskError(
                f"response_format = {response_format!r:.80} is not known; its type is 'text',"
                " 'json_object', or 'json_schema' with a json_schema that has a schema."
            )
    matcher = _llguidance("response_format").LLMatcher
    grammar = matcher.grammar_from_json_schema(schema, overrides=_WHITESPACE)
    return _checked(matcher, grammar, of="response_format has a schema")


def call_grammar(
    functions: Sequence[Mapping[str, Any]], *, before: str, after: str, arguments: str
) -> str:
    """Of a completion that is a call of one of these functions and nothing else: an object with its
    name and, by the key `arguments`, what it is given, between two texts."""
    definitions: dict[str, Any] = {}  # "#/$defs/..." is looked up in the whole
    calls: list[dict[str, Any]] = []
    for function in functions:
        own: dict[str, Any] = {**(function.get("parameters") or {"type": "object"})}
        for name, definition in dict(own.pop("$defs", {})).items():
            if definitions.setdefault(name, definition) != definition:
                raise TaskError(f"Two tools have different $defs named {name!r}; rename one.")
        properties = {"name": {"const": function["name"]}, arguments: own}
        calls.append(
            {
                "type": "object",
                "properties": properties,
                "required": list(properties),
                "additionalProperties": False,
            }
        )
    schema = {"anyOf": calls, "$defs": definitions, "x-guidance": _WHITESPACE}
    parts = [*([json.dumps(before)] if before else []), "call"]
    parts += [json.dumps(after)] if after else []
    matcher = _llguidance("tool_choice").LLMatcher
    grammar = matcher.grammar_from_lark(
        f"start: {' '.join(parts)}\ncall: %json {json.dumps(schema)}"
    )
    return _checked(matcher, grammar, of="tool_choice wants a call of tools with schemas")


def _checked(matcher: Any, grammar: str, *, of: str) -> str:
    is_error, words = matcher.validate_grammar_with_warnings(grammar)
    if is_error:
        first = words[0].splitlines()[0]  # then it shows where, in a grammar that nobody wrote
        raise TaskError(f"{of} that cannot be followed: {first}.")
    return grammar


class Guide:
    """Where one completion is in its grammar."""

    def __init__(self, matcher: Any, *, vocab_size: int, eos_ids: Sequence[int]) -> None:
        self._matcher = matcher
        self._vocab_size = vocab_size
        self._eos_ids = list(eos_ids)
        self._num_read = 0

    def copy(self) -> "Guide":
        """For another completion of the same request."""
        assert self._num_read == 0
        matcher = self._matcher.deep_copy()
        return Guide(matcher, vocab_size=self._vocab_size, eos_ids=self._eos_ids)

    def allowed(self, sampled: np.ndarray) -> np.ndarray:  # [V] bool
        """What may follow all the tokens [N] of the completion so far."""
        for token in sampled[self._num_read :].tolist():
            self._matcher.consume_token(token)
        self._num_read = len(sampled)
        allowed = np.zeros(self._vocab_size, dtype=bool)
        if not self._matcher.is_error():
            bits = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
            found = np.unpackbits(bits, bitorder="little")[: self._vocab_size]
            allowed[: len(found)] = found
        if not allowed.any():
            # A limit of the parser: the completion ends here, and is told from a whole one by
            # whoever reads it.
            print(f"A grammar came to its end early: {self._matcher.get_error()}", flush=True)
            allowed[self._eos_ids] = True
        return allowed


class Guides:
    """Makes guides for one tokenizer. Called by the engine's thread."""

    def __init__(self, tokenizer: Any, *, vocab_size: int, eos_ids: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._eos_ids = list(eos_ids)
        self._vocabulary: Any = None  # llguidance's own, which takes a second to make
        self._compiled: OrderedDict[str, Any] = OrderedDict()  # matchers at their beginning

    def of(self, grammar: str | None) -> Guide | None:
        """None if there is nothing to follow."""
        if grammar is None:
            return None
        matcher = self._compiled.pop(grammar, None) or self._compile(grammar)
        self._compiled[grammar] = matcher
        if len(self._compiled) > _CACHED:
            self._compiled.popitem(last=False)
        return Guide(matcher.deep_copy(), vocab_size=self._vocab_size, eos_ids=self._eos_ids)

    def _compile(self, grammar: str) -> Any:
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
                    f"This model's tokenizer cannot follow a response_format: {error}."
                ) from error
        matcher = llguidance.LLMatcher(self._vocabulary, grammar, log_level=0)
        if matcher.is_error():
            raise TaskError(f"The grammar cannot be followed: {matcher.get_error()}.")
        return matcher


def _llguidance(what: str) -> Any:
    """`what` it is needed for."""
    try:
        import llguidance
    except ImportError:
        raise TaskError(
            f"{what} needs llguidance, which is not installed; install millrace[structured] where"
            " the server and its engines run."
        ) from None
    return llguidance
