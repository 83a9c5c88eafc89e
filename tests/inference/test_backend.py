"""Engine backends by name, and their options."""

from dataclasses import dataclass

import pytest
from architectures import tiny_model
from engine_rig import letter_tokenizer
from minimal_backend import MinimalBackend

from millrace.config import EngineConfig
from millrace.core.errors import ConfigError
from millrace.core.protocols import Capability
from millrace.inference.backend import EmbeddedBackend, load_backend
from millrace.inference.embedded.build import engine_of
from millrace.inference.embedded.kv.paged_attention import PAGED_ATTENTION


@dataclass(frozen=True)
class Sized(MinimalBackend):
    size: int = 1


def test_embedded_backend_is_the_default_with_all_capabilities():
    assert load_backend(EngineConfig()) == EmbeddedBackend()
    assert EmbeddedBackend.capabilities == frozenset(Capability)


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
