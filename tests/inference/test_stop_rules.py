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


def fallback_tokenizer() -> PreTrainedTokenizerFast:
    """Letters, and single bytes for all other characters: also for the end of a line, as in the
    tokenizers of Llama 2 and Mistral. Bytes side by side decode to U+FFFD unless all are valid."""
    letters = "abcdefghijklmnopqrstuvwxyz"
    names = [*(f"<0x{byte:02X}>" for byte in range(256)), *letters]
    vocab = {name: id for id, name in enumerate(names)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], byte_fallback=True))
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


FALLBACK = fallback_tokenizer()


@pytest.mark.parametrize("before", ["", "a", "日", "本日", "a本日本", "b😀😀"])
@pytest.mark.parametrize("stop", ["\n", "\n\n", "\nab", "日\n"])
def test_stop_string_beside_characters_of_several_tokens_is_found(stop: str, before: str):
    stopping = StopRules(FALLBACK, eos_ids=())
    tokens = np.array(FALLBACK.encode(before + stop + "日b"), dtype=np.int32)
    size = len(FALLBACK.encode(before + stop))
    found = [stopping.ends_in_stop_string(tokens[:n], (stop,)) for n in range(len(tokens) + 1)]
    assert found.index(True) == size


@pytest.mark.parametrize("num_earlier", [0, 3, 20])
def test_bytes_after_a_stop_string_do_not_hide_it_in_a_launch(num_earlier: int):
    random, stopping = np.random.default_rng(0), StopRules(FALLBACK, eos_ids=())
    num_found = 0
    for _ in range(40):
        tokens = np.array(FALLBACK.encode("".join(random.choice([*"bc日\n"], 20))), dtype=np.int32)
        for size in range(1, 8):
            launch = tokens[num_earlier : num_earlier + size]
            num_found += launch_stops_at_its_token(stopping, tokens[:num_earlier], launch)
    assert num_found > 20


def launch_stops_at_its_token(stopping: StopRules, earlier: np.ndarray, new: np.ndarray) -> bool:
    """Whether the launch has a stop string; checks that it is found as single steps find it."""
    stop = ("b\n", "\nc")
    sampled = np.concatenate([earlier, new])
    found = [stopping.ends_in_stop_string(sampled[:n], stop) for n in range(len(sampled) + 1)]
    if any(found[: len(earlier) + 1]):
        return False
    count, has_stop = count_until_stop(stopping, earlier, new, stop)
    assert has_stop == any(found)
    assert count == (found.index(True) - len(earlier) if has_stop else len(new))
    return has_stop


def count_until_stop(
    stopping: StopRules, earlier: np.ndarray, new: np.ndarray, stop: tuple[str, ...]
) -> tuple[int, bool]:
    """For a launch that samples `new` in one slot after `earlier`."""
    sampling = Sampling(max_new_tokens=100, stop=stop)
    request = Request(id="a", prompt=np.zeros(1, dtype=np.int32), sampling=sampling)
    (sequence,) = sequences_of(request, first_arrival=0)
    slots = BatchSlots(1, max_context=200)
    chosen = np.array([slots.assign(sequence, num_cached=0)])
    column = earlier[:, None]
    slots.append(chosen, DecodeResult(column, column, np.array([len(earlier)])), version=0)
    launch = DecodeResult(new[:, None], new[:, None], np.array([len(new)]))
    (count,), (has_stop,) = stopping.counts_until_stop(slots, chosen, launch)
    return int(count), bool(has_stop)


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
        earlier, new = tokens[:num_earlier], tokens[num_earlier:]
        count, has_stop = count_until_stop(STOPPING, earlier, new, stop)
        assert has_stop == any(found)
        assert count == (found.index(True) - num_earlier if has_stop else len(new))
