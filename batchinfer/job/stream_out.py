"""Results to stdout or a pipe, in input order as soon as the order allows."""

from __future__ import annotations

import os

from batchinfer.errors import OutputError
from batchinfer.io.join import Join
from batchinfer.io.jsonl_out import output_lines


class ReaderGone(Exception):
    """Whoever read our output has gone away."""


class OrderedStream:
    """Writes each row once all rows before it are written; what finished early waits in the partial file."""

    def __init__(self, join: Join, path: str) -> None:
        self._join = join
        self._lines = output_lines(join)
        self._next = join.start
        self._path = path
        try:
            self._fd = os.dup(1) if path == "-" else os.open(path, os.O_WRONLY | os.O_CLOEXEC)
        except OSError as error:
            raise OutputError(f"{path}: cannot be written: {error.strerror}") from None

    def emit_ready(self) -> None:
        """Write every row whose turn has come."""
        while self._join.partial.index.has(self._next):
            self._write(next(self._lines))
            self._next += 1

    def _write(self, line: bytes) -> None:
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
