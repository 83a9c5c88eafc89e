"""A backend without any capability passes the core of the contract."""

import dataclasses
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import pytest
from engine_contract import MAX_CONTEXT, EngineContract, OpenEngine
from engine_rig import make_request
from fakes import make_completion
from in_process_engine import open_in_process
from minimal_backend import MinimalBackend

from millrace.config import EngineConfig
from millrace.core.errors import TaskError
from millrace.core.protocols import Engine
from millrace.core.records import Sampling
from millrace.inference.backend import EngineSpec


def open_minimal(model_path: Path) -> AbstractAsyncContextManager[Any]:
    config = EngineConfig(max_context=MAX_CONTEXT)
    spec = EngineSpec(config=config, model_path=str(model_path), version=0)
    return open_in_process(MinimalBackend(), spec, interrupt="drain")


class TestMinimalEngine(EngineContract):
    @pytest.fixture
    def open_engine(self) -> OpenEngine:
        return open_minimal

    @pytest.mark.parametrize(
        ("changes", "capability"),
        [
            ({"partial": make_completion("ab")}, "resuming partial completions"),
            ({"adapter": "judge"}, "named LoRA adapters per request"),
            ({"sampling": Sampling(grammar='root ::= "a"')}, "grammar-constrained sampling"),
            *(
                ({"sampling": Sampling(**changed)}, "penalties, logit biases and top logprobs")
                for changed in (
                    {"presence_penalty": 0.5},
                    {"frequency_penalty": 0.5},
                    {"logit_bias": ((3, 1.0),)},
                    {"top_logprobs": 2},
                )
            ),
        ],
    )
    async def test_request_that_needs_a_missing_capability_is_refused(
        self, engine: Engine, changes: dict[str, Any], capability: str
    ):
        with pytest.raises(TaskError, match=f"needs {capability}"):
            await engine.generate(dataclasses.replace(make_request(), **changes))
