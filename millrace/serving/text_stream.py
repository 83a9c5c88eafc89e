"""The text of one completion, while its tokens come.

Promise: what add() returns, joined, is the completion's text: without the token that ended it,
and without a stop string or anything behind it. A character whose bytes are not all there yet is
held back, as is what may become a stop string or the beginning of a tool call; that is a matter
for the whole text. Runs on the server's loop.
"""

from collections.abc import Callable, Sequence

from millrace.core.records import Finish

Decode = Callable[[list[int]], str]
_HALF = "\ufffd"  # how a decoder shows bytes that are no character yet


class TextStream:
    def __init__(
        self, decode: Decode, *, stop: Sequence[str] = (), openers: Sequence[str] = ()
    ) -> None:
        """`openers`: from the first of these on, nothing is given out before the end."""
        self._decode = decode
        self._stop = tuple(stop)
        self._openers = tuple(openers)
        self._ids: list[int] = []
        self._context = 0  # ids from here on are decoded again: a token's text depends on the last
        self._read = 0  # ids before this are in the text
        self.text = ""  # so far
        self._num_given = 0

    @property
    def given(self) -> str:
        """What add() has returned."""
        return self.text[: self._num_given]

    @property
    def held(self) -> str:
        """Text that add() has not returned."""
        return self.text[self._num_given :]

    def add(self, tokens: Sequence[int], *, finish: Finish | None = None) -> str:
        """Take new tokens, with the last of them how it all ended; returns what is certain now."""
        self._ids += tokens
        text = self.text + self._decoded_from_read()
        if finish == "stop" and tokens and not any(stop in text for stop in self._stop):
            # No stop string ended it, so its last token did, which is no text.
            text = self.text + self._decoded_from_read(to=len(self._ids) - 1)
        if finish is not None or not text.endswith(_HALF):
            self.text = self._until_stop_string(text)
            self._context, self._read = self._read, len(self._ids)
        end = self._num_certain(is_end=finish is not None)
        given = self.text[self._num_given : end]
        self._num_given = max(end, self._num_given)
        return given

    def _decoded_from_read(self, *, to: int | None = None) -> str:
        known = self._decode(self._ids[self._context : self._read])
        return self._decode(self._ids[self._context : to])[len(known) :]

    def _until_stop_string(self, text: str) -> str:
        ends = [at for stop in self._stop if (at := text.find(stop, self._num_given)) >= 0]
        return text[: min(ends)] if ends else text

    def _num_certain(self, *, is_end: bool) -> int:
        """Characters that will be the text's beginning whatever comes, and are no tool call."""
        opened = [self.text.find(opener, self._num_given) for opener in self._openers]
        found = min((at for at in opened if at >= 0), default=len(self.text))
        if is_end:
            return found
        awaited = (*self._stop, *self._openers)
        longest = min(max(map(len, awaited), default=1) - 1, found - self._num_given)
        for length in range(longest, 0, -1):
            if any(each.startswith(self.text[found - length : found]) for each in awaited):
                return found - length
        return found
