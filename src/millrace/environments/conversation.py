"""Messages and texts of an agent, and the exchanges with the engine that they are.

A prompt that begins with an earlier one and its reply goes on from the tokens of that exchange:
only what is new is rendered and tokenised. What begins otherwise, because the environment left out
a turn, changed one or began anew, goes on from the longest beginning that is known, or from
nothing: the record branches.

What is new is the difference between two renderings of the chat template, with the new messages and
without. That is right only if the template renders what came before in the same way as it did then.
This is checked each time. Templates break it on purpose, as those that drop the thinking of earlier
turns; then the whole is rendered again, a branch of its own, and counted.

Promise: where the template keeps to what it rendered, all tokens of a branch together are what it
gives for the whole conversation, if the model writes its tokens as the tokenizer would. The token
with which the model ended its turn stands where the template puts one.
"""

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from itertools import accumulate
from typing import Any, Literal

import numpy as np

from millrace.core.records import Message
from millrace.environments.rollouts.renderer import Renderer
from millrace.environments.token_record import Exchange

History = Literal["template", "sampled"]
Schemas = Sequence[Mapping[str, Any]]

RERENDERED = "rerendered"
_SENTINEL = "\u27eareply\u27eb"  # stands for a reply whose surroundings are looked for


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Beginning:
    """Where a prompt goes on, and with which tokens."""

    given: np.ndarray  # [G] int32
    parent: Exchange | None = None
    at: int | None = None  # of the parent's branch, where that is not its end

    @property
    def start(self) -> int:
        """Tokens before the given ones, which are on record."""
        if self.parent is None:
            return 0
        return self.parent.end if self.at is None else self.at

    @property
    def tokens(self) -> np.ndarray:
        """All that the engine is to see."""
        before = [] if self.parent is None else [self.parent.tokens(self.at)]
        return np.concatenate([*before, self.given])


class Conversation:
    """What one agent was told so far. Called from one event loop."""

    def __init__(self, renderer: Renderer, *, history: History = "template") -> None:
        """`history`: where the template would render earlier turns otherwise, do so, or go on
        after what was sampled all the same."""
        self._renderer = renderer
        self._history = history
        self._chats: dict[bytes, Exchange] = {}  # by digest of its messages, with the reply
        self._texts: dict[str, tuple[Exchange, int]] = {}  # and where their last text ends
        self.counts: Counter[str] = Counter()

    def decode(self, tokens: np.ndarray) -> str:
        return self._renderer.decode(tokens)

    def of_messages(self, messages: Sequence[Message], *, tools: Schemas = ()) -> Beginning:
        digests = list(_digests(messages, tools))
        for count in range(len(messages), 0, -1):
            exchange = self._chats.get(digests[count])
            if exchange is None:
                continue
            ids = self._continuation(messages, count, exchange=exchange, tools=tools)
            if ids is not None:
                return Beginning(given=_array(ids), parent=exchange)
            self.counts[RERENDERED] += 1
            break
        text = self._renderer.chat_text(messages, tools=_plain(tools))
        return Beginning(given=_array(self._renderer.ids(text)))

    def of_text(self, text: str) -> Beginning:
        known = max((t for t in self._texts if text.startswith(t)), key=len, default=None)
        if known is None or known == text:
            return Beginning(given=self._renderer.render(text))
        exchange, end = self._texts[known]
        ids = self._renderer.ids(text[len(known) :])
        return Beginning(given=_array(ids), parent=exchange, at=end)

    def replied_to_messages(
        self, messages: Sequence[Message], exchange: Exchange, *, tools: Schemas = ()
    ) -> None:
        """`messages` with the reply as their last one are what this exchange ends with."""
        *_, digest = _digests(messages, tools)
        self._chats[digest] = exchange

    def replied_to_text(self, text: str, exchange: Exchange) -> None:
        """A text goes on before the token that ended the reply, and behind a string that did."""
        sampled = exchange.completion.tokens
        num_text = len(sampled) - _is_ended(exchange, self._renderer)
        known = text + self._renderer.decode(sampled[:num_text])
        self._texts[known] = exchange, exchange.end - len(sampled) + num_text

    def within(self, exchange: Exchange, num_sampled: int) -> tuple[Beginning, str]:
        """To go on after so many of the sampled tokens, and the text they are."""
        at = exchange.start + len(exchange.given) + num_sampled
        text = self._renderer.decode(exchange.completion.tokens[:num_sampled])
        return Beginning(given=_array([]), parent=exchange, at=at), text

    def _continuation(
        self, messages: Sequence[Message], count: int, *, exchange: Exchange, tools: Schemas
    ) -> list[int] | None:
        """What follows the first `count` messages, the last of which is the reply that the exchange
        ends with; None if the template would change what came before."""
        *before, reply = messages[:count]
        new = messages[count:]

        def text(*rows: Message, answers: bool) -> str:
            return self._renderer.chat_text(rows, tools=_plain(tools), answers=answers)

        stand_in = {"role": "assistant", "content": _SENTINEL}
        tail = text(*before, stand_in, answers=False).rpartition(_SENTINEL)[2]
        said = text(*before, reply, answers=False)
        whole = text(*before, reply, *new, answers=True)
        is_kept = said.startswith(text(*before, answers=True)) and whole.startswith(said)
        if is_kept and said.endswith(tail):
            rest = tail + whole[len(said) :]
        elif self._history == "sampled":
            rest = text(*before, stand_in, *new, answers=True).rpartition(_SENTINEL)[2]
        else:
            return None
        ids = self._renderer.ids(rest)
        has_end = bool(tail.strip()) and ids[0] in self._renderer.special_ids
        # What the model ended its turn with stands, be it the template's own or another.
        return ids[1:] if has_end and _is_ended(exchange, self._renderer) else ids


def _is_ended(exchange: Exchange, renderer: Renderer) -> bool:
    """True if the model ended its reply with a special token."""
    completion = exchange.completion
    is_whole = completion.finish == "stop" and len(completion.tokens) > 0
    return is_whole and int(completion.tokens[-1]) in renderer.special_ids


def _digests(messages: Sequence[Message], tools: Schemas) -> Iterator[bytes]:
    """Of the tools alone, then with one message after the other."""
    rows = [tools, *messages]
    encoded = (json.dumps(row, sort_keys=True, default=repr).encode() for row in rows)
    return accumulate(encoded, lambda digest, row: blake2b(digest + row).digest())


def _array(ids: list[int]) -> np.ndarray:
    return np.asarray(ids, np.int32)


def _plain(tools: Schemas) -> list[dict[str, Any]]:
    return [dict(schema) for schema in tools]
