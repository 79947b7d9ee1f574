"""Arrow types that Parquet cannot hold, and what their columns become instead: plain values, or JSON text."""

from __future__ import annotations

import io
from dataclasses import dataclass

import pyarrow as pa
import pyarrow.parquet as pq

from batchinfer.errors import OutputError
from batchinfer.io.arrow_cells import LISTS, decoded, decoded_type, python_values
from batchinfer.io.json_text import dump_json, encode_json

DICTIONARY_VALUES = (pa.types.is_string, pa.types.is_large_string, pa.types.is_binary, pa.types.is_large_binary)


@dataclass(frozen=True, slots=True)
class StoredField:
    """A column as a Parquet file takes it: its field there, and whether its cells become JSON text."""

    field: pa.Field
    as_json: bool = False

    @classmethod
    def of(cls, field: pa.Field) -> StoredField:
        """As it is where Parquet can hold it; without runs and odd dictionaries; else as JSON text (unions, intervals, empty structs)."""
        for kind in (field.type, decoded_type(field.type)):
            if _is_kept(kind) and _is_written(kind):
                return cls(field.with_type(kind))
        return cls(pa.field(field.name, pa.string(), metadata=field.metadata), as_json=True)

    def array(self, column: pa.Array) -> pa.Array:
        """The column in the field's type."""
        if self.as_json:
            cells = [None if value is None else encode_json(dump_json(value)).decode() for value in python_values(column)]
            return pa.array(cells, pa.string())
        if column.type != self.field.type:
            return decoded(column)
        if pa.types.is_timestamp(column.type) and column.type.unit == "s":  # Parquet has no seconds; some versions let these overflow
            try:
                column.cast(pa.timestamp("ms", column.type.tz))
            except pa.ArrowException as error:
                raise _unwritten(self.field, error) from None
        return _without_coded_nulls(column) if pa.types.is_dictionary(column.type) and column.dictionary.null_count else column


def _without_coded_nulls(column: pa.Array) -> pa.Array:
    """The same cells, nulls among the indices rather than in the dictionary, where Parquet has no place for them."""
    kind, coded = column.type, decoded(column).dictionary_encode()
    return pa.DictionaryArray.from_arrays(coded.indices.cast(kind.index_type), coded.dictionary.cast(kind.value_type), ordered=kind.ordered)


def explain_unwritten(table: pa.Table, error: Exception) -> OutputError:
    """The error for people: the column that cannot be written, and the way out."""
    for field, column in zip(table.schema, table.columns, strict=True):
        try:
            pq.write_table(pa.table({field.name: column}), io.BytesIO())
        except (pa.ArrowException, OSError):
            return _unwritten(field, error)
    return OutputError(f"the table cannot be written as Parquet: {str(error).splitlines()[0]}; nothing finished is lost")


def _unwritten(field: pa.Field, error: Exception) -> OutputError:
    return OutputError(
        f"the column {field.name!r} ({field.type}) cannot be written as Parquet: {str(error).splitlines()[0]}; nothing finished is lost: "
        f"run the same command with --drop-columns {field.name}"
    )


def _is_kept(kind: pa.DataType) -> bool:
    """False for what Arrow writes as something else, or fails to write for some values."""
    if pa.types.is_dictionary(kind):
        return any(is_kind(kind.value_type) for is_kind in DICTIONARY_VALUES)
    if pa.types.is_run_end_encoded(kind) or pa.types.is_union(kind):
        return False
    if pa.types.is_struct(kind):
        return kind.num_fields > 0 and all(_is_kept(field.type) for field in kind)
    if pa.types.is_map(kind):
        return _is_kept(kind.key_type) and _is_kept(kind.item_type)
    if any(is_kind(kind) for is_kind, _ in LISTS):
        return _is_kept(kind.value_type)
    return True


def _is_written(kind: pa.DataType) -> bool:
    """Whether Arrow writes and reads such a column: tried out, for what it can do differs from version to version."""
    file = io.BytesIO()
    try:
        pq.write_table(pa.table({"x": pa.nulls(1, kind)}), file)
        pq.read_table(io.BytesIO(file.getvalue()))
    except (pa.ArrowException, OSError):
        return False
    return True
