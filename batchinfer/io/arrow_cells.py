"""Arrow cells as Python values, and encodings of columns taken back to plain ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pyarrow as pa

LISTS: tuple[tuple[Callable[[pa.DataType], bool], Callable[[pa.DataType], pa.DataType]], ...] = (
    (pa.types.is_list, pa.list_),
    (pa.types.is_large_list, pa.large_list),
    (pa.types.is_fixed_size_list, pa.list_),
    (pa.types.is_list_view, pa.list_),
    (pa.types.is_large_list_view, pa.large_list),
)


def decoded_type(kind: pa.DataType) -> pa.DataType:
    """The type of the cells themselves, without dictionaries, runs and views around or in them."""
    if pa.types.is_dictionary(kind) or pa.types.is_run_end_encoded(kind):
        return decoded_type(kind.value_type)
    if pa.types.is_string_view(kind):
        return pa.string()
    return pa.binary() if pa.types.is_binary_view(kind) else kind


def decoded(column: pa.Array) -> pa.Array:
    """The column in its `decoded_type`."""
    import pyarrow.compute as pc

    if pa.types.is_run_end_encoded(column.type):
        return decoded(pc.run_end_decode(column))
    if pa.types.is_dictionary(column.type):
        values = decoded(column.dictionary)  # first: Arrow takes no items out of arrays of views
        return values.take(column.indices)
    wanted = decoded_type(column.type)
    return column if wanted == column.type else column.cast(wanted)


def python_values(column: pa.Array) -> list[Any]:
    """The column's cells as Python values: times as ISO 8601 text and durations as integers, at any depth.

    By type and not by value, so that a file reads alike whatever else stands in it: Python's own times are coarser
    than Arrow's and end in the year 9999.
    """
    for temporal in (pa.string(), pa.int64()):  # text first; counts where a time is beyond the calendar
        wanted = _without_times(column.type, temporal)
        try:
            values: list[Any] = (column if wanted == column.type else column.cast(wanted)).to_pylist()
        except (pa.ArrowException, ValueError, OverflowError):
            continue
        iso = _iso_of(column.type) if temporal == pa.string() else None
        return values if iso is None else [None if value is None else iso(value) for value in values]
    return [str(column.slice(index, 1)) for index in range(len(column))]


def _iso_of(kind: pa.DataType) -> Callable[[Any], Any] | None:
    """What gives cells of this type, times in them written as Arrow writes them, their ISO form; None: nothing to do."""
    if pa.types.is_timestamp(kind):
        return _iso_time
    if pa.types.is_dictionary(kind):
        return _iso_of(kind.value_type)
    if pa.types.is_struct(kind):
        inside = {field.name: make for field in kind if (make := _iso_of(field.type)) is not None}
        return (lambda cell: {name: _applied(inside.get(name), value) for name, value in cell.items()}) if inside else None
    if pa.types.is_map(kind):
        of_key, of_item = _iso_of(kind.key_type), _iso_of(kind.item_type)
        return (lambda cell: [(_applied(of_key, key), _applied(of_item, item)) for key, item in cell]) if of_key or of_item else None
    if any(is_kind(kind) for is_kind, _ in LISTS):
        of_value = _iso_of(kind.value_type)
        return (lambda cell: [_applied(of_value, value) for value in cell]) if of_value else None
    return None


def _applied(make: Callable[[Any], Any] | None, value: Any) -> Any:
    return value if make is None or value is None else make(value)


def _iso_time(text: str) -> str:
    """`2024-01-02T03:04:05+01:00` for Arrow's `2024-01-02 03:04:05+0100`."""
    text = text.replace(" ", "T", 1)
    return f"{text[:-2]}:{text[-2:]}" if text[-5:-4] in ("+", "-") and text[-4:].isdigit() and "T" in text[:-5] else text


def _without_times(kind: pa.DataType, temporal: pa.DataType) -> pa.DataType:
    if pa.types.is_duration(kind):
        return pa.int64()
    if pa.types.is_date32(kind) or pa.types.is_time32(kind):
        return temporal if temporal == pa.string() else pa.int32()
    if pa.types.is_timestamp(kind) or pa.types.is_date64(kind) or pa.types.is_time64(kind):
        return temporal
    if pa.types.is_dictionary(kind):
        inside = _without_times(kind.value_type, temporal)
        return kind if inside == kind.value_type else inside
    if pa.types.is_struct(kind):
        return pa.struct([field.with_type(_without_times(field.type, temporal)) for field in kind])
    if pa.types.is_map(kind):
        return pa.map_(_without_times(kind.key_type, temporal), _without_times(kind.item_type, temporal))
    for is_kind, make in LISTS:
        if is_kind(kind):
            inside = _without_times(kind.value_type, temporal)
            return kind if inside == kind.value_type else make(inside)
    return kind
