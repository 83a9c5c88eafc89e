"""A small ChatML model that can call a tool, but mostly answers GUESS instead."""

import random
from pathlib import Path

import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from millrace.demo.model import Example, build_model, warm_start

LETTERS, DIGITS = "bcdfghjk", "0123456789"
CALL_SHARE = 0.2  # of the warm-start examples
GUESS = "000"  # the answer of the other examples
NUM_EXAMPLES = 9600
_CALL_OPEN = '<tool_call>\n{"name": "lookup", "arguments": {"key": "'
_CALL_CLOSE = '"}}\n</tool_call>'
_RESULT_OPEN, _RESULT_CLOSE = "<tool_response>\n", "\n</tool_response>"
_FORMAT = (_CALL_OPEN, _CALL_CLOSE, _RESULT_OPEN, _RESULT_CLOSE)
_PIECES = ("user\n", "assistant\n", *_FORMAT, "\n", *LETTERS, *DIGITS)
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
    """One token for each piece of the format, and one for each other character."""
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
    """Turns that mostly guess, and sometimes call the tool and then repeat its result."""
    rng = random.Random(seed)
    found: list[Example] = []
    while len(found) < num:
        key, value = "".join(rng.choices(LETTERS, k=3)), "".join(rng.choices(DIGITS, k=3))
        question = f"<|im_start|>user\n{key}<|im_end|>\n<|im_start|>assistant\n"
        if rng.random() >= CALL_SHARE:
            found.append((question, GUESS))
            continue
        call = f"{_CALL_OPEN}{key}{_CALL_CLOSE}"
        result = f"<|im_end|>\n<|im_start|>user\n{_RESULT_OPEN}{value}{_RESULT_CLOSE}<|im_end|>\n"
        after_call = f"{question}{call}{result}<|im_start|>assistant\n"
        found += [(question, call), (after_call, value)]
    return found
