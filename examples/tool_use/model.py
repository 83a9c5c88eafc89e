"""A small model that talks ChatML and knows how a tool is called, but mostly says GUESS instead."""

import random
from pathlib import Path

import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from millrace.demo.model import build_model
from millrace.demo.warm_start import Example, warm_start

LETTERS, DIGITS = "bcdfghjk", "0123456789"
CALLS = 0.2  # how often the teacher asks the tool
GUESS = "000"  # what it says otherwise
NUM_EXAMPLES = 9600
_CALL, _CALLED = '<tool_call>\n{"name": "lookup", "arguments": {"key": "', '"}}\n</tool_call>'
_RESULT, _RESULTED = "<tool_response>\n", "\n</tool_response>"
_PIECES = ("user\n", "assistant\n", _CALL, _CALLED, _RESULT, _RESULTED, "\n", *LETTERS, *DIGITS)
_TEMPLATE = """\
{%- for message in messages %}
    {%- if message.role == "tool" %}
        {{- "<|im_start|>user\\n<tool_response>\\n" + message.content + "\\n</tool_response>" }}
    {%- else %}
        {{- "<|im_start|>" + message.role + "\\n" + message.content }}
        {%- for call in message.tool_calls or [] %}
            {{- '<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
            {{- call.function.arguments | tojson + "}\\n</tool_call>" }}
        {%- endfor %}
    {%- endif %}
    {{- "<|im_end|>\\n" }}
{%- endfor %}
{%- if add_generation_prompt %}{{ "<|im_start|>assistant\\n" }}{% endif %}"""


def make_model(directory: Path, *, seed: int, num_examples: int = NUM_EXAMPLES) -> None:
    tokenizer = build_tokenizer()
    model = build_model(tokenizer, seed=seed)
    torch.set_num_threads(1)
    warm_start(model, tokenizer, examples=_examples(num_examples, seed=seed))
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)


def build_tokenizer() -> PreTrainedTokenizerFast:
    """One token for each mark of the format, one for each other character."""
    names = ["<pad>", "<|im_end|>", "<|im_start|>", *_PIECES]
    core = Tokenizer(models.WordLevel({n: i for i, n in enumerate(names)}, unk_token="<pad>"))
    marks = "|".join(_escaped(piece) for piece in _PIECES if len(piece) > 1)
    core.pre_tokenizer = pre_tokenizers.Split(Regex(f"{marks}|[\\s\\S]"), behavior="isolated")
    core.decoder = decoders.Fuse()
    core.add_special_tokens([AddedToken(name, special=True) for name in names[:3]])
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token="<pad>",
        eos_token="<|im_end|>",
        unk_token="<pad>",
        chat_template=_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )


def _escaped(piece: str) -> str:
    return "".join(rf"\{char}" if char in '|{}"<>/:' else char for char in piece)


def _examples(num: int, *, seed: int) -> list[Example]:
    """Turns of a teacher that asks the tool now and then, and then says what it said."""
    rng = random.Random(seed)
    found: list[Example] = []
    while len(found) < num:
        key, value = "".join(rng.choices(LETTERS, k=3)), "".join(rng.choices(DIGITS, k=3))
        asked = f"<|im_start|>user\n{key}<|im_end|>\n<|im_start|>assistant\n"
        if rng.random() >= CALLS:
            found.append((asked, GUESS))
            continue
        call = f"{_CALL}{key}{_CALLED}"
        told = f"<|im_end|>\n<|im_start|>user\n{_RESULT}{value}{_RESULTED}<|im_end|>\n"
        found += [(asked, call), (f"{asked}{call}{told}<|im_start|>assistant\n", value)]
    return found
