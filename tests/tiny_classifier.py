"""A classification model small enough for tests, in Hugging Face format, with random weights."""

from pathlib import Path
from typing import Literal

import torch
from tiny_model import make_tiny_model
from transformers import (
    AutoConfig,
    BertConfig,
    BertForSequenceClassification,
    BertForTokenClassification,
    Qwen3ForSequenceClassification,
    Qwen3ForTokenClassification,
)


def make_tiny_classifier(
    directory: Path,
    *,
    head: Literal["sequence", "token"],
    num_labels: int = 1,
    architecture: Literal["qwen3", "bert"] = "qwen3",
    seed: int = 0,
) -> Path:
    """With the tokenizer of the tiny model."""
    make_tiny_model(directory, seed=seed)
    if architecture == "bert":
        config = BertConfig(
            vocab_size=AutoConfig.from_pretrained(directory).vocab_size,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            max_position_embeddings=64,
            num_labels=num_labels,
        )
        cls = BertForTokenClassification if head == "token" else BertForSequenceClassification
    else:
        config = AutoConfig.from_pretrained(directory)
        config.num_labels = num_labels
        cls = Qwen3ForTokenClassification if head == "token" else Qwen3ForSequenceClassification
    torch.manual_seed(seed)
    (directory / "model.safetensors").unlink()
    cls(config).save_pretrained(directory)
    return directory
