"""The demo's model: a Qwen3 of one million parameters and its tokenizer, created from scratch.

Promise: the directory is an ordinary Hugging Face model directory, and the same seed gives the same
weights on the same machine. Nothing is downloaded.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from millrace.demo.task import NUM_DIGITS
from millrace.demo.warm_start import careless_examples, warm_start

PAD, EOS = "<pad>", "<eos>"
PAD_ID, EOS_ID = 0, 1
PIECES = ("sort ", "=", *"0123456789")
NUM_EXAMPLES = 12_800  # enough to answer in the right form, too few to sort well


def make_model(
    directory: str | Path,
    seed: int,
    *,
    num_examples: int = NUM_EXAMPLES,
    num_digits: Sequence[int] = NUM_DIGITS,
    on_step: Callable[[int, float], None] | None = None,
) -> None:
    """Create the model, warm it up and save it, with its tokenizer, to `directory`."""
    tokenizer = build_tokenizer()
    model = build_model(tokenizer, seed=seed)
    with _one_thread():
        examples = careless_examples(num_examples, seed=seed, num_digits=num_digits)
        warm_start(model, tokenizer, examples=examples, on_step=on_step)
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)


def build_tokenizer(pieces: Sequence[str] = PIECES) -> PreTrainedTokenizerFast:
    """One token for the instruction, one for each other character; PAD_ID and EOS_ID come first."""
    vocabulary = {piece: number for number, piece in enumerate((PAD, EOS, *pieces))}
    tokenizer = Tokenizer(models.WordLevel(vocabulary))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("sort |."), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=EOS,
        padding_side="left",
        model_max_length=512,
        clean_up_tokenization_spaces=False,
    )


def build_model(tokenizer: PreTrainedTokenizerFast, *, seed: int, **sizes: int) -> Qwen3ForCausalLM:
    """An untrained model of about 1M parameters, or with other `sizes`."""
    shape: dict[str, Any] = {
        "hidden_size": 128,
        "intermediate_size": 512,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "max_position_embeddings": 512,
        **sizes,
    }
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=EOS_ID,
        pad_token_id=PAD_ID,
        **shape,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen3ForCausalLM(config)
    model.generation_config = GenerationConfig(eos_token_id=EOS_ID, pad_token_id=PAD_ID)
    return model


@contextmanager
def _one_thread() -> Iterator[None]:
    """One thread: a small model gains little from more, and its weights must be reproducible."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
