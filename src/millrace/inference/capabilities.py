"""Settings and requests that need a capability which an engine backend may lack.

Promise: a run whose settings need what a backend lacks is refused before any worker starts.
Torch-free.
"""

from collections.abc import Iterator

from millrace.config import EngineConfig, RunConfig
from millrace.core.errors import ConfigError, TaskError
from millrace.core.protocols import Capability
from millrace.core.records import Request

_WITHIN_COMPLETIONS = ("swap", "abort", "save")  # weights.interrupt


def check_capabilities(
    config: RunConfig,
    capabilities: frozenset[Capability],
    *,
    has_experts: bool,
    section: str = "engine",
) -> None:
    """Refuse settings that need what the backend of a section lacks."""
    is_policy, name = section == "engine", f"{section}.type"
    needs = _needs(config, has_experts=has_experts) if is_policy else _needs_of_journal(config)
    for setting, capability, remedy in needs:
        if capability not in capabilities:
            raise ConfigError(
                f"{setting} needs {capability.value}, which {name} ="
                f" {config.engine_sections[section].type!r} does not offer; {remedy}, or choose"
                f" another {name}."
            )


def _needs(config: RunConfig, *, has_experts: bool) -> Iterator[tuple[str, Capability, str]]:
    """Each setting that needs a capability, and the remedy if that is missing."""
    sampling, interrupt = config.sampling, config.weights.interrupt
    for name, off in (("top_k", 0), ("top_p", 1.0), ("min_p", 0.0)):
        value = getattr(sampling, name)
        if sampling.temperature > 0 and value != off:
            yield f"sampling.{name} = {value:g}", Capability.KEPT_IDS, f"set it to {off:g}"
    if config.trainer.replay_routes and has_experts:
        setting = "trainer.replay_routes = true with a mixture of experts"
        yield setting, Capability.ROUTES, "set it to false"
    if interrupt == "barrier":  # which promises runs that can be repeated
        yield "weights.interrupt = 'barrier'", Capability.REPRODUCIBLE, "set it to 'drain'"
    if interrupt in _WITHIN_COMPLETIONS:
        setting = f"weights.interrupt = {interrupt!r}"
        remedy = "set it to 'drain'"
        yield setting, Capability.TOKEN_VERSIONS, remedy
        if interrupt == "abort":
            yield setting, Capability.PARTIALS, remedy
    yield from _needs_of_journal(config)
    if (recipe := config.environment.recipe) is not None:
        kind, by = recipe.get("type"), "environment.recipe.by = 'entropy'"
        yield f"environment.recipe = {kind!r}", Capability.PARTIALS, "leave it out"
        if kind == "pivot" and recipe.get("by") == "entropy":
            yield by, Capability.SCORING, "set it to 'surprisal'"
    if config.weights.probe and not config.engine.has_servers:  # which score at temperature 1
        yield "weights.probe = true", Capability.SCORING, "set it to false"
    if config.cluster.share_gpu == "sleep":
        yield "cluster.share_gpu = 'sleep'", Capability.SLEEP, "set it to 'take_turns'"
    if config.lora is not None:
        yield "[lora]", Capability.LORA, "leave it out"
    if config.engine.adapters:
        yield "engine.adapters", Capability.ADAPTERS, "leave them out"


def _needs_of_journal(config: RunConfig) -> Iterator[tuple[str, Capability, str]]:
    """What the journal needs of all engines, those of models that are not trained included."""
    journal, is_synchronous = config.journal, config.weights.interrupt == "barrier"
    if journal.is_on and journal.partial_every_s > 0 and not is_synchronous:
        setting = f"journal.partial_every_s = {journal.partial_every_s:g}"
        yield setting, Capability.PARTIALS, "set it to 0"


def check_request(request: Request, capabilities: frozenset[Capability]) -> None:
    """Refuse a request that needs what the engine's backend lacks."""
    wanted = {
        Capability.PARTIALS: request.partial is not None,
        Capability.GRAMMARS: request.sampling.grammar is not None,
        Capability.ADAPTERS: request.adapter is not None,
        Capability.LOGITS: request.sampling.adjusts_logits or request.sampling.top_logprobs > 0,
    }
    for capability, is_wanted in wanted.items():
        if is_wanted and capability not in capabilities:
            raise TaskError(
                f"Request {request.id!r} needs {capability.value}, which this engine's backend does"
                " not offer; choose another engine.type."
            )


def seed_warnings(config: EngineConfig, capabilities: frozenset[Capability]) -> tuple[str, ...]:
    """A warning if sampling does not depend on the seed of the run."""
    if Capability.SEEDS in capabilities:
        return ()
    return (
        f"engine.type = {config.type!r} does not offer {Capability.SEEDS.value}: a repeated run"
        " samples other tokens.",
    )
