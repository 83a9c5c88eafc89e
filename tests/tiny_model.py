"""A model small enough for tests, in Hugging Face format; one token per character."""

from pathlib import Path

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from tokenizers.decoders import Fuse
from transformers import (
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

ALPHABET = "0123456789+-*= abcdefghij"


def make_tiny_model(
    directory: Path,
    *,
    seed: int = 0,
    max_context: int = 128,
    alphabet: str = ALPHABET,
    num_experts: int = 0,
    head_dim: int = 8,
) -> Path:
    """With `num_experts` a mixture, two of which see each token."""
    vocab = {"<pad>": 0, "<eos>": 1, **{c: i + 2 for i, c in enumerate(alphabet)}}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = Fuse()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<eos>", pad_token="<pad>"
    ).save_pretrained(directory)
    torch.manual_seed(seed)
    shape = {
        "vocab_size": len(vocab),
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": head_dim,
        "max_position_embeddings": max_context,
        "tie_word_embeddings": True,
        "eos_token_id": 1,
        "pad_token_id": 0,
        "bos_token_id": None,
    }
    if num_experts:
        experts = {"num_experts": num_experts, "num_experts_per_tok": 2}
        config = Qwen3MoeConfig(**shape, **experts, moe_intermediate_size=16)
        Qwen3MoeForCausalLM(config).save_pretrained(directory)
    else:
        Qwen3ForCausalLM(Qwen3Config(**shape)).save_pretrained(directory)
    return directory
