"""The sum that GPUs use, computed here on the host; it is the same torch code there."""

import pytest
import torch

from millrace.weights.packing import checksum, word_sum


def payload(num_words: int, *, seed: int = 0) -> torch.Tensor:
    draw = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (num_words * 4,), generator=draw, dtype=torch.uint8)


@pytest.mark.parametrize("num_words", [1, 7, 4096, 4097, 3 * 4096 + 5])
def test_every_changed_bit_changes_the_sum(num_words: int):
    sound = payload(num_words)
    total = word_sum(sound)
    for position in range(0, len(sound), max(1, len(sound) // 50)):
        for bit in range(8):
            damaged = sound.clone()
            damaged[position] ^= 1 << bit
            assert word_sum(damaged) != total


@pytest.mark.parametrize(("first", "second"), [(0, 1), (0, 4096), (5, 4096 + 5), (1, 9000)])
def test_exchanged_words_change_the_sum(first: int, second: int):
    words = torch.arange(1, 9002, dtype=torch.int32)
    total = word_sum(words.view(torch.uint8))
    words[first], words[second] = words[second].item(), words[first].item()
    assert word_sum(words.view(torch.uint8)) != total


@pytest.mark.parametrize("num_bytes", [1, 2, 3, 4 * 4096 + 2])
def test_payload_of_half_a_word_has_a_checksum(num_bytes: int):
    sound = payload(4097)[:num_bytes]
    damaged = sound.clone()
    damaged[-1] ^= 1
    assert word_sum(damaged) != word_sum(sound)


def test_empty_payload_has_a_checksum():
    empty = torch.empty(0, dtype=torch.uint8)
    assert word_sum(empty) == 0
    assert checksum(empty) == checksum(empty.clone())


def test_the_sum_wraps_instead_of_overflowing():
    full = torch.full((8 * 4096,), 255, dtype=torch.uint8)
    assert 0 <= word_sum(full) < 2**64


@pytest.mark.gpu
@pytest.mark.parametrize("num_words", [1, 4095, 4096, 4096 * 63 + 5, 4096 * 64, 4096 * 1000 + 17])
def test_the_kernel_gives_the_sum_of_the_plain_code(num_words):
    words = torch.randint(-(2**31), 2**31, (num_words,), dtype=torch.int32)
    on_host = words.view(torch.uint8)
    assert word_sum(on_host.cuda()) == word_sum(on_host)
