"""An Arrow IPC file or stream (Feather 2, what `datasets` keeps in its cache), read record batch by record batch."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pyarrow as pa

from batchinfer.errors import InputFileError
from batchinfer.io.batches import BATCH_BYTES, BATCH_ROWS, rows_without_columns
from batchinfer.io.data_file import DataFile, LocalFile, read_head
from batchinfer.io.kinds import ARROW_MAGIC, ARROW_STREAM_MAGIC, FEATHER_1_MAGIC

STREAM_END = b"\xff\xff\xff\xff\x00\x00\x00\x00"


class ArrowTable:
    """Its schema and number of rows, and its rows as batches. Local files are mapped, so that only a packed batch takes memory."""

    def __init__(self, file: DataFile) -> None:
        self._file = file
        head = read_head(file)
        if head.startswith(FEATHER_1_MAGIC):
            raise InputFileError(f"{file.label}: Feather version 1 is not read; write it again with pyarrow.feather.write_feather")
        self._streamed = head.startswith(ARROW_STREAM_MAGIC)
        if not self._streamed and not head.startswith(ARROW_MAGIC):
            raise InputFileError(f"{file.label}: the content is not Arrow IPC (it begins with {head[:4]!r}); name it after what it is")
        with self._explained(), self._opened() as source:
            if self._streamed:
                _check_end(source)
                reader = pa.ipc.open_stream(source)
                self.schema: pa.Schema = reader.schema
                self.num_rows: int = sum(batch.num_rows for batch in reader)
            else:
                self.schema = pa.ipc.open_file(source).schema
                self.num_rows = sum(batch.num_rows for batch in self._record_batches(source, [0] if len(self.schema) else []))

    def batches(self, start: int, stop: int, columns: list[str]) -> Iterator[tuple[int, pa.RecordBatch]]:
        """Yield (row in the file, batch) for rows `start` to `stop`."""
        if not columns:
            yield from rows_without_columns(max(0, start), stop)
            return
        indices = sorted(self.schema.get_field_index(name) for name in columns)
        first = 0
        with self._explained(), self._opened() as source:
            for whole in self._record_batches(source, indices):
                low, high = max(first, start), min(first + whole.num_rows, stop)
                rows = max(1, min(BATCH_ROWS, BATCH_BYTES * max(1, whole.num_rows) // max(1, whole.get_total_buffer_size())))
                for at in range(low, high, rows):
                    yield at, whole.slice(at - first, min(rows, high - at)).select(columns)
                first += whole.num_rows
                if first >= stop:
                    return

    def _record_batches(self, source: Any, indices: list[int]) -> Iterator[pa.RecordBatch]:
        options = pa.ipc.IpcReadOptions(included_fields=indices, use_threads=False)
        if self._streamed:
            yield from pa.ipc.open_stream(source, options=options)
            return
        reader = pa.ipc.open_file(source, options=options)
        for index in range(reader.num_record_batches):
            yield reader.get_batch(index)

    def _opened(self) -> Any:
        return pa.memory_map(self._file.table()) if isinstance(self._file, LocalFile) else self._file.table()

    @contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except (pa.ArrowException, OSError, EOFError) as error:
            if isinstance(error, OSError) and error.errno is not None:
                raise InputFileError(f"{self._file.label}: cannot be read: {error.strerror}") from None
            first_line = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise InputFileError(f"{self._file.label}: the Arrow data is cut off or damaged ({first_line}); was it copied whole?") from None


def _check_end(source: Any) -> None:
    """A stream that lacks its end mark may lack batches too, and Arrow's own reader does not notice."""
    source.seek(max(0, source.size() - len(STREAM_END)))
    if source.read(len(STREAM_END)) != STREAM_END:
        raise EOFError("the stream has no end mark")
    source.seek(0)
