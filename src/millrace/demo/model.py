"""The demo's model: a Qwen3 of one million parameters and its tokenizer, created from scratch.

Promise: the directory is an ordinary Hugging Face model directory, and the same seed gives the same
weights on the same machine. Nothing is downloaded.

In a short supervised start, the model imitates a careless teacher, who sorts the number in 30 % of
the examples and hands it back unsorted in the others. So the model learns the format (digits, as
many as were given, then the end) and two habits: a weak one to sort and a stronger one to copy. If
the likeliest token is picked, it mostly copies. It sorts badly, since few examples show how.

What reinforcement learning adds: no example says which habit is right, only the reward does. It has
to find that sorting pays, and then to sort far more reliably than the examples taught.
"""

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    GenerationConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from millrace.demo.task import NUM_DIGITS, make_tasks

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
    shape: dict[str, Any] = {"hidden_size": 128, "intermediate_size": 512, "num_hidden_layers": 4}
    shape |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}
    shape |= {"max_position_embeddings": 512, "tie_word_embeddings": True, **sizes}
    special = {"bos_token_id": None, "eos_token_id": EOS_ID, "pad_token_id": PAD_ID}
    config = Qwen3Config(vocab_size=len(tokenizer), **special, **shape)
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


SORTED_SHARE = 0.3  # of the examples
IGNORED = -100  # label of prompt tokens, which are not predicted

Example = tuple[str, str]  # prompt, answer


def careless_examples(
    num: int, seed: int, *, num_digits: Sequence[int] = NUM_DIGITS
) -> list[Example]:
    """The teacher's examples: some numbers sorted, more of them left as they were."""
    rng = random.Random(seed)
    examples = []
    for task in make_tasks(num, seed=seed, num_digits=num_digits):
        unsorted = task["prompt"].removeprefix("sort ").removesuffix("=")
        examples.append(
            (task["prompt"], task["answer"] if rng.random() < SORTED_SHARE else unsorted)
        )
    return examples


def warm_start(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    *,
    examples: Sequence[Example],
    batch_size: int = 32,
    learning_rate: float = 1e-3,
    on_step: Callable[[int, float], None] | None = None,
) -> None:
    """Train in place, once through the examples; `on_step` gets each step's number and loss."""
    num_steps = len(examples) // batch_size
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, learning_rate, total_steps=num_steps, pct_start=0.1, anneal_strategy="linear"
    )
    model.train()
    for step in range(num_steps):
        batch = examples[step * batch_size : (step + 1) * batch_size]
        loss = _imitation_loss(model, tokenizer, batch)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if on_step is not None:
            on_step(step + 1, loss.item())
    model.eval()


def _imitation_loss(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, batch: Sequence[Example]
) -> torch.Tensor:
    """Mean cross-entropy of the answers and the end token, given the prompts."""
    sequences = [
        (tokenizer.encode(prompt), tokenizer.encode(f"{answer}{tokenizer.eos_token}"))
        for prompt, answer in batch
    ]
    length = max(len(prompt) + len(answer) for prompt, answer in sequences)
    tokens_BL = torch.zeros(len(batch), length, dtype=torch.int64)
    labels_BL = torch.full((len(batch), length), IGNORED)
    for row, (prompt, answer) in enumerate(sequences):
        end = len(prompt) + len(answer)
        tokens_BL[row, :end] = torch.tensor(prompt + answer)
        labels_BL[row, len(prompt) : end] = torch.tensor(answer)
    # Padding is on the right, which causal attention never sees, so it needs no mask.
    return model(input_ids=tokens_BL, labels=labels_BL, use_cache=False).loss
