"""Rows from Parquet files, batch by batch: the columns that prompts need as Python values, all of them as Arrow."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from batchinfer.errors import InputFileError
from batchinfer.io.record import InputRow

BATCH_ROWS = 512
BUFFER_BYTES = 1 << 18
LISTS: tuple[tuple[Callable[[pa.DataType], bool], Callable[[pa.DataType], pa.DataType]], ...] = (
    (pa.types.is_list, pa.list_),
    (pa.types.is_large_list, pa.large_list),
    (pa.types.is_fixed_size_list, pa.list_),
    (pa.types.is_list_view, pa.list_),
    (pa.types.is_large_list_view, pa.large_list),
)


class ParquetSource:
    """One row for each table row; files of one input share a schema or can be brought to one."""

    kind = "parquet"

    def __init__(self, files: tuple[Path, ...]) -> None:
        self.files = files
        self._rows_in = [_checked_metadata(path).num_rows for path in files]
        self.num_rows: int | None = sum(self._rows_in)
        self.schema: pa.Schema = _common_schema(files)
        self._used: list[str] = []
        self._position = 0

    @property
    def column_types(self) -> dict[str, pa.DataType]:
        """Type of each column, by name."""
        return {field.name: field.type for field in self.schema}

    def use_columns(self, names: list[str]) -> None:
        """Choose the columns that `rows()` reads: what prompts and parameters need, nothing else."""
        self._used = [name for name in names if name in self.schema.names]

    def rows(self, start: int = 0, stop: int | None = None) -> Iterator[InputRow]:
        """Yield rows `start` to `stop` with the chosen columns as values."""
        for position, file, first_row, batch in self._batches(start, stop, self._used):
            name = file.name if len(self.files) > 1 else ""
            columns = [(field.name, python_values(column)) for field, column in zip(batch.schema, batch.columns, strict=True)]
            names = [column_name for column_name, _ in columns]
            cells: Iterator[tuple[Any, ...]] = (
                zip(*[values for _, values in columns], strict=True) if columns else iter([()] * batch.num_rows)
            )
            for offset, row in enumerate(cells):
                self._position = position + offset
                yield InputRow(position + offset, first_row + offset, name, values=dict(zip(names, row, strict=True)), unit="row")

    def tables(self, start: int = 0, stop: int | None = None, columns: list[str] | None = None) -> Iterator[tuple[int, pa.RecordBatch]]:
        """Yield (position of the first row, batch) in the common schema."""
        wanted = self.schema.names if columns is None else columns
        for position, _file, _line, batch in self._batches(start, stop, wanted):
            yield position, _conform(batch, self.schema, wanted)

    def _batches(self, start: int, stop: int | None, columns: list[str]) -> Iterator[tuple[int, Path, int, pa.RecordBatch]]:
        assert self.num_rows is not None
        end = self.num_rows if stop is None else min(stop, self.num_rows)
        file_start = 0
        for path, num_rows in zip(self.files, self._rows_in, strict=True):
            if file_start < end and file_start + num_rows > start:
                for first, batch in _file_batches(path, start - file_start, end - file_start, columns):
                    yield file_start + first, path, first, batch
            file_start += num_rows

    def count(self, start: int = 0, stop: int | None = None) -> int:
        """How many rows there are from `start` to `stop`."""
        assert self.num_rows is not None
        return max(0, (self.num_rows if stop is None else min(stop, self.num_rows)) - start)

    def parse(self, row: InputRow) -> None:
        """Nothing is left to do: a table row has its values."""

    def fraction_read(self) -> float:
        """Share of the rows that were read."""
        return min(1.0, (self._position + 1) / self.num_rows) if self.num_rows else 1.0


def _checked_metadata(path: Path) -> pq.FileMetaData:
    try:
        with pq.ParquetFile(path) as file:
            metadata = file.metadata
            names = file.schema_arrow.names
    except (pa.ArrowException, OSError, EOFError) as error:
        raise InputFileError(_explain(path, error)) from None
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise InputFileError(f"{path}: Parquet with two columns named {twice[0]!r}; rename one of them")
    return metadata


def _explain(path: Path, error: BaseException) -> str:
    size = path.stat().st_size
    if size == 0:
        return f"{path}: the file is empty (0 bytes), not Parquet; was it copied whole?"
    with path.open("rb") as file:
        head = file.read(4)
    if head != b"PAR1":
        return f"{path}: the content is not Parquet (it begins with {head!r}); name it after what it is"
    first_line = str(error).splitlines()[0] if str(error) else type(error).__name__
    return f"{path}: the Parquet file is cut off or damaged ({first_line}); was it copied whole?"


def _common_schema(files: tuple[Path, ...]) -> pa.Schema:
    schemas = []
    for path in files:
        try:
            schemas.append(pq.read_schema(path))
        except (pa.ArrowException, OSError) as error:
            raise InputFileError(_explain(path, error)) from None
    if len(schemas) == 1:
        return schemas[0]
    try:
        return pa.unify_schemas(schemas, promote_options="permissive")
    except pa.ArrowException as error:
        names = ", ".join(path.name for path in files[:5])
        raise InputFileError(f"the Parquet files {names} cannot be read as one table: {str(error).splitlines()[0]}") from None


def _file_batches(path: Path, start: int, stop: int, columns: list[str]) -> Iterator[tuple[int, pa.RecordBatch]]:
    """Yield (row in the file, batch) for rows `start` to `stop`; row groups outside are not read."""
    try:
        with pq.ParquetFile(path, pre_buffer=False, buffer_size=BUFFER_BYTES) as file:
            first = 0
            present = [name for name in columns if name in file.schema_arrow.names]
            for group in range(file.metadata.num_row_groups):
                size = file.metadata.row_group(group).num_rows
                if first + size > start and first < stop and size:
                    yield from _group_batches(file, group, first, (start, stop), present)
                first += size
    except (pa.ArrowException, OSError) as error:
        raise InputFileError(_explain(path, error)) from None


def _group_batches(
    file: pq.ParquetFile, group: int, first: int, wanted: tuple[int, int], columns: list[str]
) -> Iterator[tuple[int, pa.RecordBatch]]:
    start, stop = wanted
    if not columns:  # nothing to read, but every row counts
        size = file.metadata.row_group(group).num_rows
        low, high = max(first, start), min(first + size, stop)
        for at in range(low, high, BATCH_ROWS):
            count = min(BATCH_ROWS, high - at)
            yield at, pa.RecordBatch.from_struct_array(pa.array([{}] * count, pa.struct([])))
        return
    for batch in file.iter_batches(BATCH_ROWS, row_groups=[group], columns=columns, use_threads=False):
        low, high = max(first, start), min(first + batch.num_rows, stop)
        if low < high:
            yield low, batch.slice(low - first, high - low).select(columns)
        first += batch.num_rows
        if first >= stop:
            return


def _conform(batch: pa.RecordBatch, schema: pa.Schema, columns: list[str]) -> pa.RecordBatch:
    """The batch with `columns` of the common schema: cast where files differ, null where a file has no such column."""
    fields = [schema.field(name) for name in columns]
    arrays = []
    for field in fields:
        index = batch.schema.get_field_index(field.name)
        if index < 0:
            arrays.append(pa.nulls(batch.num_rows, field.type))
        else:
            column = batch.column(index)
            arrays.append(column if column.type == field.type else column.cast(field.type))
    if not fields:
        return batch
    return pa.RecordBatch.from_arrays(arrays, schema=pa.schema(fields, metadata=schema.metadata))


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


def check_column_types(types: dict[str, pa.DataType], prompt: str | None, messages: str | None, token_ids: str | None) -> None:
    """Raise `InputFileError` naming column and type for a column that can hold no prompt."""
    wanted = {
        prompt: (_is_text, "text"),
        messages: (lambda kind: _is_text(kind) or _is_list(kind), "a list of role/content structs, or JSON text"),
        token_ids: (lambda kind: _is_list(kind) and pa.types.is_integer(kind.value_type), "a list of integers"),
    }
    for name, (fits, what) in wanted.items():
        if name is None or name not in types or pa.types.is_null(types[name]):
            continue
        if not fits(_plain_type(types[name])):
            raise InputFileError(f"column {name!r} has type {types[name]}; it must be {what}")


def _plain_type(kind: pa.DataType) -> pa.DataType:
    return kind.value_type if pa.types.is_dictionary(kind) else kind


def _is_text(kind: pa.DataType) -> bool:
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind))


def _is_list(kind: pa.DataType) -> bool:
    return any(is_kind(kind) for is_kind, _ in LISTS)
