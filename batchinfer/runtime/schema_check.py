"""A second opinion on finished JSON: the jsonschema library reads it against its schema."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

MOST_WORDS = 200


class SchemaCheck:
    """Checks texts against one schema.

    Patterns are left to the grammar, which has followed them in linear time; Python's `re`, which jsonschema would use,
    can take exponential time on a pattern of the user's. So are `format`s, which jsonschema takes for annotations.
    """

    def __init__(self, schema: Any) -> None:
        from jsonschema import validators

        cls = validators.validator_for(
            schema, default=validators.validator_for({"$schema": "https://json-schema.org/draft/2020-12/schema"})
        )
        known = {"pattern": _unread}
        if _has_patterns(schema):  # which property falls under which is the grammar's business, too
            known |= {"patternProperties": _unread, "additionalProperties": _unread}
        extend: Any = validators.extend
        self._validator: Any = extend(cls, known)(schema)

    def fault(self, text: str) -> str | None:
        """What is wrong with the text, None where it is valid."""
        try:
            value = json.loads(text, parse_constant=_no_constant)
        except (ValueError, RecursionError) as error:
            return f"it is not JSON: {error}"[:MOST_WORDS]
        return self.fault_of(value)

    def fault_of(self, value: Any) -> str | None:
        """The same of a value that was read."""
        try:
            found = next(self._validator.iter_errors(value), None)
        except RecursionError:
            return None  # nested beyond what this library can follow; the grammar has
        if found is None:
            return None
        place = found.json_path.removeprefix("$").removeprefix(".") or "the value"
        return f"{place}: {found.message}"[:MOST_WORDS]


def _unread(validator: Any, value: Any, instance: Any, schema: Any) -> Iterator[Any]:
    return iter(())


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON")


def _has_patterns(schema: Any) -> bool:
    level = [schema]
    while level:
        if any(isinstance(item, dict) and "patternProperties" in item for item in level):
            return True
        level = [inner for item in level for inner in (item.values() if isinstance(item, dict) else item) if isinstance(inner, dict | list)]
    return False
