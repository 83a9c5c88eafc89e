"""A JSON schema for tests of grammars."""

import json

import pytest

jsonschema = pytest.importorskip("jsonschema")

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"enum": ["ann", "bob"]},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "notes": {"type": "array", "items": {"type": "string", "maxLength": 3}, "maxItems": 2},
    },
    "required": ["name", "age", "notes"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "person", "schema": SCHEMA}}


def assert_valid(text: str) -> None:
    jsonschema.validate(json.loads(text), SCHEMA)
