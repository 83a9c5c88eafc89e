import itertools

import numpy as np
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from millrace.core.errors import ConfigError, TaskError
from millrace.core.records import Completion, Kept, Sampling, Task
from millrace.core.staleness import TokenVersions
from millrace.environments.rollouts.renderer import Renderer
from millrace.environments.token_record import rollout_of

TEMPLATE = (
    "{% for m in messages %}"
    "{% if m.role == 'tool' %}{{ raise_exception('no tools here') }}{% endif %}"
    "{{ m.role }} {{ m.content }} {% endfor %}{% if add_generation_prompt %}assistant{% endif %}"
)
VOCABULARY = {"<s>": 0, "?": 1, "a": 2, "b": 3, "user": 4, "assistant": 5}
CHAT = [{"role": "user", "content": "b"}]


def tokenizer(*, chat_template: str | None = None, adds_start: bool = True):
    core = Tokenizer(models.WordLevel(VOCABULARY, unk_token="?"))
    core.pre_tokenizer = pre_tokenizers.Whitespace()
    if adds_start:
        core.post_processor = processors.TemplateProcessing(
            single="<s> $A", special_tokens=[("<s>", 0)]
        )
    return PreTrainedTokenizerFast(
        tokenizer_object=core, unk_token="?", bos_token="<s>", chat_template=chat_template
    )


def completion(kept: Kept | None = None) -> Completion:
    return Completion(
        tokens=np.array([3, 2, 1], np.int32),
        logprobs=np.array([-0.5, -1.0, -0.25], np.float32),
        versions=np.array([4, 4, 5], np.int32),
        kept=kept,
        finish="length",
        text="b a ?",
    )


def test_text_is_encoded_with_special_tokens():
    tokens = Renderer(tokenizer()).render("a b")
    np.testing.assert_array_equal(tokens, [0, 2, 3])
    assert tokens.dtype == np.int32


def test_messages_are_rendered_with_a_generation_prompt():
    tokens = Renderer(tokenizer(chat_template=TEMPLATE)).render(CHAT)
    np.testing.assert_array_equal(tokens, [4, 3, 5])
    assert tokens.dtype == np.int32


def test_messages_without_a_chat_template_raise_config_error():
    renderer = Renderer(tokenizer())
    with pytest.raises(TaskError, match=r"'content': 'b'.*no chat template; write the prompt as"):
        renderer.render(CHAT)
    renderer.check([Task(prompt="a")])
    with pytest.raises(
        ConfigError, match="Task 1: its prompt is a list of messages, but the model"
    ):
        renderer.check([Task(prompt="a"), Task(prompt=CHAT)])
    Renderer(tokenizer(chat_template=TEMPLATE)).check([Task(prompt=CHAT)])


def test_render_raises_task_error_for_messages_that_the_template_refuses():
    renderer = Renderer(tokenizer(chat_template=TEMPLATE))
    with pytest.raises(TaskError, match=r"refused the messages .*no tools here; check their roles"):
        renderer.render([{"role": "tool", "content": "b"}])


def test_prompt_without_tokens_raises_task_error():
    with pytest.raises(TaskError, match="Prompt '  ' has no tokens"):
        Renderer(tokenizer(adds_start=False)).render("  ")


def test_rollout_joins_prompt_and_completion():
    prompt = np.array([0, 2], np.int32)
    sampling = Sampling(temperature=0.7)
    rollout = rollout_of(prompt, completion(), sampling)
    np.testing.assert_array_equal(rollout.tokens, [0, 2, 3, 2, 1])
    np.testing.assert_array_equal(rollout.mask, [False, False, True, True, True])
    np.testing.assert_array_equal(
        rollout.engine_logprobs, np.float32([0.0, 0.0, -0.5, -1.0, -0.25])
    )
    np.testing.assert_array_equal(rollout.versions, [-1, -1, 4, 4, 5])
    assert rollout.sampling is sampling
    assert rollout.kept is None
    assert (TokenVersions.of_rollout(rollout).oldest, rollout.num_sampled) == (4, 3)
    dtypes = [rollout.tokens.dtype, rollout.mask.dtype]
    dtypes += [rollout.engine_logprobs.dtype, rollout.versions.dtype]
    assert dtypes == [np.int32, np.bool_, np.float32, np.int32]


def test_prompt_tokens_have_empty_kept_rows():
    rows = [[3, 4], [2], [1, 5, 0]]
    kept = Kept(
        ids=np.array([3, 4, 2, 1, 5, 0], np.int32), offsets=np.array([0, 2, 3, 6], np.int64)
    )
    prompt = np.array([0, 2], np.int32)
    rollout = rollout_of(prompt, completion(kept), Sampling(top_p=0.9))
    assert rollout.kept is not None
    ids, offsets = rollout.kept.ids, rollout.kept.offsets
    assert len(offsets) == len(rollout.tokens) + 1
    assert offsets.dtype == np.int64
    assert [ids[a:b].tolist() for a, b in itertools.pairwise(offsets)] == [
        [],
        [],
        *rows,
    ]


def test_truncated_completion_without_kept_ids_fails_an_assertion():
    with pytest.raises(AssertionError, match="kept"):
        rollout_of(np.array([0], np.int32), completion(), Sampling(top_k=2))
