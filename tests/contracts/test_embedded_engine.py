"""The embedded engine passes the contract with all capabilities."""

from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import pytest
from engine_contract import MAX_CONTEXT, OpenEngine
from engine_contract_parts import (
    AdaptersPart,
    GrammarsPart,
    KeptIdsPart,
    LogitsPart,
    LoraPart,
    PartialsPart,
    ReproduciblePart,
    RoutesPart,
    ScoringPart,
    SeedsPart,
    SleepPart,
    TokenVersionsPart,
)
from in_process_engine import open_in_process

from millrace.config import EngineConfig, LoraConfig
from millrace.inference.backend import EmbeddedBackend, EngineSpec


def open_embedded(
    model_path: Path,
    *,
    lora: LoraConfig | None = None,
    reproducible: bool = False,
    **settings: Any,
) -> AbstractAsyncContextManager[Any]:
    config = EngineConfig(max_sequences=8, max_context=MAX_CONTEXT, **settings)
    spec = EngineSpec(
        config=config,
        device="cpu",
        model_path=str(model_path),
        version=0,
        lora=lora,
        records_routes=True,
        reproducible=reproducible,
    )
    return open_in_process(EmbeddedBackend(block_tokens=4, prefill_tokens=16), spec)


class TestEmbeddedEngine(
    KeptIdsPart,
    RoutesPart,
    SeedsPart,
    ReproduciblePart,
    PartialsPart,
    TokenVersionsPart,
    ScoringPart,
    LoraPart,
    AdaptersPart,
    GrammarsPart,
    LogitsPart,
    SleepPart,
):
    @pytest.fixture
    def open_engine(self) -> OpenEngine:
        return open_embedded
