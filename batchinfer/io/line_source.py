"""Rows from lines: JSONL, CSV and plain text, packed or not, in constant memory."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import islice
from typing import BinaryIO, Protocol

from batchinfer.errors import InputError
from batchinfer.io.csv_lines import CsvLines
from batchinfer.io.data_file import DataFile
from batchinfer.io.json_rows import BLANK, JsonParser
from batchinfer.io.lines import KEPT_OF_LONG, MAX_LINE_BYTES, Line, whole_text
from batchinfer.io.record import InputRow
from batchinfer.io.unpack import DAMAGE, explain, unpacked

BOM = b"\xef\xbb\xbf"


class LineFormat(Protocol):
    """What makes rows of lines."""

    def records(self, lines: Iterator[Line], name: str) -> Iterator[Line]:
        """Rows among the lines of the file `name`, each with the number of its first line, without line ends."""

    def parse(self, row: InputRow) -> None:
        """Fill the row's values or error."""

    def key(self, name: str) -> bytes:
        """What the values of the rows of this file depend on beside their own bytes."""


class LineSource:
    """One row for each non-blank line or CSV record. Only `\\n` and `\\r\\n` end a line."""

    num_rows: int | None = None

    def __init__(self, files: tuple[DataFile, ...], kind: str, text_columns: tuple[str, ...] = ()) -> None:
        self.files = files
        self.kind = kind
        self._sizes = [file.size for file in files]
        self._bytes_before = 0
        self._open_file: BinaryIO | None = None
        self.csv = CsvLines(text_columns) if kind == "csv" else None
        self._format: LineFormat = self.csv or (JsonLines() if kind == "jsonl" else TextLines())
        if self.csv is not None:
            self.csv.look((name, self._lines(file)) for file, name in self._named())

    def rows(self, start: int = 0, stop: int | None = None) -> Iterator[InputRow]:
        """Yield rows `start` to `stop`, not parsed yet."""
        position = 0
        self._bytes_before = 0
        for (file, name), size in zip(self._named(), self._sizes, strict=True):
            key: bytes | None = None
            for line, raw, whole in self._format.records(self._lines(file), name):
                if stop is not None and position >= stop:
                    return
                if position >= start:
                    if key is None:
                        key = self._format.key(name)
                    row = InputRow(position, line, name, raw, key=key)
                    if whole > MAX_LINE_BYTES:
                        _refuse_long(row, whole)
                    yield row
                position += 1
            self._bytes_before += size

    def _named(self) -> Iterator[tuple[DataFile, str]]:
        for file in self.files:
            yield file, file.name if len(self.files) > 1 else ""

    def count(self, start: int = 0, stop: int | None = None) -> int:
        """How many rows there are from `start` to `stop`."""
        records = (None for file, name in self._named() for _ in self._format.records(self._lines(file), name))
        return max(0, sum(1 for _ in islice(records, stop)) - start)

    def _lines(self, file: DataFile) -> Iterator[Line]:
        """Every physical line with its end; of one beyond the limit the beginning, and how long it is."""
        number = 0
        with file.open() as packed:
            self._open_file = packed
            stream = packed
            try:
                stream = unpacked(packed)
                read = partial(stream.readline, MAX_LINE_BYTES + 1)
                for raw in iter(read, b""):
                    number += 1
                    if number == 1 and raw.startswith(BOM):
                        raw = raw[3:]
                    whole = len(raw)
                    if whole > MAX_LINE_BYTES:
                        end = raw
                        while not end.endswith(b"\n") and (end := read()):
                            whole += len(end)
                        raw = raw[:KEPT_OF_LONG]
                    yield number, raw, whole
            except DAMAGE as error:
                raise explain(file, stream, number, error) from None
            finally:
                self._open_file = None

    def parse(self, row: InputRow) -> None:
        """Fill the row's values or error."""
        if row.error is None:
            self._format.parse(row)

    def fraction_read(self) -> float:
        """Share of the (packed) bytes that were read."""
        total = sum(self._sizes)
        here = self._open_file.tell() if self._open_file is not None and not self._open_file.closed else 0
        return min(1.0, (self._bytes_before + here) / total) if total else 1.0


def _refuse_long(row: InputRow, whole: int) -> None:
    row.key = str(whole).encode()  # only the beginning is kept, so that the length tells such rows apart
    row.error = InputError(
        f"{row.place}: has {whole:,} bytes; a row may have {MAX_LINE_BYTES:,} (its first {KEPT_OF_LONG:,} are kept)", "line_too_long"
    )


def _non_blank(lines: Iterator[Line]) -> Iterator[Line]:
    for number, raw, whole in lines:
        if raw.endswith(b"\n"):
            raw = raw[:-2] if raw.endswith(b"\r\n") else raw[:-1]
        if raw[:1] == b"{" or raw.strip(BLANK):
            yield number, raw, whole


class JsonLines:
    """A row is a JSON object on a line."""

    def __init__(self) -> None:
        self._parser = JsonParser()

    def records(self, lines: Iterator[Line], name: str) -> Iterator[Line]:
        """Non-blank lines."""
        return _non_blank(lines)

    def parse(self, row: InputRow) -> None:
        """Fill the row's values or error."""
        self._parser.parse(row)

    def key(self, name: str) -> bytes:
        """Nothing: a line says all."""
        return b""


class TextLines:
    """A row is a prompt on a line."""

    def records(self, lines: Iterator[Line], name: str) -> Iterator[Line]:
        """Non-blank lines."""
        return _non_blank(lines)

    def parse(self, row: InputRow) -> None:
        """Fill the row's prompt, or its error."""
        text = whole_text(row)
        if text is not None:
            row.values = {"prompt": text}

    def key(self, name: str) -> bytes:
        """Nothing: a line says all."""
        return b""
