"""Results to stdout or a pipe: in input order as soon as the order allows, or as they finish."""

from __future__ import annotations

import os
import sys

from batchinfer.errors import OutputError
from batchinfer.io.join import Join
from batchinfer.io.jsonl_out import line_of_any, output_lines
from batchinfer.io.partial import PartialRow
from batchinfer.io.record import InputRow


class ReaderGone(Exception):
    """Whoever read our output has gone away."""


def check_stream(path: str) -> None:
    """Raise `OutputError` when stdout, where it is the output, was closed when the process started.

    Its number then belongs to the first file that is opened, so this is not for `os.dup` to find out.
    """
    if path == "-" and sys.__stdout__ is None:
        raise OutputError("-o -: stdout is closed; give it somewhere to go, or a file with -o")


class Outlet:
    """An open stdout, pipe or device that takes lines."""

    def __init__(self, path: str) -> None:
        self._path = path
        try:
            self._fd = os.dup(1) if path == "-" else os.open(path, os.O_WRONLY | os.O_CLOEXEC)
        except OSError as error:
            raise OutputError(f"{path}: cannot be written: {error.strerror}") from None

    def write(self, line: bytes) -> None:
        """Write a line whole."""
        try:
            while line:
                line = line[os.write(self._fd, line) :]
        except BrokenPipeError:
            raise ReaderGone from None
        except OSError as error:
            raise OutputError(f"{self._path}: {error.strerror}") from None

    def close(self) -> None:
        """Close the output; errors that only show now are errors."""
        try:
            os.close(self._fd)
        except OSError as error:
            raise OutputError(f"{self._path}: {error.strerror}") from None


class OrderedStream:
    """Writes each row once all rows before it are written; what finished early waits in the partial file."""

    def __init__(self, join: Join, outlet: Outlet) -> None:
        self._join = join
        self._lines = output_lines(join)
        self._next = join.start
        self._outlet = outlet

    def emit_ready(self) -> None:
        """Write every row whose turn has come."""
        while self._join.partial.index.has(self._next):
            self._outlet.write(next(self._lines))
            self._next += 1


class UnorderedStream:
    """Writes each row as it finishes; nothing is kept."""

    def __init__(self, join: Join, outlet: Outlet) -> None:
        self._join = join
        self._outlet = outlet

    def emit(self, row: InputRow, stored: PartialRow) -> None:
        """Write a row's line."""
        self._outlet.write(line_of_any(self._join, row, stored))
