"""Ends of steps in the policy's own tokens."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from millrace.core.errors import ConfigError
from millrace.core.records import Rollout, Sampling
from millrace.scoring.reward_models.steps import build_steps, step_ends


def byte_pairs() -> PreTrainedTokenizerFast:
    """A byte-level tokenizer with tokens that contain a delimiter and text around it."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    text = ["a\n\nb", "step one\n\nstep two\n\n", "é\n", "x\n\n\n\ny"] * 20
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=["<eos>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train_from_iterator(text, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>")


TOKENIZER = byte_pairs()
BY_BLANK_LINE = build_steps({"by": "delimiter", "delimiter": "\n\n"}, section="scorer.steps")


def cut(steps, pieces: list[str], *, logprobs=None) -> list[list[str]]:
    """Cut tokens that are given as text; return the steps as lists of texts."""
    tokens = [TOKENIZER.encode(piece, add_special_tokens=False) for piece in pieces]
    flat = [token for ids in tokens for token in ids]
    assert all(len(ids) == 1 for ids in tokens)
    cutter = steps.cutter(TOKENIZER)
    ends = cutter.feed(flat, logprobs or [0.0] * len(flat)) + cutter.finish()
    bounds = [0, *(end + 1 for end in ends)]
    return [pieces[a:b] for a, b in pairwise(bounds)]


def test_a_step_ends_with_the_token_that_completes_the_delimiter():
    assert cut(BY_BLANK_LINE, ["o", "\n", "\n", "t", "\n", "\n", "h"]) == [
        ["o", "\n", "\n"],
        ["t", "\n", "\n"],
        ["h"],
    ]


def test_blank_steps_join_the_next_step_or_at_the_end_the_last():
    assert cut(BY_BLANK_LINE, ["o", "\n", "\n", "\n", "\n", "t"]) == [
        ["o", "\n", "\n"],
        ["\n", "\n", "t"],
    ]
    assert cut(BY_BLANK_LINE, ["o", "\n", "\n", "\n", "\n", "<eos>"]) == [["o", "\n", "\n"]]


def test_turn_with_only_an_eos_token_is_one_step():
    assert cut(BY_BLANK_LINE, ["<eos>"]) == [["<eos>"]]


def test_a_special_token_may_be_the_delimiter():
    steps = build_steps({"by": "delimiter", "delimiter": "<eos>"}, section="scorer.steps")
    assert cut(steps, ["o", "<eos>", "t"]) == [["o", "<eos>"], ["t"]]


def test_a_surprising_token_begins_a_step_of_at_least_min_tokens():
    steps = build_steps({"by": "entropy", "threshold": 2.0, "min_tokens": 2}, section="scorer")
    logprobs = [-9.0, -0.1, -2.0, -3.0, -0.1, -0.1, -2.5]
    assert cut(steps, list("abxypst"), logprobs=logprobs) == [["a", "b"], ["x", "y", "p", "s"]]


def test_quantile_is_computed_within_the_turn():
    steps = build_steps({"by": "entropy", "quantile": 0.8, "min_tokens": 1}, section="scorer")
    assert cut(steps, list("abxyp"), logprobs=[-0.1, -0.2, -5.0, -0.1, -0.2]) == [
        ["a", "b"],
        ["x", "y", "p"],
    ]


@given(text=st.text(alphabet="ab é\n", max_size=40), sizes=st.lists(st.integers(1, 5)))
def test_incremental_cutting_equals_cutting_at_once(text, sizes):
    tokens = TOKENIZER.encode(text, add_special_tokens=False)
    whole = BY_BLANK_LINE.cutter(TOKENIZER)
    at_once = whole.feed(tokens, [0.0] * len(tokens)) + whole.finish()
    cutter, at, found = BY_BLANK_LINE.cutter(TOKENIZER), 0, []
    for size in [*sizes, len(tokens)]:
        part = tokens[at : at + size]
        found += cutter.feed(part, [0.0] * len(part))
        at += size
    assert found + cutter.finish() == at_once


@given(text=st.text(alphabet="ab é\n", min_size=1, max_size=40))
def test_each_step_but_the_last_has_text_and_ends_with_a_delimiter(text):
    tokens = TOKENIZER.encode(text, add_special_tokens=False)
    cutter = BY_BLANK_LINE.cutter(TOKENIZER)
    ends = cutter.feed(tokens, [0.0] * len(tokens))
    begin = 0
    for end in ends:
        step = TOKENIZER.decode(tokens[begin : end + 1])
        assert step.replace("\n\n", "").strip()
        assert "\n\n" in step
        assert not TOKENIZER.decode(tokens[begin:end]).strip().count("\n\n")
        begin = end + 1
    rest = TOKENIZER.decode(tokens[begin:])
    assert "\n\n" not in rest.strip()
    assert bool(cutter.finish()) == bool(rest.replace("\n\n", "").strip() or not ends)


def rollout_of(*runs: tuple[str, bool]) -> Rollout:
    tokens = [TOKENIZER.encode(text, add_special_tokens=False) for text, _ in runs]
    mask = np.repeat([sampled for _, sampled in runs], [len(ids) for ids in tokens])
    flat = np.array([token for ids in tokens for token in ids], np.int32)
    return Rollout(
        tokens=flat,
        mask=mask,
        engine_logprobs=np.zeros(len(flat), np.float32),
        versions=np.where(mask, 0, -1).astype(np.int32),
        sampling=Sampling(),
    )


def test_turns_are_cut_separately():
    rollout = rollout_of(("q", False), ("a\n", True), ("\nb", False), ("c<eos>", True))
    assert step_ends(rollout, steps=BY_BLANK_LINE, tokenizer=TOKENIZER) == step_ends(
        rollout, steps=build_steps({"by": "turn"}, section="scorer"), tokenizer=TOKENIZER
    )


@pytest.mark.parametrize(
    ("table", "sentence"),
    [
        ({"by": "delimeter"}, "did you mean 'delimiter'"),
        (
            {"by": "delimiter", "delimiter": ""},
            "delimiter' = '': string should have at least 1 character",
        ),
        ({"by": "entropy"}, "set either threshold or quantile"),
        ({"by": "entropy", "quantile": 2}, "quantile' = 2: input should be less than 1"),
    ],
)
def test_invalid_steps_are_refused(table, sentence):
    with pytest.raises(ConfigError, match=sentence):
        build_steps(table, section="scorer.steps")
