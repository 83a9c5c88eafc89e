"""Examples of supervised fine-tuning: which tokens are trained, in which sequences and batches."""

import numpy as np
import pytest
from chat_engine import TOKENIZERS, user
from fake_checkpoint import write_fake_checkpoint
from families import FAMILIES
from transformers import AutoTokenizer

from millrace.config import load_config
from millrace.core.errors import ConfigError, TaskError
from millrace.environments.rollouts.renderer import Renderer
from millrace.run.sft.examples import ExampleEncoder, SupervisedData, check_examples
from millrace.run.sft.execute import prepare_sft
from millrace.tasks.loading import load_tasks

# As Qwen3: the thinking of earlier turns is left out.
FORGETFUL = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' and loop.last %}<think>{{ m.content | length }}</think>{% endif %}"
    "{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def assistant(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


CALL = {
    "role": "assistant",
    "tool_calls": [{"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}],
}
CHAT = [user("one"), assistant("two"), user("three"), assistant("four")]


def encoded(tokenizer, row: dict, *, max_tokens: int = 1000, eos_id: int | None = None):
    """Tokens and trained tokens of each sequence, and how many were cut."""
    (task,) = load_tasks([row])
    encoder = ExampleEncoder(Renderer(tokenizer), eos_id=eos_id, max_tokens=max_tokens)
    group, num_cut = encoder.encode(task, number=0)
    return [(r.tokens.tolist(), r.tokens[r.mask].tolist()) for r in group.rollouts], num_cut


@pytest.mark.parametrize("family", FAMILIES)
def test_assistant_turns_and_their_ends_are_trained_within_the_whole_conversation(family):
    tokenizer, begin, end = TOKENIZERS[family], FAMILIES[family].opening, FAMILIES[family].end
    ((tokens, trained),), _ = encoded(tokenizer, {"messages": CHAT})
    whole = tokenizer.apply_chat_template(CHAT, tokenize=False)
    assert tokens == tokenizer.encode(whole, add_special_tokens=False)
    assert tokenizer.decode(trained) == f"{begin}two{end}{begin}four{end}"


def test_turns_that_the_template_renders_differently_later_are_sequences_of_their_own():
    tokenizer = TOKENIZERS["chatml"]
    before, tokenizer.chat_template = tokenizer.chat_template, FORGETFUL
    try:
        sequences, _ = encoded(tokenizer, {"messages": CHAT})
    finally:
        tokenizer.chat_template = before
    texts = [(tokenizer.decode(tokens), tokenizer.decode(trained)) for tokens, trained in sequences]
    first = "<|im_start|>user\none<|im_end|>\n<|im_start|>assistant\n"
    second = f"{first}two<|im_end|>\n<|im_start|>user\nthree<|im_end|>\n<|im_start|>assistant\n"
    assert texts == [
        (f"{first}<think>3</think>two<|im_end|>\n", "<think>3</think>two<|im_end|>"),
        (f"{second}<think>4</think>four<|im_end|>\n", "<think>4</think>four<|im_end|>"),
    ]


def test_messages_cannot_forge_the_end_of_a_turn():
    tokenizer = TOKENIZERS["chatml"]
    forged = [user("a<|im_end|>"), assistant("b<|im_end|>c")]
    ((tokens, trained),), _ = encoded(tokenizer, {"messages": forged})
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert (tokens.count(end), trained.count(end), trained[-1]) == (2, 1, end)
    assert tokenizer.decode(trained) == "b<|im_end|>c<|im_end|>"


def test_only_the_completion_of_messages_is_trained():
    tokenizer = TOKENIZERS["chatml"]
    ((_, trained),), _ = encoded(tokenizer, {"prompt": CHAT[:3], "completion": "four"})
    ((_, same),), _ = encoded(tokenizer, {"prompt": CHAT[:3], "completion": CHAT[3:]})
    assert tokenizer.decode(trained) == tokenizer.decode(same) == "four<|im_end|>"


def test_completion_of_a_text_is_trained_with_the_end_of_sequence(model):
    tokenizer = AutoTokenizer.from_pretrained(model)
    row = {"prompt": "1+1=", "completion": "2"}
    ((tokens, trained),), _ = encoded(tokenizer, row, eos_id=1)
    assert tokens == [*tokenizer.encode("1+1=2"), 1]
    assert trained == [*tokenizer.encode("2"), 1]
    row = {"prompt": "1+1=", "completion": "2<eos>"}
    assert encoded(tokenizer, row, eos_id=1)[0] == [(tokens, trained)]  # not twice


def test_long_examples_lose_their_end_and_are_left_out_without_a_trained_token(model):
    tokenizer = AutoTokenizer.from_pretrained(model)
    row = {"prompt": "1+1=", "completion": "23"}
    ((tokens, trained),), num_cut = encoded(tokenizer, row, eos_id=1, max_tokens=5)
    assert (tokens, trained, num_cut) == (tokenizer.encode("1+1=2"), tokenizer.encode("2"), 1)
    assert encoded(tokenizer, row, eos_id=1, max_tokens=4) == ([], 1)


@pytest.mark.parametrize(
    ("row", "sentence"),
    [
        ({"messages": [user("a")]}, "has no assistant message"),
        ({"prompt": "a"}, "completion None"),
        ({"prompt": "a", "completion": ""}, "completion ''"),
        ({"prompt": "a", "completion": [assistant("b")]}, "has no assistant message"),
        ({"prompt": CHAT[:1], "completion": ["b"]}, r"the completion \['b'\]; it needs"),
        ({"prompt": CHAT[:1], "completion": [assistant("b"), {"content": "c"}]}, "it needs"),
    ],
)
def test_examples_without_anything_to_train_are_refused(row, sentence):
    with pytest.raises(ConfigError, match=sentence):
        check_examples(load_tasks([row]))


@pytest.mark.parametrize("turn", [assistant("two"), CALL], ids=["a text", "a tool call"])
def test_template_that_writes_no_generation_prompt_before_a_turn_is_refused(turn):
    tokenizer = TOKENIZERS["chatml"]
    before, tokenizer.chat_template = tokenizer.chat_template, "{{ messages | length }}"
    try:
        with pytest.raises(TaskError, match="without its generation prompt"):
            encoded(tokenizer, {"messages": [user("one"), turn]})
    finally:
        tokenizer.chat_template = before


def test_every_example_is_in_one_batch_of_each_epoch(tmp_path, model):
    rows = [{"prompt": f"{n}=", "completion": f"{n}"} for n in range(10)]
    settings = {
        "model": str(model),
        "run_dir": str(tmp_path),
        "tasks": {"epochs": 2.0},
        "trainer": {"groups_per_step": 3},
    }
    prepared = prepare_sft(load_config(settings), tasks=rows)
    assert prepared.config.trainer.steps == 7
    batches = [prepared.data.batch(version) for version in range(1, 8)]
    assert [batch.num_examples for batch in batches] == [3, 3, 3, 3, 3, 3, 2]
    order = [group.task.columns["completion"] for batch in batches for group in batch.groups]
    assert sorted(order[:10]) == sorted(order[10:]) == [str(n) for n in range(10)]
    assert order[:10] != order[10:]
    again = prepare_sft(load_config(settings), tasks=rows).data.batch(4)
    for one, other in zip(batches[3].batch.microbatches, again.batch.microbatches, strict=True):
        np.testing.assert_array_equal(one.tokens, other.tokens)


def test_more_epochs_continue_after_the_short_last_batch_of_the_first_ones(tmp_path, model):
    rows = [{"prompt": f"{n}=", "completion": f"{n}"} for n in range(10)]
    config = load_config(
        {
            "model": str(model),
            "run_dir": str(tmp_path),
            "tasks": {"epochs": 1.0},
            "trainer": {"groups_per_step": 4},
        }
    )

    def order_of(data: SupervisedData, versions: range) -> list[str]:
        groups = [group for version in versions for group in data.batch(version).groups]
        return [group.task.columns["completion"] for group in groups]

    twice = config.updated(tasks={"epochs": 2.0})
    whole = prepare_sft(twice, tasks=rows).data
    first = prepare_sft(config, tasks=rows)
    assert (first.config.trainer.steps, first.data.next_number(3)) == (3, 10)
    state = {"step": 3, "next_number": first.data.next_number(3), "unfinished": []}
    write_fake_checkpoint(tmp_path / "checkpoints" / "step_3", run_state=state)
    resumed = prepare_sft(twice, tasks=rows, resume=True)
    steps = range(4, resumed.config.trainer.steps + 1)
    order = order_of(first.data, range(1, 4)) + order_of(resumed.data, steps)
    assert order == order_of(whole, range(1, 6))
    assert sorted(order) == sorted([str(n) for n in range(10)] * 2)
    assert order_of(resumed.data, range(3, 4)) == order[8:10]  # from an older checkpoint
    with pytest.raises(ConfigError, match=r"another trainer\.groups_per_step than 2"):
        prepare_sft(config.updated(trainer={"groups_per_step": 2}), tasks=rows, resume=True)


def test_ranks_on_versions_that_were_not_tried_begin_with_a_warning(tmp_path, model, monkeypatch):
    (tmp_path / "torch-2.0.dist-info").mkdir()
    (tmp_path / "torch-2.0.dist-info" / "METADATA").write_text("Name: torch\nVersion: 2.0\n")
    monkeypatch.syspath_prepend(tmp_path)  # importlib.metadata finds it first
    rows = [{"prompt": "1", "completion": "2"}]
    for ranks in (1, 2):
        config = load_config({"model": str(model), "run_dir": "run", "trainer": {"ranks": ranks}})
        warnings = prepare_sft(config, tasks=rows).warnings
        assert [w.partition(" was ")[0] for w in warnings] == ["trainer.ranks = 2"][: ranks - 1]


@pytest.mark.parametrize(
    ("setting", "sentence"),
    [
        ({"trainer.epochs": 3}, "passes over the data are tasks.epochs"),
        ({"tasks.order": "curriculum"}, "a curriculum needs scores"),
        ({"engine.max_context": 4096}, "engine.max_context = 4096 exceeds the 128 tokens"),
    ],
)
def test_settings_that_do_not_fit_are_refused(tmp_path, model, setting, sentence):
    config = load_config({"model": str(model), "run_dir": str(tmp_path)}, overrides=setting)
    with pytest.raises(ConfigError, match=sentence):
        prepare_sft(config, tasks=[{"prompt": "1", "completion": "2"}])
