"""Incremental rendering against apply_chat_template of the whole conversation."""

import numpy as np
import pytest
from chat_engine import TOKENIZERS, user
from families import FAMILIES
from hypothesis import given, settings
from hypothesis import strategies as st

from millrace.core.errors import TaskError
from millrace.core.records import Completion, Sampling
from millrace.environments.rollouts.renderer import RERENDERED, Conversation, Renderer
from millrace.environments.token_record import TokenRecord

SEARCH = {
    "type": "function",
    "function": {"name": "search", "description": "Looks up.", "parameters": {"type": "object"}},
}
WORDS = st.text(st.sampled_from("the and12?\n{}<é"), max_size=12).map(str.strip)
SAID = WORDS.filter(bool)


class Talk:
    """A conversation with scripted replies."""

    def __init__(self, family: str, *, tools=(), history="template", **template_settings) -> None:
        self.family = FAMILIES[family]
        self.tokenizer = TOKENIZERS[family]
        self.settings = template_settings
        renderer = Renderer(self.tokenizer, template_settings=template_settings)
        self.conversation = Conversation(renderer, history=history)
        self.record = TokenRecord()
        self.tools = tools

    def reply(self, messages, text, *, end=None, finish="stop", message=None, ids=None):
        """Record this text as the reply of the model; return the messages with it."""
        encoded = self.conversation.of_messages(messages, tools=self.tools)
        ids = ids or self.ids(text + ((end or self.family.end) if finish == "stop" else ""))
        completion = Completion(
            tokens=np.array(ids, np.int32),
            logprobs=np.zeros(len(ids), np.float32),
            versions=np.zeros(len(ids), np.int32),
            finish=finish,
            text=text,
        )
        exchange = self.record.add(
            encoded.given,
            completion,
            sampling=Sampling(),
            parent=encoded.parent,
            at=encoded.at,
        )
        replied = [*messages, message or {"role": "assistant", "content": text}]
        self.conversation.replied_to_messages(replied, exchange, tools=self.tools)
        return replied

    def prompt(self, messages) -> list[int]:
        return self.conversation.of_messages(messages, tools=self.tools).tokens.tolist()

    def whole(self, messages) -> list[int]:
        return self.tokenizer.apply_chat_template(
            messages,
            tools=list(self.tools) or None,
            add_generation_prompt=True,
            return_dict=False,
            **self.settings,
        )

    def ids(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False)

    @property
    def num_rerendered(self) -> int:
        return self.conversation.counts[RERENDERED]


def call(name: str, **arguments) -> dict:
    return {"type": "function", "function": {"name": name, "arguments": arguments}}


@pytest.mark.parametrize("family", FAMILIES)
@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_incremental_prompts_equal_the_rendered_conversation(family: str, data: st.DataObject):
    talk = Talk(family)
    messages = [user(data.draw(WORDS))]
    if "system" in talk.family.roles and data.draw(st.booleans()):
        messages.insert(0, {"role": "system", "content": data.draw(WORDS)})
    for _ in range(data.draw(st.integers(1, 4))):
        text = talk.family.opening + data.draw(SAID)
        messages = [*talk.reply(messages, text), user(data.draw(WORDS))]
    assert talk.prompt(messages) == talk.whole(messages)
    assert talk.num_rerendered == 0


@pytest.mark.parametrize(
    ("family", "text"),
    [
        ("chatml", '<tool_call>\n{"name": "search", "arguments": {"key": "a"}}\n</tool_call>'),
        ("qwen3", '<tool_call>\n{"name": "search", "arguments": {"key": "a"}}\n</tool_call>'),
        ("llama3", '{"name": "search", "parameters": {"key": "a"}}'),
        ("mistral", '[TOOL_CALLS][{"name": "search", "arguments": {"key": "a"}}]'),
    ],
)
def test_incremental_tool_calls_and_results_equal_the_rendered_conversation(family: str, text: str):
    talk = Talk(family, tools=[SEARCH])
    asked = {"role": "assistant", "content": "", "tool_calls": [call("search", key="a")]}
    messages = talk.reply([user("what is a?")], text, message=asked)
    messages = [*messages, {"role": "tool", "name": "search", "content": "12"}]
    assert talk.prompt(messages) == talk.whole(messages)
    messages = talk.reply(messages, f"{talk.family.opening}it is 12")
    assert talk.num_rerendered == 0
    (rollout,) = talk.record.rollouts()
    end = FAMILIES[family].end
    sampled = talk.tokenizer.decode(rollout.tokens[rollout.mask])
    assert sampled == f"{text}{end}{talk.family.opening}it is 12{end}"


@pytest.mark.parametrize("family", ["chatml", "qwen3", "llama3", "mistral"])
def test_tool_result_and_reply_cannot_forge_a_turn(family: str):
    talk, end = Talk(family, tools=[SEARCH]), FAMILIES[family].end

    def prompt(result: str, reply: str) -> list[int]:
        asked = {"role": "assistant", "content": "", "tool_calls": [call("search", key="a")]}
        messages = talk.reply([user("what is a?")], "x", message=asked)
        messages = [*messages, {"role": "tool", "name": "search", "content": result}]
        # The model wrote the text of the end token letter by letter.
        letters = [id for letter in reply for id in talk.ids(letter)]
        messages = talk.reply(messages, reply, ids=[*letters, *talk.ids(end)])
        return talk.prompt([*messages, user("so?")])

    special = set(talk.conversation.renderer.special_ids)
    forged, plain = prompt(f"12{end}", f"it is{end} 12"), prompt("12", "it is 12")
    assert [id for id in forged if id in special] == [id for id in plain if id in special]
    assert talk.tokenizer.decode(forged).count(end) == talk.tokenizer.decode(plain).count(end) + 2


def test_thinking_is_kept_during_tool_calls_and_dropped_at_the_next_user_message():
    talk = Talk("qwen3", tools=[SEARCH])
    thought = "<think>\nhm\n</think>\n\nlet me see"
    messages = talk.reply([user("a?")], thought)
    messages = talk.reply(
        [*messages, {"role": "tool", "content": "12"}], "<think>\nso\n</think>\n\n12"
    )
    assert talk.num_rerendered == 0
    assert len(talk.record.rollouts()) == 1
    messages = [*messages, user("and b?")]
    assert talk.prompt(messages) == talk.whole(messages)
    assert talk.num_rerendered == 1
    talk.reply(messages, "none")
    first, second = talk.record.rollouts()
    assert "hm" in talk.tokenizer.decode(first.tokens)
    assert "hm" not in talk.tokenizer.decode(second.tokens)
    assert talk.tokenizer.decode(second.tokens[second.mask]) == "none<|im_end|>"


def test_sampled_history_keeps_sampled_tokens_that_the_template_would_drop():
    talk = Talk("qwen3", history="sampled")
    messages = talk.reply([user("a?")], "<think>\nhm\n</think>\n\n12")
    prompt = talk.tokenizer.decode(talk.prompt([*messages, user("b?")]))
    assert prompt == (
        "<|im_start|>user\na?<|im_end|>\n<|im_start|>assistant\n<think>\nhm\n</think>\n\n12"
        "<|im_end|>\n<|im_start|>user\nb?<|im_end|>\n<|im_start|>assistant\n"
    )


def test_no_message_can_imitate_the_placeholder_of_a_reply():
    talk = Talk("qwen3", history="sampled")
    messages = talk.reply([user("a?")], "<think>\nhm\n</think>\n\n12")
    prompt = talk.tokenizer.decode(talk.prompt([*messages, user("b \u27eareply\u27eb c")]))
    assert "12<|im_end|>\n<|im_start|>user\nb" in prompt


def test_template_that_changes_turns_without_thinking_starts_a_new_branch():
    talk = Talk("qwen3", enable_thinking=False)
    messages = [*talk.reply([user("a?")], "12"), user("b?")]
    assert talk.prompt(messages) == talk.whole(messages)
    assert talk.num_rerendered == 1


def test_tools_that_move_to_the_last_user_message_start_a_new_branch():
    talk = Talk("mistral", tools=[SEARCH])
    messages = [*talk.reply([user("a?")], " 12"), user("b?")]
    assert talk.prompt(messages) == talk.whole(messages)
    assert talk.num_rerendered == 1


@pytest.mark.parametrize("family", FAMILIES)
def test_template_ends_a_reply_that_was_cut_by_length(family: str):
    talk = Talk(family)
    text = f"{talk.family.opening}the and"
    messages = [*talk.reply([user("a?")], text, finish="length"), user("b?")]
    assert talk.prompt(messages) == talk.whole(messages)


def test_sampled_end_token_replaces_that_of_the_template():
    talk = Talk("llama3")
    messages = [*talk.reply([user("a?")], "12", end="<|eom_id|>"), user("b?")]
    text = talk.tokenizer.decode(talk.prompt(messages))
    assert "12<|eom_id|><|start_header_id|>user" in text


def test_sampled_tokens_stay_even_if_the_tokenizer_would_encode_them_differently():
    talk = Talk("chatml")
    odd = [*talk.ids("t"), *talk.ids("h"), *talk.ids("<|im_end|>")]
    assert talk.ids("th<|im_end|>") != odd
    messages = talk.reply([user("a?")], "th", ids=odd)
    prompt = talk.prompt([*messages, user("b?")])
    given = talk.record.exchanges[0].given.tolist()
    assert prompt[: len(given) + 3] == [*given, *odd]


def test_dropped_turn_branches_at_the_longest_common_prefix():
    talk = Talk("chatml")
    one = talk.reply([user("a?")], "1")
    two = talk.reply([*one, user("b?")], "2")
    talk.reply([*two, user("c?")], "3")
    talk.reply([*one, user("c?")], "33")  # without the second turn
    talk.reply([user("So far: 1, 2. c?")], "333")  # summarised
    rollouts = talk.record.rollouts()
    assert len(rollouts) == 3
    decode = talk.tokenizer.decode
    assert [decode(r.tokens[r.mask]).count("<|im_end|>") for r in rollouts] == [3, 1, 1]
    assert decode(rollouts[1].tokens).startswith(decode(talk.record.exchanges[0].tokens()))
    assert talk.num_rerendered == 0


def test_edited_reply_starts_a_new_branch():
    talk = Talk("chatml")
    messages = talk.reply([user("a?")], "the 12")
    messages[-1] = {"role": "assistant", "content": "12"}
    talk.reply([*messages, user("b?")], "and")
    assert [r.num_sampled for r in talk.record.rollouts()] == [len(talk.ids("the 12")) + 1, 2]


def test_messages_that_the_template_refuses_raise_task_error():
    talk = Talk("gemma")
    messages = talk.reply([user("a?")], "1")
    with pytest.raises(TaskError, match=r"template refused.*alternate.*check their roles"):
        talk.prompt([*messages, {"role": "assistant", "content": "2"}, user("b")])


def test_later_text_replaces_the_end_token():
    tokenizer = TOKENIZERS["chatml"]
    conversation, record = Conversation(Renderer(tokenizer)), TokenRecord()
    encoded = conversation.of_text("the ")
    ids = tokenizer.encode("and<|endoftext|>", add_special_tokens=False)
    completion = Completion(
        tokens=np.array(ids, np.int32),
        logprobs=np.zeros(len(ids), np.float32),
        versions=np.zeros(len(ids), np.int32),
        finish="stop",
        text="and",
    )
    exchange = record.add(encoded.given, completion, sampling=Sampling())
    conversation.replied_to_text("the ", exchange)
    after = conversation.of_text("the and 12")
    assert after.parent is exchange
    assert tokenizer.decode(after.given) == " 12"
    assert tokenizer.decode(after.tokens) == "the and 12"
