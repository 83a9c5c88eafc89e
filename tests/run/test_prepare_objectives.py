"""What a run makes of [loss], [scoring] and [buffer] before any worker starts."""

import json
from pathlib import Path

import pytest
from tiny_model import make_tiny_model

from millrace.config import load_config
from millrace.core.errors import ConfigError
from millrace.run.prepare import PreparedRun, prepare
from millrace.scoring.advantages import (
    BatchAdvantages,
    BestWorstAdvantages,
    GaeAdvantages,
    GroupAdvantages,
    LeaveOneOutAdvantages,
)


def length(completions, **columns):
    return [len(text) for text in completions]


def prepared(model: Path, **settings) -> PreparedRun:
    config = load_config({"model": str(model), **settings})
    return prepare(config, tasks=[{"prompt": "1+1="}], scorers=[length])


@pytest.mark.parametrize(
    ("loss", "expected"),
    [
        ({}, GroupAdvantages()),
        ({"type": "gspo"}, GroupAdvantages()),
        ({"type": "dr_grpo"}, GroupAdvantages(normalize_std=False)),
        ({"type": "rloo"}, LeaveOneOutAdvantages()),
        ({"type": "reinforce_pp"}, BatchAdvantages()),
        ({"type": "online_dpo"}, BestWorstAdvantages()),
    ],
)
def test_a_recipe_brings_its_own_advantages(model, loss, expected):
    result = prepared(model, loss=loss)
    assert result.advantages == expected
    assert result.config.scoring.advantages["type"] != "auto"


def test_explicit_advantages_override_those_of_the_recipe(model):
    result = prepared(
        model, loss={"type": "rloo"}, scoring={"advantages": {"type": "group", "epsilon": 0.5}}
    )
    assert result.advantages == GroupAdvantages(epsilon=0.5)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"loss": {"type": "grpo", "kl": 0.1}}, "loss.kl = 0.1 compares with a reference model"),
        (
            {"loss": {"type": "cispo", "dual": 3.0}},
            "'loss.dual' = 3.0 belongs to surrogate = 'clip'",
        ),
        (
            {"loss": {"type": "online_dpo", "reference": "reference"}},
            "the run has none; add one to scorers (type = 'reference')",
        ),
        (
            {"loss": {"type": "online_dpo"}, "scoring": {"advantages": {"type": "group"}}},
            "learns from pairs, but scoring.advantages of type 'group' makes none; set that to",
        ),
        (
            {"loss": {"type": "online_dpo"}, "rollout": {"filter": [{"type": "overlong"}]}},
            "would leave half of a pair",
        ),
        (
            {"scoring": {"advantages": {"type": "auto", "epsilon": 1.0}}},
            "leaves its type to the loss but sets epsilon; set the type, too",
        ),
        (
            {"critic": {}, "scoring": {"advantages": {"type": "group"}}},
            "of type 'group' needs no critic, and [critic] is set; remove [critic], or set",
        ),
        (
            {"scoring": {"advantages": {"type": "gae"}}},
            "of type 'gae' needs a critic, and there is none; add a [critic] table",
        ),
        (
            {"critic": {}, "loss": {"type": "online_dpo"}},
            "a critic judges single episodes; remove [critic], or set loss.type to 'ppo'",
        ),
        (
            {"critic": {}, "rollout": {"filter": [{"type": "overlong"}, {}]}},
            "rollout.filter 'zero_variance' drops groups that all failed or all succeeded, from"
            " which a critic learns; remove the filter or [critic]",
        ),
        (
            {"optimizer": {"type": "torch.optim:SDG"}},
            "optimizer.type = 'torch.optim:SDG': 'torch.optim' has no 'SDG'; check the name after",
        ),
        (
            {"optimizer": {"type": "torch.optim:SGD", "momentun": 0.9}},
            "Section 'optimizer' does not fit 'torch.optim:SGD': got an unexpected keyword arg",
        ),
        (
            {"lora": {"target_modules": ["q_proj", "qproj"]}},
            "lora.target_modules has 'qproj', which is not an adaptable layer; this model has",
        ),
        ({"critic": {"path": "/nowhere/at/all"}}, "does not exist; check critic.path"),
        (
            {"critic": {}, "scoring": {"advantages": {"type": "gae", "gamma": 0.0}}},
            "'scoring.advantages.gamma' = 0.0: input should be greater than 0",
        ),
        (
            {"critic": {}, "scoring": {"advantages": {"type": "gae", "gae_lambda": 1.1}}},
            "'scoring.advantages.gae_lambda' = 1.1: input should be less than or equal to 1",
        ),
        (
            {"buffer": {"order": "freshest", "max_staleness": 0}},
            "buffer.order = 'freshest' chooses among 16 waiting groups, which would become staler",
        ),
        (
            {"buffer": {"replay": {}}, "loss": {"max_token_staleness": 1}},
            "loss.max_token_staleness = 1 masks every token of buffer.replay",
        ),
        (
            {"loss": {"type": "vcpo", "minimum_variance_baseline": True}, "critic": {}},
            "loss.minimum_variance_baseline does not work with [critic]: it compares",
        ),
        *(
            ({"fidelity": {"mode": "exact"}, **part}, f"'exact' does not support {name}")
            for part, name in (
                ({"engine": {"type": "vllm"}}, "engine.type = 'vllm'"),
                (
                    {"engine": {"options": {"kv_cache_dtype": "fp8", "quantization": "fp8"}}},
                    "FP8 in engine.options (quantization, kv_cache_dtype), which",
                ),
                ({"lora": {}}, "[lora]"),
                ({"trainer": {"ranks": 2}}, "trainer.ranks = 2"),
                ({"engine": {"dtype": "float32"}}, "engine.dtype = 'float32' beside"),
                (
                    {"placement": {"engines": "cpu", "trainer": "cuda"}},
                    "placement.engines = ['cpu'] beside placement.trainer = ['cuda'], which",
                ),
            )
        ),
    ],
)
def test_impossible_combination_is_refused_before_the_start(model, settings, message):
    with pytest.raises(ConfigError) as caught:
        prepared(model, **settings)
    assert message in str(caught.value)


def test_critic_implies_ppo_and_gae(model):
    result = prepared(model, critic={})
    assert result.advantages == GaeAdvantages()
    assert result.config.scoring.advantages == {"type": "gae"}
    assert result.config.loss == {"type": "ppo"}
    assert prepared(model, critic={}, loss={"low": 0.1}).config.loss == {"type": "ppo", "low": 0.1}
    assert prepared(model, critic={}, loss={"type": "cispo"}).config.loss == {"type": "cispo"}
    # What the run directory keeps is a config that says the same.
    again = load_config(result.config.model_dump(mode="json"))
    assert prepare(again, tasks=[{"prompt": "1"}], scorers=[length]).config == result.config


def test_critic_with_fewer_tokens_or_context_is_refused(model, tmp_path):
    short = make_tiny_model(tmp_path / "short", max_context=64)
    with pytest.raises(ConfigError, match="reads 64 tokens, but sequences may have 128; lower"):
        prepared(model, critic={"path": str(short)})
    assert prepared(model, critic={"path": str(short)}, engine={"max_context": 64})
    tokens = json.loads((short / "config.json").read_text())
    (short / "config.json").write_text(json.dumps({**tokens, "vocab_size": 20}))
    with pytest.raises(ConfigError, match="knows 20 tokens, but the policy has 27; choose"):
        prepared(model, critic={"path": str(short)})
