"""Backends by name, and settings that need a capability which a backend lacks."""

from dataclasses import dataclass

import pytest
from architectures import tiny_model
from engine_rig import letter_tokenizer
from minimal_backend import MinimalBackend

from millrace.config import EngineConfig, RunConfig
from millrace.core.errors import ConfigError
from millrace.core.protocols import Capability
from millrace.inference.backend import (
    EmbeddedBackend,
    check_capabilities,
    load_backend,
    seed_warnings,
)
from millrace.inference.embedded.build import engine_of
from millrace.inference.embedded.kv.paged_attention import PAGED_ATTENTION

ALL = frozenset(Capability)
BARRIER = {"interrupt": "barrier"}
CORE_ONLY = {"weights": {"interrupt": "drain"}, "journal": {"partial_every_s": 0}}


@dataclass(frozen=True)
class Sized(MinimalBackend):
    size: int = 1


def config(**settings) -> RunConfig:
    return RunConfig(model="m", **{**CORE_ONLY, **settings})


def test_embedded_backend_is_the_default_with_all_capabilities():
    assert load_backend(EngineConfig()) == EmbeddedBackend()
    assert EmbeddedBackend.capabilities == ALL


def test_backend_can_be_a_user_class_with_options():
    found = load_backend(EngineConfig(type=f"{__name__}:Sized", options={"size": 3}))
    assert found.size == 3


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"type": "embeded"}, "did you mean 'embedded'"),
        ({"type": f"{__name__}:Sized", "options": {"sise": 3}}, "did you mean 'size'"),
        ({"options": {"size": 3}}, "Unknown setting 'engine.options.size'"),
        ({"options": {"kv_bytes": 0}}, "'engine.options.kv_bytes' = 0: input should be greater"),
        ({"options": {"block_tokens": "4"}}, "'engine.options.block_tokens' = '4': "),
        ({"type": "no.such.module:Backend"}, "No module named"),
    ],
)
def test_unknown_backend_is_refused(settings, message):
    with pytest.raises(ConfigError, match=message):
        load_backend(EngineConfig(**settings))


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


def test_recurrent_states_are_part_of_the_bytes_of_kv():
    model = tiny_model("qwen3_next")
    model.set_attn_implementation(PAGED_ATTENTION)
    options = EmbeddedBackend(kv_bytes=2000)
    reason = r"KV block of \d+ bytes and the recurrent states of \d+ bytes; raise it, or lower"
    with pytest.raises(ConfigError, match=reason):
        engine_of(model, letter_tokenizer(), config=EngineConfig(), version=0, options=options)


def test_speculation_takes_single_steps_and_refuses_others():
    assert EmbeddedBackend(speculation="on").launch_steps == 1
    assert EmbeddedBackend(speculation="auto").launch_steps is None, "the default of the device"
    assert EmbeddedBackend(speculation="auto", decode_steps=8).launch_steps == 8
    config = EngineConfig(options={"speculation": "on", "decode_steps": 8})
    with pytest.raises(ConfigError, match="decode_steps = 8 excludes speculation = 'on'"):
        load_backend(config)
