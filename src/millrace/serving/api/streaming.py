"""The text of a completion while its tokens arrive.

Promise: the results of add(), joined, are the completion's text without the end token and without a
stop string or anything after it. Incomplete characters are held back, and so is text that may
become a stop string or a tool call. Runs on the server's event loop.
"""

from collections.abc import Callable, Sequence

from millrace.core.records import FinishReason

Decode = Callable[[list[int]], str]
_INCOMPLETE = "\ufffd"  # how a decoder shows the bytes of an incomplete character


class TextStream:
    def __init__(
        self, decode: Decode, *, stop: Sequence[str] = (), openers: Sequence[str] = ()
    ) -> None:
        """`openers` start a tool call; the text after the first one is held back to the end."""
        self._decode = decode
        self._stop = tuple(stop)
        self._openers = tuple(openers)
        self._ids: list[int] = []
        # Ids from here are decoded again: a token's text depends on the one before.
        self._context = 0
        self._read = 0  # ids before this are part of `text`
        self.text = ""  # so far
        self._num_returned = 0

    @property
    def held(self) -> str:
        """The text that add() has not returned."""
        return self.text[self._num_returned :]

    def add(self, tokens: Sequence[int], *, finish: FinishReason | None = None) -> str:
        """Add tokens, with `finish` for the last ones. Returns the text that is now certain."""
        self._ids += tokens
        text = self.text + self._decoded_from_read()
        if finish == "stop" and tokens and not any(stop in text for stop in self._stop):
            # The end token ended it, not a stop string; that token is not part of the text.
            text = self.text + self._decoded_from_read(to=len(self._ids) - 1)
        if finish is not None or not text.endswith(_INCOMPLETE):
            ends = [at for stop in self._stop if (at := text.find(stop, self._num_returned)) >= 0]
            self.text = text[: min(ends)] if ends else text
            self._context, self._read = self._read, len(self._ids)
        end = self._num_certain(is_end=finish is not None)
        returned = self.text[self._num_returned : end]
        self._num_returned = max(end, self._num_returned)
        return returned

    def _decoded_from_read(self, *, to: int | None = None) -> str:
        known = self._decode(self._ids[self._context : self._read])
        return self._decode(self._ids[self._context : to])[len(known) :]

    def _num_certain(self, *, is_end: bool) -> int:
        """Return the number of leading characters that no later token can change."""
        opened = [self.text.find(opener, self._num_returned) for opener in self._openers]
        found = min((at for at in opened if at >= 0), default=len(self.text))
        if is_end:
            return found
        awaited = (*self._stop, *self._openers)
        longest = min(max(map(len, awaited), default=1) - 1, found - self._num_returned)
        for length in range(longest, 0, -1):
            if any(each.startswith(self.text[found - length : found]) for each in awaited):
                return found - length
        return found
