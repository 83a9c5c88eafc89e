"""Text of streamed tokens, compared with the engine's text of all tokens."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from millrace.inference.embedded.scheduling.outputs import StopRules
from millrace.serving.api.streaming import TextStream

TEXTS = ["a", "b", "ab", "é", "→", "🙂", " ", "STOP", "<|end|>"]
STOPS = ["ab", "ba", "STOP", "→ ", "🙂b", "aab"]


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """One token per byte, so that characters arrive in parts; the last token ends a reply."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({name: i for i, name in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<|end|>", special=True)])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>")


TOKENIZER = byte_tokenizer()
EOS = TOKENIZER.eos_token_id


def decode(ids: list[int]) -> str:
    text = TOKENIZER.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
    assert isinstance(text, str)
    return text


def sampled_until_its_end(ids: list[int], stop: tuple[str, ...], stopping: StopRules):
    """The tokens that an engine would sample, and the finish reason."""
    for count in range(1, len(ids) + 1):
        if ids[count - 1] == EOS:
            return ids[:count], "stop"
        if stop and stopping.ends_in_stop_string(np.array(ids[:count]), stop):
            return ids[:count], "stop"
    return ids, "length"


@settings(max_examples=300, deadline=None)
@given(
    words=st.lists(st.sampled_from(TEXTS), min_size=1, max_size=12),
    stop=st.lists(st.sampled_from(STOPS), max_size=2).map(tuple),
    is_cut=st.booleans(),
    size=st.integers(1, 5),
)
def test_joined_parts_equal_the_text_for_any_chunks(words, stop, is_cut, size):
    stopping = StopRules(TOKENIZER, eos_ids=[EOS])
    ids = TOKENIZER.encode("".join(words))
    ids = ids[: len(ids) - is_cut] or ids  # possibly in the middle of a character
    ids, finish = sampled_until_its_end(ids, stop, stopping)
    stream = TextStream(decode, stop=stop)
    parts = []
    for at in range(0, len(ids), size):
        is_last = at + size >= len(ids)
        parts.append(stream.add(ids[at : at + size], finish=finish if is_last else None))
    assert "".join(parts) == stopping.text(np.array(ids), stop)
    assert stream.held == ""
    assert all("\ufffd" not in part for part in parts[:-1])


def test_text_is_returned_as_soon_as_it_is_certain():
    stream = TextStream(decode, stop=("STOP",))
    given_out = [stream.add([token]) for token in TOKENIZER.encode("aé STa")]
    assert given_out == ["a", "", "é", " ", "", "", "STa"]


@pytest.mark.parametrize("end", ["length", None])
def test_text_after_an_opener_is_held_back(end):
    stream = TextStream(decode, openers=("<call>", "{"))
    parts = [stream.add([token]) for token in TOKENIZER.encode("a <b <call>c {")]
    parts.append(stream.add([], finish=end))
    assert "".join(parts) == "a <b "
    assert stream.held == "<call>c {"


def test_chunk_without_tokens_may_finish_the_text():
    stream = TextStream(decode)
    assert stream.add(TOKENIZER.encode("ab")) == "ab"
    assert stream.add([], finish="abort") == ""
