"""What the columns of a table can be used for, by their types."""

from __future__ import annotations

import pyarrow as pa

from batchinfer.errors import InputFileError
from batchinfer.io.arrow_cells import LISTS, decoded_type


def check_column_types(types: dict[str, pa.DataType], prompt: str | None, messages: str | None, token_ids: str | None) -> None:
    """Raise `InputFileError` naming column and type for a column that can hold no prompt."""
    wanted = {
        prompt: (_is_text, "text"),
        messages: (lambda kind: _is_text(kind) or _is_list(kind), "a list of role/content structs, or JSON text"),
        token_ids: (lambda kind: _is_text(kind) or _is_ids(kind), "a list of integers, or JSON text"),
    }
    for name, (fits, what) in wanted.items():
        if name is None or name not in types or pa.types.is_null(types[name]):
            continue
        if not fits(_plain_type(types[name])):
            raise InputFileError(f"column {name!r} has type {types[name]}; it must be {what}")


def _plain_type(kind: pa.DataType) -> pa.DataType:
    kind = decoded_type(kind)
    return _plain_type(kind.storage_type) if isinstance(kind, pa.BaseExtensionType) else kind


def _is_text(kind: pa.DataType) -> bool:
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind))


def _is_list(kind: pa.DataType) -> bool:
    return any(is_kind(kind) for is_kind, _ in LISTS)


def _is_ids(kind: pa.DataType) -> bool:
    return _is_list(kind) and (pa.types.is_integer(kind.value_type) or pa.types.is_null(kind.value_type))
