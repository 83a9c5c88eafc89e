"""Small tokenizers with the chat formats of the common model families.

The templates are written from the public descriptions of these formats, as short as they can be.
"""

from dataclasses import dataclass

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

_MERGES = [("t", "h"), ("th", "e"), ("Ġ", "a"), ("Ċ", "Ċ"), ("1", "2"), ("a", "n"), ("an", "d")]

_TOOLS_OF_CHATML = (
    "{% if tools %}<|im_start|>system\n{% if messages[0].role == 'system' %}"
    "{{ messages[0].content }}\n\n{% endif %}# Tools\n<tools>"
    "{% for tool in tools %}\n{{ tool | tojson }}{% endfor %}\n</tools><|im_end|>\n"
    "{% elif messages[0].role == 'system' %}<|im_start|>system\n{{ messages[0].content }}"
    "<|im_end|>\n{% endif %}"
)
_CALLS_OF_CHATML = (
    "{% for call in message.tool_calls or [] %}"
    "{% if not loop.first or message.content %}\n{% endif %}<tool_call>\n"
    '{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}'
    "\n</tool_call>{% endfor %}"
)
_RESULTS_OF_CHATML = (
    "{% if loop.first or messages[loop.index0 - 1].role != 'tool' %}<|im_start|>user{% endif %}"
    "\n<tool_response>\n{{ message.content }}\n</tool_response>"
    "{% if loop.last or messages[loop.index0 + 1].role != 'tool' %}<|im_end|>\n{% endif %}"
)

CHATML = (
    _TOOLS_OF_CHATML + "{% for message in messages %}"
    "{% if message.role == 'tool' %}" + _RESULTS_OF_CHATML + "{% elif message.role != 'system' %}"
    "<|im_start|>{{ message.role }}\n{{ message.content }}" + _CALLS_OF_CHATML + "<|im_end|>\n"
    "{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

# Thinking is shown only since the last question of the user, and none can be asked for.
QWEN3 = (
    "{% set ns = namespace(last=0) %}{% for message in messages %}"
    "{% if message.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
    + _TOOLS_OF_CHATML
    + "{% for message in messages %}{% if message.role == 'tool' %}"
    + _RESULTS_OF_CHATML
    + "{% elif message.role == 'assistant' %}"
    "{% set text, thought = message.content or '', '' %}"
    "{% if '</think>' in text %}"
    "{% set thought = text.split('</think>')[0].split('<think>')[-1].strip('\\n') %}"
    "{% set text = text.split('</think>')[-1].lstrip('\\n') %}{% endif %}"
    "<|im_start|>assistant\n{% if thought and loop.index0 > ns.last %}<think>\n{{ thought }}\n"
    "</think>\n\n{% endif %}{{ text }}" + _CALLS_OF_CHATML + "<|im_end|>\n"
    "{% elif message.role != 'system' %}<|im_start|>user\n{{ message.content }}<|im_end|>\n"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}"
    "{% endif %}"
)

LLAMA3 = (
    "<|begin_of_text|>{% for message in messages %}"
    "{% set role = 'ipython' if message.role == 'tool' else message.role %}"
    "<|start_header_id|>{{ role }}<|end_header_id|>\n\n"
    "{% if tools and loop.first %}Functions: {{ tools | tojson }}\n\n{% endif %}"
    "{% if message.tool_calls %}{% if message.tool_calls | length != 1 %}"
    "{{ raise_exception('one call at a time') }}{% endif %}"
    '{"name": "{{ message.tool_calls[0].function.name }}", "parameters": '
    "{{ message.tool_calls[0].function.arguments | tojson }}}"
    "{% else %}{{ message.content | trim }}{% endif %}<|eot_id|>{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)

GEMMA = (
    "<bos>{% if messages[0].role == 'system' %}"
    "{% set intro, rows = messages[0].content + '\\n\\n', messages[1:] %}{% else %}"
    "{% set intro, rows = '', messages %}{% endif %}"
    "{% for message in rows %}{% if (message.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('user and assistant must alternate') }}{% endif %}"
    "<start_of_turn>{{ 'model' if message.role == 'assistant' else message.role }}\n"
    "{{ intro if loop.first else '' }}{{ message.content | trim }}<end_of_turn>\n{% endfor %}"
    "{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
)

MISTRAL = (
    "{% set asked = messages | selectattr('role', 'equalto', 'user') | list %}"
    "<s>{% for message in messages %}{% if message.role == 'user' %}"
    "{% if tools and message == asked[-1] %}[AVAILABLE_TOOLS]{{ tools | tojson }}[/AVAILABLE_TOOLS]"
    "{% endif %}[INST] {{ message.content }}[/INST]"
    "{% elif message.role == 'tool' %}[TOOL_RESULTS]"
    '{"content": {{ message.content | tojson }}}[/TOOL_RESULTS]'
    "{% elif message.tool_calls %}[TOOL_CALLS][{% for call in message.tool_calls %}"
    '{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}'
    "{{ '' if loop.last else ', ' }}{% endfor %}]</s>"
    "{% elif message.role == 'assistant' %} {{ message.content | trim }}</s>"
    "{% else %}{{ raise_exception('no role ' + message.role) }}{% endif %}{% endfor %}"
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Family:
    template: str
    specials: tuple[str, ...]
    end: str  # what the model ends its turn with
    roles: frozenset[str] = frozenset({"system", "tool"})  # besides user and assistant
    opening: str = ""  # what the model itself writes first


FAMILIES = {
    "chatml": Family(
        template=CHATML, specials=("<|im_start|>", "<|im_end|>", "<|endoftext|>"), end="<|im_end|>"
    ),
    "qwen3": Family(
        template=QWEN3, specials=("<|im_start|>", "<|im_end|>", "<|endoftext|>"), end="<|im_end|>"
    ),
    "llama3": Family(
        template=LLAMA3,
        specials=(
            "<|begin_of_text|>",
            "<|start_header_id|>",
            "<|end_header_id|>",
            "<|eot_id|>",
            "<|eom_id|>",
            "<|python_tag|>",
        ),
        end="<|eot_id|>",
    ),
    "gemma": Family(
        template=GEMMA,
        specials=("<bos>", "<start_of_turn>", "<end_of_turn>"),
        end="<end_of_turn>",
        roles=frozenset({"system"}),
    ),
    "mistral": Family(
        template=MISTRAL,
        specials=(
            "<s>",
            "</s>",
            "[INST]",
            "[/INST]",
            "[TOOL_CALLS]",
            "[TOOL_RESULTS]",
            "[/TOOL_RESULTS]",
            "[AVAILABLE_TOOLS]",
            "[/AVAILABLE_TOOLS]",
        ),
        end="</s>",
        roles=frozenset({"tool"}),
        opening=" ",
    ),
}


def tokenizer_of(family: Family) -> PreTrainedTokenizerFast:
    """Bytes, a few merges, and the family's special tokens."""
    pieces = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *("".join(pair) for pair in _MERGES)]
    vocabulary = {piece: number for number, piece in enumerate(pieces)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=_MERGES))
    # Newlines stand apart, as in the tokenizers of these families: a prompt that ends with them is
    # tokenised as it is with a reply behind it.
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r"\n+"), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in family.specials])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=family.end,
        # Jinja drops newlines behind its tags.
        chat_template=family.template.replace("\n", "{{ '\\n' }}"),
        clean_up_tokenization_spaces=False,
    )
