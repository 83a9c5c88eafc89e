"""A tiny chat model: its tokens are the ASCII characters, with their codes as ids."""

from pathlib import Path

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

IM_START, IM_END = 1, 2  # IM_END ends a reply
TEMPLATE = (
    "{%- if tools %}<|im_start|>system\n"
    "{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}<|im_end|>\n{% endif %}"
    "{%- for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<tool_call>"
    '{{ {"name": c.function.name, "arguments": c.function.arguments} | tojson }}</tool_call>'
    "{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{{ prefix or '' }}{% endif %}"
)


def chat_tokenizer() -> PreTrainedTokenizerFast:
    names = [chr(i) if i in (9, 10) or 32 <= i < 127 else f"<{i}>" for i in range(128)]
    names[0], names[IM_START], names[IM_END] = "<pad>", "<|im_start|>", "<|im_end|>"
    vocab = {name: id for id, name in enumerate(names)}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([AddedToken(names[i], special=True) for i in (IM_START, IM_END)])
    made = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<pad>"
    )
    made.chat_template = TEMPLATE
    return made


def make_chat_model(
    directory: Path,
    *,
    max_context: int = 512,
    initializer_range: float = 0.02,
    tokenizer: PreTrainedTokenizerFast | None = None,
) -> Path:
    """With a small range, all tokens are about as likely whatever an adapter learns, because the
    embeddings are the head. `tokenizer` replaces that of characters."""
    tokenizer = tokenizer or chat_tokenizer()
    tokenizer.save_pretrained(directory)
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=max_context,
        initializer_range=initializer_range,
        tie_word_embeddings=True,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
    )
    Qwen3ForCausalLM(config).save_pretrained(directory)
    return directory
