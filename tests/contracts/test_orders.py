"""Every built-in order keeps the contract, and so does the one in docs/explanation/buffer.md."""

import re
from pathlib import Path
from typing import Any

import pytest
from order_contract import OrderContract

from millrace.controller.orders import ORDERS, build_group_order

PAGE = Path(__file__).parents[2] / "docs" / "explanation" / "buffer.md"


@pytest.mark.parametrize("name", ORDERS, scope="class")
class TestBuiltIn(OrderContract):
    @pytest.fixture(scope="class")
    @classmethod
    def order(cls, name):
        return build_group_order({"type": name})


class TestOwn(OrderContract):
    @pytest.fixture(scope="class")
    @classmethod
    def order(cls, tmp_path_factory) -> Any:
        file = tmp_path_factory.mktemp("user") / "orders.py"
        file.write_text(re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.S)[0])
        return build_group_order({"type": f"{file}:Shortest", "beyond": 2})
