"""Arrow types for columns of JSON: observed value by value; what does not fit one type becomes JSON text."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa

from batchinfer.io.json_text import dump_json, encode_json

BOOL, INT, WIDE_INT, FLOAT, TEXT = "bool", "int", "wide int", "float", "text"
EXACT_INT = 2**53  # larger integers have no exact float beside them
MAX_FIELDS = 256  # an object with more keys than this is a dictionary, not a record
MAX_DEPTH = 16
MAX_COLUMNS = 4096  # keys that differ from row to row are data, not columns
OTHER_COLUMNS = "other_columns"
ARROW = {BOOL: pa.bool_(), INT: pa.int64(), WIDE_INT: pa.int64(), FLOAT: pa.float64(), TEXT: pa.string()}
MEETING = {frozenset((INT, WIDE_INT)): WIDE_INT, frozenset((INT, FLOAT)): FLOAT}


class Mixed(Exception):
    """Values that no one Arrow type holds."""


@dataclass(slots=True)
class Observed:
    """What was seen so far: a scalar kind, or items, or fields; nothing yet means only nulls."""

    scalar: str | None = None
    items: Observed | None = None
    fields: dict[str, Observed] | None = None

    def add(self, value: Any, depth: int = 0) -> None:
        """Widen to hold `value`, or raise `Mixed`."""
        if value is None:
            return
        if isinstance(value, dict):
            self._only("fields")
            if self.fields is None:
                self.fields = {}
            if depth >= MAX_DEPTH:
                raise Mixed
            for name, item in value.items():
                self.fields.setdefault(name, Observed()).add(item, depth + 1)
            if len(self.fields) > MAX_FIELDS:
                raise Mixed
        elif isinstance(value, list):
            self._only("items")
            if self.items is None:
                self.items = Observed()
            if depth >= MAX_DEPTH:
                raise Mixed
            for item in value:
                self.items.add(item, depth + 1)
        else:
            self._only("scalar")
            self._add_scalar(_scalar_kind(value))

    def _only(self, form: str) -> None:
        for name in ("scalar", "items", "fields"):
            if name != form and getattr(self, name) is not None:
                raise Mixed

    def _add_scalar(self, kind: str) -> None:
        if self.scalar is None or self.scalar == kind:
            self.scalar = kind
            return
        meeting = MEETING.get(frozenset((self.scalar, kind)))
        if meeting is None:
            raise Mixed
        self.scalar = meeting

    def arrow_type(self) -> pa.DataType:
        """The Arrow type that holds everything seen, or `Mixed`."""
        if self.items is not None:
            return pa.list_(self.items.arrow_type())
        if self.fields is not None:
            if not self.fields or not all(_encodable(name) for name in self.fields):
                raise Mixed
            return pa.struct([pa.field(name, inside.arrow_type()) for name, inside in self.fields.items()])
        return ARROW[self.scalar] if self.scalar is not None else pa.string()


def _scalar_kind(value: Any) -> str:
    if isinstance(value, bool):
        return BOOL
    if isinstance(value, int):
        if abs(value) <= EXACT_INT:
            return INT
        if -(2**63) <= value < 2**63:
            return WIDE_INT
        raise Mixed
    return FLOAT if isinstance(value, float) else TEXT


def _encodable(name: str) -> bool:
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True


@dataclass(slots=True)
class ColumnTypes:
    """Types of all columns of a JSONL file, in order of first appearance."""

    columns: dict[str, Observed | None] = field(default_factory=dict)  # None: mixed, JSON text
    other: str | None = None  # the column for what is beyond the limit

    def add(self, values: dict[str, Any]) -> None:
        """Note one row."""
        columns = self.columns
        for name, value in values.items():
            observed = columns.get(name, MISSING)
            if observed is None:
                continue
            if observed is MISSING:
                if len(columns) >= MAX_COLUMNS:
                    self._overflow()
                    continue
                observed = columns[name] = Observed()
            try:
                observed.add(value)
            except Mixed:
                columns[name] = None

    def _overflow(self) -> None:
        if self.other is None:
            self.other = OTHER_COLUMNS
            while self.other in self.columns:
                self.other += "_"
            self.columns[self.other] = None

    def folded(self, values: dict[str, Any]) -> dict[str, Any]:
        """The row with all that has no column of its own in one."""
        if self.other is None:
            return values
        rest = {name: value for name, value in values.items() if name not in self.columns or name == self.other}
        return {**values, self.other: rest or None}

    def keep_text(self) -> list[str]:
        """Take columns of mixed type for plain text, for a source that can give all their values as text; their names."""
        mixed = [name for name, observed in self.columns.items() if observed is None and name != self.other]
        self.columns.update({name: Observed(scalar=TEXT) for name in mixed})
        return mixed

    def schema(self) -> pa.Schema:
        """Arrow schema; mixed columns are strings of JSON."""
        fields = []
        shown = distinct([*self.columns])
        for name, observed in self.columns.items():
            try:
                kind = pa.string() if observed is None else observed.arrow_type()
            except Mixed:
                self.columns[name] = None
                kind = pa.string()
            fields.append(pa.field(shown[name], kind))
        return pa.schema(fields)

    def array(self, name: str, values: list[Any]) -> pa.Array:
        """The column's values as Arrow; call `schema` first."""
        observed = self.columns[name]
        if observed is None:
            texts = [None if value is None else encode_json(dump_json(value)).decode() for value in values]
            return pa.array(texts, pa.string())
        kind = observed.arrow_type()
        try:
            return pa.array(values, kind)
        except UnicodeEncodeError:
            return pa.array([_whole_characters(value) for value in values], kind)


MISSING = Observed()


def printable(name: str) -> str:
    """A column name that UTF-8 can hold."""
    return name.encode("utf-8", "backslashreplace").decode()


def distinct(names: list[str]) -> dict[str, str]:
    """Each name as UTF-8 can hold it; one that would then read like another gets a number."""
    shown = {name: name for name in names if printable(name) == name}
    taken = set(shown)
    for name in names:
        if name in shown:
            continue
        text, number = printable(name), 2
        while text in taken:
            text, number = f"{printable(name)}_{number}", number + 1
        shown[name] = text
        taken.add(text)
    return shown


def _whole_characters(value: Any) -> Any:
    if isinstance(value, str):
        return value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    if isinstance(value, dict):
        return {key: _whole_characters(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_whole_characters(item) for item in value]
    return value
