"""Every built-in order keeps the contract, and so does the one in docs/explanation/buffer.md."""

import re
from pathlib import Path
from typing import Any

import pytest
from sampler_contract import SamplerContract

from millrace.controller.orders import ORDERS, build_sampler

PAGE = Path(__file__).parents[2] / "docs" / "explanation" / "buffer.md"


@pytest.mark.parametrize("order", ORDERS, scope="class")
class TestBuiltIn(SamplerContract):
    @pytest.fixture(scope="class")
    @classmethod
    def sampler(cls, order):
        return build_sampler({"type": order})


class TestOwn(SamplerContract):
    @pytest.fixture(scope="class")
    @classmethod
    def sampler(cls, tmp_path_factory) -> Any:
        file = tmp_path_factory.mktemp("user") / "orders.py"
        file.write_text(re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.S)[0])
        return build_sampler({"type": f"{file}:Shortest", "beyond": 2})
