"""Stop strings over a tokenizer whose tokens are single bytes, so that characters span tokens."""

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from millrace.core.records import Request, Sampling
from millrace.inference.embedded.scheduling.batch_slots import BatchSlots
from millrace.inference.embedded.scheduling.outputs import StopRules
from millrace.inference.embedded.scheduling.sequence import DecodeResult, sequences_of

EOS = 256


def byte_tokenizer() -> PreTrainedTokenizerFast:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {letter: id for id, letter in enumerate(alphabet)} | {"<eos>": EOS}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>")


TOKENIZER = byte_tokenizer()
STOPPING = StopRules(TOKENIZER, eos_ids=(EOS,))


def tokens_of(text: str) -> np.ndarray:
    return np.array(TOKENIZER.encode(text), dtype=np.int32)


def first_stop(text: str, stop: tuple[str, ...]) -> int | None:
    """How many tokens were sampled when the stop string was noticed."""
    tokens = tokens_of(text)
    for count in range(1, len(tokens) + 1):
        if STOPPING.ends_in_stop_string(tokens[:count], stop):
            return count
    return None


@pytest.mark.parametrize("stop", ["x", "aé!", "日本", "\n\nQ:", " end "])
@pytest.mark.parametrize("before", ["", "é" * 40, "some words, "])
def test_stop_string_is_found_with_its_last_byte(before: str, stop: str):
    text = f"{before}{stop}after"
    assert first_stop(text, ("zzz", stop)) == len((before + stop).encode())
    assert STOPPING.text(tokens_of(before + stop), (stop,)) == before


def test_stop_string_with_leading_space_is_found():
    letters = ["▁", *"abcdefghijklmnopqrstuvwxyz"]
    tokenizer = Tokenizer(
        models.WordLevel({name: id for id, name in enumerate(letters)}, unk_token="▁")
    )
    tokenizer.decoder = decoders.Metaspace()
    stopping = StopRules(PreTrainedTokenizerFast(tokenizer_object=tokenizer), eos_ids=())
    tokens = np.array([letters.index(letter) for letter in "▁the▁end"], dtype=np.int32)
    assert not stopping.ends_in_stop_string(tokens[:-1], (" end",))
    assert stopping.ends_in_stop_string(tokens, (" end",))
    assert stopping.text(tokens, (" end",)) == "the"


def test_half_a_character_does_not_match():
    tokens = tokens_of("日")
    assert not STOPPING.ends_in_stop_string(tokens[:2], ("日",))
    assert STOPPING.ends_in_stop_string(tokens, ("日",))


def test_text_ends_at_earliest_stop_string():
    assert STOPPING.text(tokens_of("one two three"), ("three", "two")) == "one "


def test_only_a_final_eos_is_removed_from_text():
    tokens = np.append(tokens_of("done"), EOS)
    assert STOPPING.text(tokens, ()) == "done"
    assert STOPPING.text(np.append(tokens, tokens_of("x")), ()) == "done<eos>x"
    assert STOPPING.text(np.empty(0, dtype=np.int32), ()) == ""


@pytest.mark.parametrize("stop", [("b日",), ("éa", "日日"), ("zz",), ("\ufffd",)])
@pytest.mark.parametrize("num_earlier", [0, 1, 30])
def test_stop_string_in_a_launch_is_found_at_its_token(stop: tuple[str, ...], num_earlier: int):
    random = np.random.default_rng(num_earlier)
    for _ in range(20):
        text = "".join(random.choice([*"abcé日"], 40))
        tokens = tokens_of(text)[: num_earlier + 24]
        found = [STOPPING.ends_in_stop_string(tokens[:n], stop) for n in range(len(tokens) + 1)]
        if any(found[: num_earlier + 1]):
            continue
        sampling = Sampling(max_new_tokens=100, stop=stop)
        request = Request(id="a", prompt=tokens[:1], sampling=sampling)
        (sequence,) = sequences_of(request, first_arrival=0)
        slots = BatchSlots(1, max_context=200)
        chosen = np.array([slots.assign(sequence, num_cached=0)])
        earlier, new = tokens[:num_earlier, None], tokens[num_earlier:, None]
        slots.append(chosen, DecodeResult(earlier, earlier, np.array([num_earlier])), version=0)
        launch = DecodeResult(new, new, np.array([len(new)]))
        (count,), (has_stop,) = STOPPING.counts_until_stop(slots, chosen, launch)
        assert has_stop == any(found)
        assert count == (found.index(True) - num_earlier if has_stop else len(new))
