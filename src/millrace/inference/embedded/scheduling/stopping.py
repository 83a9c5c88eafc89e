"""When a completion ends, and the text it leaves.

An eos token or a stop string ends it with "stop"; max_new_tokens or the context's end, "length".
The tokens keep everything that was sampled; the text leaves out the eos token and what begins with
the stop string.
"""

from collections.abc import Sequence

import numpy as np
from transformers import PreTrainedTokenizerBase

# Tokens at the cut of a tail may decode differently than in place (half a character, a lost space).
_TAIL_MARGIN = 4


class Stopping:
    def __init__(self, tokenizer: PreTrainedTokenizerBase, *, eos_ids: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._eos_ids = np.array(sorted(eos_ids), dtype=np.int64)

    def is_eos(self, tokens: np.ndarray) -> np.ndarray:
        """[N] bool for tokens [N]."""
        return (tokens[:, None] == self._eos_ids).any(axis=1)

    def ends_in_stop_string(self, sampled: np.ndarray, stop: tuple[str, ...]) -> bool:
        """True if the sampled tokens [N], checked after each of them, now contain a stop string."""
        # A token decodes to at least one byte, so no stop string reaches back further than this.
        reach = max(len(text.encode()) for text in stop) + _TAIL_MARGIN
        tail = self._decode(sampled[-reach:])
        if not any(text in tail for text in stop):
            return False
        whole = tail if len(sampled) <= reach else self._decode(sampled)
        return any(text in whole for text in stop)

    def text(self, sampled: np.ndarray, stop: tuple[str, ...]) -> str:
        """The sampled tokens [N] as text, up to the first stop string."""
        if len(sampled) and self.is_eos(sampled[-1:])[0]:
            sampled = sampled[:-1]
        text = self._decode(sampled)
        ends = [at for at in (text.find(s) for s in stop) if at >= 0]
        return text[: min(ends)] if ends else text

    def _decode(self, tokens: np.ndarray) -> str:
        # Special tokens stay in: a stop string may well be one.
        text = self._tokenizer.decode(
            tokens.tolist(), skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
        assert isinstance(text, str)
        return text
