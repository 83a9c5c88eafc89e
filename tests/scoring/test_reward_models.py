"""Reward models as scorers: their input, and the scores made of their values."""

import contextlib
from dataclasses import replace

import numpy as np
import pytest
from tiny_classifier import make_tiny_classifier
from tiny_model import make_tiny_model
from transformers import AutoTokenizer

from millrace.cluster.messages import StepReading
from millrace.config import ScorerConfig
from millrace.core.errors import ConfigError, ScoreError
from millrace.core.records import Episode, Group, Rollout, Sampling, Task, Turn
from millrace.demo.model import build_tokenizer
from millrace.scoring.advantages import ReturnAdvantages
from millrace.scoring.pool import combine, resolve_scorer
from millrace.scoring.reward_models.reward_model import (
    ProcessRewardModel,
    ProcessRewardScorer,
    RewardModel,
    RewardModelScorer,
    RewardModelSettings,
)
from millrace.scoring.reward_models.steps import StepReader
from millrace.scoring.reward_models.worker import ReadingEncoder

BY_EQUALS = {"by": "delimiter", "delimiter": "="}


@pytest.fixture(scope="module")
def policy(tmp_path_factory):
    return make_tiny_model(tmp_path_factory.mktemp("policy"))


@pytest.fixture(scope="module")
def tokenizer(policy):
    return AutoTokenizer.from_pretrained(policy)


class Process:
    """Fakes a model's process: returns listed values and keeps the readings."""

    def __init__(self, *values: list[float]) -> None:
        self.readings: list[StepReading] = []
        self._values = list(values)

    async def read(self, readings, *, timeout_s):
        self.readings += readings
        return [self._values.pop(0) for _ in readings]


def group_of(tokenizer, *runs: tuple[str, bool], prompt="1+2=") -> Group:
    """One episode: a prompt, then texts that are sampled or not."""
    ids = [tokenizer.encode(text) for text in (prompt, *(text for text, _ in runs))]
    mask = np.repeat([False, *(sampled for _, sampled in runs)], [len(part) for part in ids])
    tokens = np.array([token for part in ids for token in part], np.int32)
    rollout = Rollout(
        tokens=tokens,
        mask=mask,
        engine_logprobs=np.zeros(len(tokens), np.float32),
        versions=np.where(mask, 0, -1).astype(np.int32),
        sampling=Sampling(),
    )
    completion = "".join(text for text, _ in runs)
    turn = Turn(prompt=prompt, completion=completion, finish="stop")
    episode = Episode(turns=(turn,), rollouts=(rollout,))
    return Group(number=3, task=Task(prompt=prompt), episodes=(episode,))


def make_scorer(tokenizer, process, *, takes_ids=True, **settings) -> ProcessRewardScorer:
    reader = StepReader(process, tokenizer=tokenizer, takes_ids=takes_ids, timeout_s=1.0)
    model = ProcessRewardModel(model="m", steps=BY_EQUALS, pipelined=False, **settings)
    return ProcessRewardScorer("steps", model, weight=0.5, reader=reader)


async def test_step_values_become_rewards_at_the_last_token_of_each_step(tokenizer):
    process = Process([0.25, 1.0, 0.5])
    scorer = make_scorer(tokenizer, process)
    group = group_of(tokenizer, ("3=4=<eos>", True), ("ab", False), ("5<eos>", True))
    (result,) = await scorer.score(group)
    assert result.score is None
    (token_scores,) = result.token_scores
    #       1  +  2  =  3  =     4  =  eos  a  b  5  eos
    given = [0, 0, 0, 0, 0, 0.25, 0, 1.0, 0, 0, 0, 0, 0.5]
    np.testing.assert_array_equal(token_scores.rewards, np.array(given, np.float32))
    (reading,) = process.readings
    assert reading.ends == [5, 7, 12]
    assert tokenizer.decode(reading.tokens.tolist()) == "1+2=3=4=<eos>ab5<eos>"


@pytest.mark.parametrize(("aggregate", "score"), [("min", -1.0), ("mean", 0.5), ("last", 2.0)])
async def test_differences_add_up_to_the_last_value_and_an_aggregate_is_the_score(
    tokenizer, aggregate, score
):
    process = Process([0.5, -1.0, 2.0])
    scorer = make_scorer(tokenizer, process, reduce="difference", score=aggregate)
    (result,) = await scorer.score(group_of(tokenizer, ("3=4=5", True)))
    assert result.score == score
    rewards = result.token_scores[0].rewards
    assert rewards[rewards != 0].tolist() == [0.5, -1.5, 3.0]


async def test_step_rewards_feed_the_advantages_with_their_weight(tokenizer):
    group = group_of(tokenizer, ("3=4=", True))
    scorer = make_scorer(tokenizer, Process([1.0, 3.0]))
    scored = combine(group, [await scorer.score(group)], scorers=[scorer])
    assert scored.scores[0].total == 0.0
    (advantages,) = ReturnAdvantages(normalize_std=False)(scored)
    # Returns are (1 + 3) * 0.5 over the first step, 3 * 0.5 over the second; their mean is 1.75.
    np.testing.assert_allclose(advantages, [0, 0, 0, 0, 0.25, 0.25, -0.25, -0.25])


async def test_model_with_another_tokenizer_gets_text_step_by_step(tokenizer):
    process = Process([1.0, 2.0])
    scorer = make_scorer(tokenizer, process, takes_ids=False)
    await scorer.score(group_of(tokenizer, ("3=4<eos>", True)))
    (reading,) = process.readings
    assert reading.tokens is None
    assert (reading.prompt, reading.pieces) == ("1+2=", ["3=", "4"])


async def test_value_that_is_not_finite_fails_its_group(tokenizer):
    process = Process([float("nan")])
    scorer = RewardModelScorer(
        name="quality", weight=1.0, model=process, timeout_s=1.0, takes_ids=False
    )
    with pytest.raises(ScoreError, match=r"'quality' returned nan for group 3; try dtype"):
        await scorer.score(group_of(tokenizer, ("3", True)))


@pytest.mark.parametrize(("takes_ids", "score"), [(True, None), (False, -2.0)])
async def test_evaluated_episode_without_a_reply_is_an_empty_one_or_has_no_score(
    tokenizer, takes_ids, score
):
    process = Process([0.5], [-2.0])
    scorer = RewardModelScorer(
        name="quality", weight=1.0, model=process, timeout_s=1.0, takes_ids=takes_ids
    )
    group = group_of(tokenizer, ("3", True))
    silent = Episode(turns=(), rollouts=())
    results = await scorer.score(replace(group, episodes=(*group.episodes, silent)))
    assert [result.score for result in results] == [0.5, score]
    if not takes_ids:
        assert (process.readings[1].prompt, process.readings[1].pieces) == ("1+2=", [""])


def test_text_is_encoded_with_the_models_own_tokenizer(tokenizer):
    steps = ReadingEncoder(tokenizer, template="text", is_whole=False, separator="*")
    tokens, ends = steps.encode(StepReading(prompt="1+", pieces=["2", "ab"]))
    assert tokenizer.decode(tokens) == "1+2*ab*"
    assert ends == [3, 6]
    of_ids = ReadingEncoder(tokenizer, template="ids", is_whole=False, separator="*")
    given = StepReading(tokens=np.array(tokenizer.encode("1+2ab"), np.int32), ends=[2, 4])
    assert tokenizer.decode(of_ids.encode(given)[0]) == "1+2*ab*"
    whole = ReadingEncoder(tokenizer, template="auto", is_whole=True, separator=None)
    tokens, ends = whole.encode(
        StepReading(prompt=[{"role": "user", "content": "1+"}], pieces=["2"])
    )
    assert tokenizer.decode(tokens, skip_special_tokens=True) == "1+2"
    assert ends == [len(tokens) - 1]


def test_chat_uses_the_template_of_the_models_own_tokenizer(tokenizer):
    chat = [{"role": "user", "content": "1"}]
    with _template(
        tokenizer,
        "{% for m in messages %}{{ m.role[0] }}{{ m.content }}="
        "{% endfor %}"
        "{% if add_generation_prompt %}a{% endif %}",
    ):
        whole = ReadingEncoder(tokenizer, template="auto", is_whole=True, separator=None)
        tokens, _ = whole.encode(StepReading(prompt=chat, pieces=["2"]))
        assert tokenizer.decode(tokens, skip_special_tokens=True) == "1=a2="
        steps = ReadingEncoder(tokenizer, template="chat", is_whole=False, separator=None)
        tokens, ends = steps.encode(StepReading(prompt="1", pieces=["2", "3"]))
        assert tokenizer.decode(tokens, skip_special_tokens=True) == "1=a23"
        assert ends == [len(tokens) - 2, len(tokens) - 1]


def test_completion_cannot_forge_a_turn_for_the_reward_model(tokenizer):
    with _template(tokenizer, "{% for m in messages %}{{ m.content }}<eos>{% endfor %}"):
        whole = ReadingEncoder(tokenizer, template="chat", is_whole=True, separator=None)
        tokens, _ = whole.encode(StepReading(prompt="1", pieces=["2<eos>3"]))
        steps = ReadingEncoder(tokenizer, template="chat", is_whole=False, separator=None)
        by_step, _ = steps.encode(StepReading(prompt="1", pieces=["2<eos>3"]))
    assert (tokens == tokenizer.eos_token_id).sum() == 2
    assert (by_step == tokenizer.eos_token_id).sum() == 1


def test_control_tokens_in_completions_are_ordinary_text_for_a_reward_model_of_text(tokenizer):
    whole = ReadingEncoder(tokenizer, template="text", is_whole=True, separator=None)
    tokens, _ = whole.encode(StepReading(prompt="1<eos>", pieces=["2<eos>3"]))
    assert (tokens == tokenizer.eos_token_id).sum() == 1


@pytest.mark.parametrize("is_whole", [True, False])
def test_control_tokens_that_cannot_be_text_are_left_out_for_a_reward_model(is_whole):
    tokenizer = build_tokenizer("0123456789")  # has no token for "<"
    encoder = ReadingEncoder(tokenizer, template="text", is_whole=is_whole, separator=None)
    tokens, ends = encoder.encode(StepReading(prompt="1", pieces=["2<eos>3<e<eos>os>"]))
    assert (tokenizer.decode(tokens), ends) == ("123", [2])


@contextlib.contextmanager
def _template(tokenizer, template: str):
    tokenizer.chat_template = template
    try:
        yield
    finally:
        tokenizer.chat_template = None


def test_settings_of_both_types_are_checked_before_anything_starts(tmp_path, policy, tokenizer):
    def check(**table):
        spec = resolve_scorer(ScorerConfig(**table), section="scorer.0")
        spec.type.check([], name=spec.name)

    model = str(make_tiny_classifier(tmp_path / "rm", head="sequence", num_labels=2))
    with pytest.raises(ConfigError, match=r"has 2 labels \(0 = 'LABEL_0', 1 = .*; set label to"):
        check(type="reward_model", model=model)
    check(type="reward_model", model=model, label=1)
    with pytest.raises(ConfigError, match=r"label = 2 does not exist in model"):
        check(type="reward_model", model=model, label=2)
    with pytest.raises(ConfigError, match=r"max_length = 999 is more than the 128 tokens"):
        check(type="reward_model", model=model, label=1, max_length=999)
    with pytest.raises(ConfigError, match=r"has no chat template; set template to 'text'"):
        check(type="reward_model", model=model, label=1, template="chat")
    with pytest.raises(ConfigError, match=r"reduce' = 'sum': input should be 'value' or 'diff"):
        check(type="process_reward_model", model=model, reduce="sum")
    with pytest.raises(ConfigError, match=r"'scorer.0.lable'.*did you mean 'label'"):
        check(type="reward_model", model=model, lable=1)
    with pytest.raises(ConfigError, match="does not exist; check model of scorer 'reward_model'"):
        check(type="reward_model", model=str(tmp_path / "none"))
    assert RewardModel(model=model).has_same_tokens(tokenizer)
    other = AutoTokenizer.from_pretrained(policy)
    other.add_tokens(["<step>"])
    with pytest.raises(ConfigError, match=r"the tokenizer of .* differs; set template"):
        RewardModelSettings(model=model).require_same_tokens(other, scorer="quality")
