"""The SGLang engine passes the contract, with the capabilities it states, at a fake server."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from engine_contract import MAX_CONTEXT, OpenEngine
from engine_contract_parts import LoraPart, PartialsPart, TokenVersionsPart
from fake_sglang import FakeSglang
from fake_vllm import serving
from in_process_engine import open_in_process

from millrace.config import EngineConfig, LoraConfig
from millrace.core.protocols import Engine
from millrace.inference.backend import EngineSpec, SglangBackend


@asynccontextmanager
async def open_sglang(model_path: Path, *, lora: LoraConfig | None = None) -> AsyncIterator[Engine]:
    config = EngineConfig(type="sglang", kv="recompute", max_context=MAX_CONTEXT)
    spec = EngineSpec(config=config, device="cpu", model_path=str(model_path), version=0, lora=lora)
    with serving(model_path, kind=FakeSglang) as (url, _):
        async with open_in_process(SglangBackend(attach=[url]), spec) as engine:
            yield engine


class TestSglangEngine(PartialsPart, TokenVersionsPart, LoraPart):
    @pytest.fixture
    def open_engine(self) -> OpenEngine:
        return open_sglang
