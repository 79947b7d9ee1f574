"""A Parquet file, read row group by row group and, within a large one, batch by batch."""

from __future__ import annotations

from collections.abc import Iterator

import pyarrow as pa
import pyarrow.parquet as pq

from batchinfer.errors import InputFileError
from batchinfer.io.batches import BATCH_BYTES, BATCH_ROWS, rows_without_columns
from batchinfer.io.data_file import DataFile, read_head


class ParquetTable:
    """Its schema and number of rows, and its rows as batches; row groups and columns that nobody asks for are not read."""

    def __init__(self, file: DataFile) -> None:
        self._file = file
        try:
            with pq.ParquetFile(file.table()) as opened:
                self.num_rows = int(opened.metadata.num_rows)
                self.schema: pa.Schema = opened.schema_arrow
        except (pa.ArrowException, OSError, EOFError) as error:
            raise InputFileError(_explain(file, error)) from None

    def batches(self, start: int, stop: int, columns: list[str]) -> Iterator[tuple[int, pa.RecordBatch]]:
        """Yield (row in the file, batch) for rows `start` to `stop`."""
        try:
            with pq.ParquetFile(self._file.table(), pre_buffer=False, buffer_size=self._file.column_buffer) as opened:
                first = 0
                for group in range(opened.metadata.num_row_groups):
                    size = opened.metadata.row_group(group).num_rows
                    if first + size > start and first < stop and size:
                        yield from _group_batches(opened, group, first, (start, stop), columns)
                    first += size
        except (pa.ArrowException, OSError) as error:
            raise InputFileError(_explain(self._file, error)) from None


def _group_batches(
    file: pq.ParquetFile, group: int, first: int, wanted: tuple[int, int], columns: list[str]
) -> Iterator[tuple[int, pa.RecordBatch]]:
    start, stop = wanted
    if not columns:
        size = file.metadata.row_group(group).num_rows
        yield from rows_without_columns(max(first, start), min(first + size, stop))
        return
    rows = _rows_at_once(file.metadata.row_group(group), set(columns))
    for batch in file.iter_batches(rows, row_groups=[group], columns=columns, use_threads=False):
        low, high = max(first, start), min(first + batch.num_rows, stop)
        if low < high:
            yield low, batch.slice(low - first, high - low).select(columns)
        first += batch.num_rows
        if first >= stop:
            return


def _rows_at_once(group: pq.RowGroupMetaData, columns: set[str]) -> int:
    """Rows in a batch: fewer where cells are large."""
    chunks = [group.column(index) for index in range(group.num_columns)]
    size = sum(chunk.total_uncompressed_size for chunk in chunks if chunk.path_in_schema.partition(".")[0] in columns)
    return int(max(1, min(BATCH_ROWS, BATCH_BYTES * group.num_rows // max(1, size))))


def _explain(file: DataFile, error: BaseException) -> str:
    if file.size == 0:
        return f"{file.label}: the file is empty (0 bytes), not Parquet; was it copied whole?"
    head = read_head(file, 4)
    if head != b"PAR1":
        return f"{file.label}: the content is not Parquet (it begins with {head!r}); name it after what it is"
    first_line = str(error).splitlines()[0] if str(error) else type(error).__name__
    return f"{file.label}: the Parquet file is cut off or damaged ({first_line}); was it copied whole?"
