"""Rows from lines: JSONL and plain text, gzipped or not, in constant memory."""

from __future__ import annotations

import gzip
import io
import zlib
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import BinaryIO, cast

from batchinfer.errors import InputError, InputFileError
from batchinfer.io.json_rows import BLANK, JsonParser
from batchinfer.io.record import InputRow

BOM = b"\xef\xbb\xbf"
BUFFER_BYTES = 1 << 20


class LineSource:
    """One row for each non-blank line. Only `\\n` and `\\r\\n` end a line."""

    num_rows: int | None = None

    def __init__(self, files: tuple[Path, ...], kind: str) -> None:
        self.files = files
        self.kind = kind
        self._parser = JsonParser()
        self._sizes = [path.stat().st_size for path in files]
        self._bytes_before = 0
        self._open_file: BinaryIO | None = None

    def rows(self, start: int = 0, stop: int | None = None) -> Iterator[InputRow]:
        """Yield rows `start` to `stop`, not parsed yet."""
        position = 0
        self._bytes_before = 0
        for path, size in zip(self.files, self._sizes, strict=True):
            name = path.name if len(self.files) > 1 else ""
            for line, raw in self._lines(path):
                if stop is not None and position >= stop:
                    return
                if position >= start:
                    yield InputRow(position, line, name, raw)
                position += 1
            self._bytes_before += size

    def count(self, start: int = 0, stop: int | None = None) -> int:
        """How many rows there are from `start` to `stop`."""
        lines = (None for path in self.files for _ in self._lines(path))
        return max(0, sum(1 for _ in islice(lines, stop)) - start)

    def _lines(self, path: Path) -> Iterator[tuple[int, bytes]]:
        number = 0
        try:
            with path.open("rb", buffering=BUFFER_BYTES) as file:
                self._open_file = file
                for raw in _unpacked(file):
                    number += 1
                    if number == 1 and raw.startswith(BOM):
                        raw = raw[3:]
                    if raw.endswith(b"\n"):
                        raw = raw[:-2] if raw.endswith(b"\r\n") else raw[:-1]
                    if raw[:1] == b"{" or raw.strip(BLANK):
                        yield number, raw
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            raise InputFileError(f"{path}: the gzip data is damaged or cut off after line {number}: {error}") from None
        except OSError as error:
            raise InputFileError(f"{path}: cannot be read: {error.strerror or error}") from None
        finally:
            self._open_file = None

    def parse(self, row: InputRow) -> None:
        """Fill the row's values or error."""
        if self.kind == "jsonl":
            self._parser.parse(row)
            return
        try:
            row.values = {"prompt": row.raw.decode()}
        except UnicodeDecodeError as error:
            row.error = InputError(f"{row.place}: not UTF-8: byte 0x{row.raw[error.start]:02x} at byte {error.start + 1}", "invalid_utf8")

    def fraction_read(self) -> float:
        """Share of the (compressed) bytes that were read."""
        total = sum(self._sizes)
        here = self._open_file.tell() if self._open_file is not None and not self._open_file.closed else 0
        return min(1.0, (self._bytes_before + here) / total) if total else 1.0


def _unpacked(file: BinaryIO) -> BinaryIO:
    packed = file.read(2) == b"\x1f\x8b"
    file.seek(0)
    if not packed:
        return file
    return io.BufferedReader(cast(io.RawIOBase, gzip.GzipFile(fileobj=file)), BUFFER_BYTES)
