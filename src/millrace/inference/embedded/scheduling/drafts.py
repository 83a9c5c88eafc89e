"""Drafts of a sequence's next tokens, from text that is known.

A draft continues the newest place where the last tokens of the sequence occurred before: in its
prompt, in its own completion, or in another completion of the same prompt, running or ended. Each
token that a sequence samples shows whether a draft would have been right, so the share of right
drafts is known before any draft is computed. The engine's thread calls everything.
"""

from itertools import repeat

import numpy as np

NGRAM = 3  # tokens that must recur
_TOKEN_BITS = 21
_KEY_MASK = (1 << NGRAM * _TOKEN_BITS) - 1
_DECAY = 0.95  # weight of the earlier tokens in a sequence's share of right drafts
_PRIOR_WRONG = 2.0  # wrong drafts that each sequence begins with
_MAX_SHARE = 0.98  # a draft may always be wrong

Place = tuple[list[int], int]  # a text, and where in it


class NgramIndex:
    """The newest place after each n-gram of a prompt and its completions."""

    def __init__(self) -> None:
        self.places: dict[int, Place] = {}
        self.num_tokens = 0  # of the prompt and of ended completions
        self._has_prompt = False
        self._unread: list[np.ndarray] = []

    def put(self, tokens: np.ndarray) -> None:
        """Add a text [N], which read() indexes."""
        self._unread.append(tokens)

    def read(self, prompt: np.ndarray) -> None:
        """Index the prompt [P], if this is the first call, and the texts that were put."""
        if not self._has_prompt:
            self._has_prompt = True
            self._unread.insert(0, prompt)
        unread, self._unread = self._unread, []
        for tokens in unread:
            text, count = tokens.tolist(), len(tokens) - NGRAM
            if count <= 0:
                continue
            keys = np.zeros(count, dtype=np.int64)
            for offset in range(NGRAM):
                keys = keys << _TOKEN_BITS | tokens[offset : offset + count]
            ends = range(NGRAM, len(text))
            self.places.update(zip(keys.tolist(), zip(repeat(text), ends), strict=False))

    def clear(self) -> None:
        self.places.clear()
        self._unread.clear()
        self.num_tokens = 0


class DraftCursor:
    """Follows one sequence through the known text."""

    def __init__(self, index: NgramIndex, prompt: np.ndarray) -> None:
        self.index = index
        self.num_read = len(prompt)
        self._text = prompt[-NGRAM:].tolist()  # and the completion
        self._key = 0
        for token in self._text:
            self._key = (self._key << _TOKEN_BITS | token) & _KEY_MASK
        self._source, self._at = index.places.get(self._key, (None, 0))
        self._num_right, self._num_drafted = 0.0, _PRIOR_WRONG
        self._run = 0  # right drafts since the last wrong one

    @property
    def share(self) -> float:
        """The share of drafted tokens that were right."""
        return min(self._num_right / self._num_drafted, _MAX_SHARE)

    def read(self, tokens: list[int]) -> None:
        """These are the next tokens of the sequence."""
        places, text, key = self.index.places, self._text, self._key
        source, at = self._source, self._at
        for token in tokens:
            if source is not None:
                is_right = source[at] == token
                self._num_right = _DECAY * self._num_right + is_right
                self._num_drafted = _DECAY * self._num_drafted + 1.0
                at += 1
                self._run += 1
                if not is_right:
                    source, self._run = None, 0
            places[key] = text, len(text)
            text.append(token)
            key = (key << _TOKEN_BITS | token) & _KEY_MASK
            if source is None or at >= len(source):
                source, at = places.get(key, (None, 0))
        self.num_read += len(tokens)
        self._key, self._source, self._at = key, source, at

    def draft(self, max_tokens: int) -> list[int]:
        """Draft at most this many next tokens. Text that has long been repeated is likely to be
        repeated longer, so drafts grow with it."""
        if self._source is None:
            return []
        max_tokens = min(max_tokens, 2 + 2 * self._run)
        draft = self._source[self._at : self._at + max_tokens]
        if self._source is self._text:  # text that repeats itself probably continues to do so
            draft = (draft * -(-max_tokens // len(draft)))[:max_tokens]
        return draft
