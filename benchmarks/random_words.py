"""A tokenizer with as many ids as a model with random weights, so that its samples have a text."""

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast


def word_tokenizer(vocab_size: int, *, ends: bool = True) -> PreTrainedTokenizerFast:
    """Bytes and random words, none of which ends a JSON string. Text without spaces has a token per
    character. Without `ends`, the id of the eos token is one that the model cannot sample."""
    names = sorted(pre_tokenizers.ByteLevel.alphabet())
    random = np.random.default_rng(0)
    words = dict.fromkeys(["<eos>", *names] if ends else names)
    while len(words) < vocab_size:
        letters = random.integers(97, 123, random.integers(2, 9)).astype(np.uint8)
        words.setdefault("Ġ" * int(random.integers(2)) + letters.tobytes().decode())
    kept = [*words][:vocab_size]
    vocabulary = {word: id for id, word in enumerate(kept if ends else [*kept, "<eos>"])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<eos>", pad_token="<eos>" if ends else names[0]
    )
