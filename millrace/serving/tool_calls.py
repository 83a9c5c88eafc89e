"""Tool calls in the text of a model: JSON between <tool_call> tags, as Hermes and Qwen write it."""

import json
import re
import secrets
from typing import Any

_CALL = re.compile(r"<tool_call>\s*(.*?)\s*</tool_call>", re.DOTALL)


class ToolFormat:
    openers = ("<tool_call>",)

    def parse(self, text: str) -> tuple[str, list[dict[str, Any]]]:
        """The text without its calls, and the calls; with one that cannot be read, the whole is
        text."""
        calls = []
        for match in _CALL.finditer(text):
            try:
                table = json.loads(match[1])
                name, arguments = table["name"], table.get("arguments", {})
            except (ValueError, TypeError, KeyError, AttributeError):
                return text, []
            if not isinstance(name, str) or not isinstance(arguments, dict):
                return text, []
            function = {"name": name, "arguments": arguments}
            id = f"call_{secrets.token_hex(8)}"
            calls.append({"id": id, "type": "function", "function": function})
        return (_CALL.sub("", text).strip(), calls) if calls else (text, [])
