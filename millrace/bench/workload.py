"""A workload with long-tailed completion lengths, made on the spot.

A model with random weights ends a completion with about the same small chance at each token, so
lengths are geometric: most are short, a few run to the limit. A tiny learning rate keeps it so for
the whole run, which makes two runs comparable whatever they learn.
"""

import string
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

PAD, EOS = 0, 1  # token ids


def make_long_tailed_model(directory: Path, *, seed: int) -> None:
    """About 1M parameters; the vocabulary's size sets the mean length, since eos is one token of
    it."""
    tokenizer = _tokenizer()
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        eos_token_id=EOS,
        pad_token_id=PAD,
        bos_token_id=None,
    )
    Qwen3ForCausalLM(config).save_pretrained(directory)
    tokenizer.save_pretrained(directory)


def _tokenizer() -> PreTrainedTokenizerFast:
    """One token per letter and digit, pad and eos: 64 in all."""
    characters = string.ascii_letters + string.digits
    vocabulary = {piece: i for i, piece in enumerate(["<pad>", "<eos>", *characters])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>")


def distinct_share(completions: list[str], **columns: object) -> list[float]:
    """A reward that costs nothing and is rarely the same for two completions."""
    return [len(set(text)) / (len(text) + 1) for text in completions]
