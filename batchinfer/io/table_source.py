"""Rows from Parquet and Arrow files, batch by batch: the columns that prompts need as Python values, all of them as Arrow."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any, Protocol

import pyarrow as pa

from batchinfer.errors import InputFileError
from batchinfer.io.arrow_cells import decoded, decoded_type, python_values
from batchinfer.io.arrow_file import ArrowTable
from batchinfer.io.data_file import DataFile
from batchinfer.io.parquet_file import ParquetTable
from batchinfer.io.record import InputRow


class TableFile(Protocol):
    """A file with typed columns."""

    schema: pa.Schema
    num_rows: int

    def batches(self, start: int, stop: int, columns: list[str]) -> Iterator[tuple[int, pa.RecordBatch]]:
        """Yield (row in the file, batch of these columns) for rows `start` to `stop`, in constant memory."""


class TableSource:
    """One row for each table row; files of one input share a schema or can be brought to one."""

    def __init__(self, files: tuple[DataFile, ...], kind: str) -> None:
        self.kind = kind
        self._tables: list[TableFile] = [ParquetTable(file) if kind == "parquet" else ArrowTable(file) for file in files]
        self._names = [file.name if len(files) > 1 else "" for file in files]
        for file, table in zip(files, self._tables, strict=True):
            _refuse_twins(file, table.schema)
        self.num_rows: int | None = sum(table.num_rows for table in self._tables)
        self.schema: pa.Schema = _common_schema(files, [table.schema for table in self._tables])
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
        for position, name, first_row, batch in self._batches(start, stop, self._used):
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
        for position, _name, _line, batch in self._batches(start, stop, wanted):
            yield position, _conform(batch, self.schema, wanted)

    def _batches(self, start: int, stop: int | None, columns: list[str]) -> Iterator[tuple[int, str, int, pa.RecordBatch]]:
        assert self.num_rows is not None
        end = self.num_rows if stop is None else min(stop, self.num_rows)
        file_start = 0
        for table, name in zip(self._tables, self._names, strict=True):
            if file_start < end and file_start + table.num_rows > start:
                present = [column for column in columns if column in table.schema.names]
                for first, batch in table.batches(start - file_start, min(end - file_start, table.num_rows), present):
                    yield file_start + first, name, first, batch
            file_start += table.num_rows

    def count(self, start: int = 0, stop: int | None = None) -> int:
        """How many rows there are from `start` to `stop`."""
        assert self.num_rows is not None
        return max(0, (self.num_rows if stop is None else min(stop, self.num_rows)) - start)

    def parse(self, row: InputRow) -> None:
        """Nothing is left to do: a table row has its values."""

    def fraction_read(self) -> float:
        """Share of the rows that were read."""
        return min(1.0, (self._position + 1) / self.num_rows) if self.num_rows else 1.0


def _refuse_twins(file: DataFile, schema: pa.Schema) -> None:
    twice, times = next(iter(Counter(schema.names).most_common(1)), ("", 0))
    if times > 1:
        raise InputFileError(f"{file.label}: a table with two columns named {twice!r}; rename one of them")


def _common_schema(files: tuple[DataFile, ...], schemas: list[pa.Schema]) -> pa.Schema:
    """One schema for all files: columns by name, in order of appearance, numbers widened, text and nulls brought together."""
    if len(schemas) == 1:
        return schemas[0]
    try:
        return pa.unify_schemas(schemas, promote_options="permissive")
    except pa.ArrowException:
        plain = [pa.schema([field.with_type(decoded_type(field.type)) for field in schema], schema.metadata) for schema in schemas]
    try:
        return pa.unify_schemas(plain, promote_options="permissive")
    except pa.ArrowException as error:
        names = ", ".join(file.name for file in files[:5])
        raise InputFileError(f"the files {names} cannot be read as one table: {str(error).splitlines()[0]}") from None


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
            arrays.append(column if column.type == field.type else decoded(column).cast(field.type))
    if not fields:
        return batch
    return pa.RecordBatch.from_arrays(arrays, schema=pa.schema(fields, metadata=schema.metadata))
