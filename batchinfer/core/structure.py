"""What a row's answer must look like (`Structure`): the ways in which rows ask for it, and what the engine asks of it.

A structure is text in a canonical form, so that equal ones are compiled once. Schemas keep the order of their keys:
answers give properties in that order.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Protocol

import numpy as np

from batchinfer.errors import InputError

MAX_BYTES = 256 << 10  # of a schema, regex, grammar, or list of choices
MAX_DEPTH = 64  # of a schema
MAX_CHOICES = 10_000
FORMAT_TYPES = ("text", "json_object", "json_schema")
STRUCTURE_NAMES = frozenset(
    {"response_format", "structured_outputs", "guided_json", "guided_regex", "guided_choice", "guided_grammar", "guided_json_object"}
)
SILENT = ("name", "description", "strict")  # beside a schema: they change nothing


class StructureKind(StrEnum):
    """In which language a structure is written."""

    JSON = "json"  # a JSON Schema
    REGEX = "regex"
    CHOICE = "choice"  # a JSON list of strings
    GRAMMAR = "grammar"  # Lark, or EBNF as llama.cpp writes it
    CALLS = "calls"  # tool calls: a form as `calls.py` has it


TITLES = {
    StructureKind.JSON: "the JSON schema",
    StructureKind.REGEX: "the regex",
    StructureKind.CHOICE: "the list of choices",
    StructureKind.GRAMMAR: "the grammar",
    StructureKind.CALLS: "tool_choice with the schemas of these tools",
}


@dataclass(frozen=True, slots=True)
class Structure:
    """A form that an answer must have. Equal structures are compiled once."""

    kind: StructureKind
    text: str

    @property
    def title(self) -> str:
        """What messages call it."""
        return TITLES[self.kind]


ANY_OBJECT = Structure(StructureKind.JSON, '{"type":"object"}')


def structure_asked(wishes: Mapping[str, Any]) -> Structure | None:
    """What one set of parameters asks for, by whichever of `STRUCTURE_NAMES` it does; several at once are refused."""
    asked = {name: structure for name, value in wishes.items() if (structure := parse_structure(name, value)) is not None}
    if len(asked) > 1:
        raise _wrong(f"{' and '.join(asked)} both say what the answer must look like; give one of them")
    return next(iter(asked.values()), None)


def parse_structure(name: str, value: Any) -> Structure | None:
    """The structure that a parameter `name` asks for with `value`; None where it asks for plain text.

    Raises `InputError` that says what is wrong, for everything that can be told without compiling it.
    """
    if isinstance(value, Structure):
        return value
    if name.startswith("guided_"):
        return _one_of({name.removeprefix("guided_"): value}, name)
    value = from_text(name, value)
    if not isinstance(value, Mapping):
        raise _wrong(f"{name} must be an object, got {_show(value)}")
    return _response_format(name, value) if name == "response_format" else _one_of(value, name)


def from_text(name: str, value: Any) -> Any:
    """A table's cell may hold the object as JSON text."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        raise _wrong(f"{name} is text that is not JSON: {_show(value)}") from None


def _response_format(name: str, value: Mapping[str, Any]) -> Structure | None:
    kind = value.get("type")
    if kind not in FORMAT_TYPES:
        raise _wrong(f"{name}.type must be one of {', '.join(FORMAT_TYPES)}, got {_show(kind)}")
    if kind == "text":
        return None
    if kind == "json_object":
        return ANY_OBJECT
    inner = value.get("json_schema")
    if not isinstance(inner, Mapping):
        raise _wrong(f"{name}.json_schema must be an object that holds a schema, got {_show(inner)}")
    unknown = [key for key in inner if key not in (*SILENT, "schema")]
    if unknown:
        raise _wrong(f"{name}.json_schema.{unknown[0]} is not a field that this version knows; the schema belongs under `schema`")
    schema = inner.get("schema")
    if not isinstance(schema, Mapping):
        raise _wrong(f"{name}.json_schema.schema must be an object, got {_show(schema)}")
    return _json(schema, f"{name}.json_schema.schema")


def _one_of(value: Mapping[str, Any], name: str) -> Structure | None:
    given = {key: item for key, item in value.items() if item is not None and item is not False}
    if not given:
        return None
    if len(given) > 1:
        raise _wrong(f"{name} holds {' and '.join(map(str, given))}; give one of them")
    key, item = next(iter(given.items()))
    place = name if name.startswith("guided_") else f"{name}.{key}"
    if key == "json_object":
        if item is not True:
            raise _wrong(f"{place} must be true or false, got {_show(item)}")
        return ANY_OBJECT
    if key == "json":
        schema = from_text(place, item)
        if not isinstance(schema, Mapping):
            raise _wrong(f"{place} must be a JSON schema, an object, got {_show(schema)}")
        return _json(schema, place)
    if key == "choice":
        return _choice(item, place)
    if key not in ("regex", "grammar"):
        raise _wrong(f"{place} is not supported by this version; use json, json_object, regex, choice or grammar")
    if not isinstance(item, str) or not item:
        raise _wrong(f"{place} must be text, got {_show(item)}")
    return Structure(StructureKind(key), bounded(item, place))


def _json(schema: Mapping[str, Any], place: str) -> Structure:
    if depth_of(schema) > MAX_DEPTH:
        raise _wrong(f"{place} is nested more than {MAX_DEPTH} levels deep")
    try:
        text = json.dumps(schema, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    except (TypeError, ValueError) as error:
        raise _wrong(f"{place} cannot be written as JSON: {error}") from None
    return Structure(StructureKind.JSON, bounded(text, place))


def _choice(item: Any, place: str) -> Structure:
    if not isinstance(item, list | tuple) or not item or not all(isinstance(text, str) and text for text in item):
        raise _wrong(f"{place} must be a list of texts, none of them empty, got {_show(item)}")
    if len(item) > MAX_CHOICES:
        raise _wrong(f"{place} has {len(item):,} entries; at most {MAX_CHOICES:,} are allowed")
    return Structure(StructureKind.CHOICE, bounded(json.dumps(list(dict.fromkeys(item)), ensure_ascii=False), place))


def bounded(text: str, place: str) -> str:
    """The text of a structure, or `InputError` that names `place` where it is too long or no Unicode."""
    try:
        size = len(text.encode())
    except UnicodeEncodeError:
        raise _wrong(f"{place} holds half a surrogate pair, which is not valid Unicode text") from None
    if size > MAX_BYTES:
        raise _wrong(f"{place} is {size:,} bytes long; at most {MAX_BYTES:,} are allowed")
    return text


def depth_of(value: Any) -> int:
    """Levels of objects and lists, without recursion."""
    depth, level = 0, [value]
    while level := [item for item in level if isinstance(item, Mapping | list | tuple)]:
        depth += 1
        if depth > MAX_DEPTH:
            break
        level = [inner for item in level for inner in (item.values() if isinstance(item, Mapping) else item)]
    return depth


def _show(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def _wrong(message: str) -> InputError:
    return InputError(message, "invalid_structured_output")


class RowEndings(Protocol):
    """Knows of running rows whose structure is complete: nothing may follow."""

    def ended(self, slots: np.ndarray) -> np.ndarray | None:
        """Which of the slots, int64 [R], are complete with the token just appended, bool [R]; None: none of them asks."""

    def whole(self, slot: int) -> bool:
        """True where the slot's last token is part of its text, though it ended the row."""


class NeverEnds:
    """No row has a structure."""

    def ended(self, slots: np.ndarray) -> np.ndarray | None:
        """None has ended."""
        return None

    def whole(self, slot: int) -> bool:
        """Rows end with a token of their own."""
        return False


class Structures(Protocol):
    """What the engine asks about structures of rows that come in and that end. `T` items without a structure just pass."""

    def ahead(self, items: Iterator[Any], structure_of: Callable[[Any], Structure | None]) -> Iterator[Any]:
        """The items in order, each once its structure is compiled (or has failed to be); None: nothing just now."""

    def require(self, structure: Structure | None) -> None:
        """Compile it now if it is not. Raises `InputError` where that cannot be done."""

    def judged(self, result: Any, request: Any) -> Any:
        """The result of a request, or in its place the failed one of an answer that finished and is not what was asked for."""


class NoStructures:
    """Of an engine that constrains nothing: rows that ask for it are refused."""

    def ahead(self, items: Iterator[Any], structure_of: Callable[[Any], Structure | None]) -> Iterator[Any]:
        """The items as they are."""
        return items

    def require(self, structure: Structure | None) -> None:
        """Refuse whatever asks."""
        if structure is not None:
            raise InputError("structured output is not supported by this engine", "unsupported_parameter")

    def judged(self, result: Any, request: Any) -> Any:
        """The result as it is."""
        return result


def choices_of(structure: Structure) -> list[str]:
    """The texts of a list of choices."""
    texts: list[str] = json.loads(structure.text)
    return texts
