"""The verifier "json_schema": checks that a completion is JSON and fits a schema."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from millrace.config.section import NonEmptyStr
from millrace.core.plugins import check_exactly_one, plugin
from millrace.core.records import Prompt
from millrace.scoring.verifiers.answers import last_block, require_package, text_of


@plugin
class JsonSchema:
    """1 if the completion parses and validates against the schema, otherwise 0. The schema is read
    once, when the verifier is created. References to other documents are not followed, so nothing
    is fetched."""

    __name__ = "json_schema"

    schema: dict[str, Any] | None = None
    """The schema. Set either `schema` or `path`."""
    path: NonEmptyStr | None = None
    """JSON file with the schema."""
    extract: bool = True
    """Check the last ```json block, if there is one, instead of the whole completion."""

    def __post_init__(self) -> None:
        require_package("jsonschema", verifier="json_schema")
        check_exactly_one("json_schema needs one schema", schema=self.schema, path=self.path)
        if self.path is not None:
            object.__setattr__(self, "schema", _read(Path(self.path)))
            object.__setattr__(self, "path", None)  # workers get the schema, not the path
        from jsonschema import SchemaError

        try:
            _validator(self.schema)
        except SchemaError as error:
            raise ValueError(f"the schema is not valid: {error.message}") from None

    def __call__(self, completions: Sequence[Prompt], **columns: Any) -> list[float]:
        validator = _validator(self.schema)
        return [self._score(text_of(completion), validator) for completion in completions]

    def _score(self, text: str, validator: Any) -> float:
        block = last_block(text, tags=("json",)) if self.extract else None
        try:
            value = json.loads(text if block is None else block, parse_constant=_refuse)
            return float(validator.is_valid(value))
        except (ValueError, RecursionError):  # not JSON, or nested too deeply
            return 0.0


def _read(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"path = {str(path)!r} cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise ValueError(f"path = {str(path)!r} is not JSON: {error}") from None


def _validator(schema: Any) -> Any:
    from jsonschema.validators import validator_for
    from referencing import Registry

    kind = validator_for(schema)
    kind.check_schema(schema)
    return kind(schema, registry=Registry())


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")
