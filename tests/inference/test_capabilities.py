"""Settings that need a capability which an engine backend lacks."""

import pytest

from millrace.config import EngineConfig, RunConfig
from millrace.core.errors import ConfigError
from millrace.core.protocols import Capability
from millrace.inference.capabilities import check_capabilities, seed_warnings

ALL = frozenset(Capability)
BARRIER = {"interrupt": "barrier"}
CORE_ONLY = {"weights": {"interrupt": "drain"}, "journal": {"partial_every_s": 0}}


def config(**settings) -> RunConfig:
    return RunConfig(model="m", **{**CORE_ONLY, **settings})


def test_basic_settings_need_no_capability():
    check_capabilities(config(), frozenset(), has_experts=False)
    synchronous = config(weights=BARRIER, buffer={"max_staleness": 0}, journal={})
    reproducible = frozenset({Capability.REPRODUCIBLE})
    check_capabilities(synchronous, reproducible, has_experts=False)


@pytest.mark.parametrize(
    ("settings", "setting", "capability"),
    [
        ({"sampling": {"top_k": 5}}, "sampling.top_k = 5", Capability.KEPT_IDS),
        ({"sampling": {"top_p": 0.9}}, "sampling.top_p = 0.9", Capability.KEPT_IDS),
        ({"sampling": {"min_p": 0.1}}, "sampling.min_p = 0.1", Capability.KEPT_IDS),
        ({"weights": BARRIER}, "weights.interrupt = 'barrier'", Capability.REPRODUCIBLE),
        ({"weights": {}}, "weights.interrupt = 'swap'", Capability.TOKEN_VERSIONS),
        (
            {"weights": {"interrupt": "save"}},
            "weights.interrupt = 'save'",
            Capability.TOKEN_VERSIONS,
        ),
        ({"weights": {"interrupt": "abort"}}, "weights.interrupt = 'abort'", Capability.PARTIALS),
        ({"journal": {}}, "journal.partial_every_s = 5", Capability.PARTIALS),
        ({"environment": {"recipe": "tree"}}, "environment.recipe = 'tree'", Capability.PARTIALS),
        (
            {"environment": {"recipe": {"type": "pivot", "by": "entropy"}}},
            "environment.recipe.by = 'entropy'",
            Capability.SCORING,
        ),
        (
            {"weights": {"interrupt": "drain", "probe": True}},
            "weights.probe = true",
            Capability.SCORING,
        ),
        (
            {"cluster": {"share_gpu": "sleep"}},
            "cluster.share_gpu = 'sleep'",
            Capability.SLEEP,
        ),
        ({"lora": {}}, "[lora]", Capability.LORA),
        ({"engine": {"adapters": {"judge": "folder"}}}, "engine.adapters", Capability.ADAPTERS),
        ({}, "trainer.replay_routes = true", Capability.ROUTES),
    ],
)
def test_setting_that_needs_a_missing_capability_is_refused(settings, setting, capability):
    run = config(**settings)
    check_capabilities(run, ALL, has_experts=True)
    with pytest.raises(ConfigError) as refused:
        check_capabilities(run, ALL - {capability}, has_experts=True)
    sentence = str(refused.value)
    assert sentence.startswith(setting)
    assert f"needs {capability.value}, which engine.type = 'embedded' does not offer" in sentence


def test_backend_without_seeds_gives_a_warning():
    assert seed_warnings(EngineConfig(), ALL) == ()
    (sentence,) = seed_warnings(EngineConfig(), frozenset())
    assert "a repeated run samples other tokens" in sentence
