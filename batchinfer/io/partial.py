"""`OUTPUT.partial`: every finished row appended as one complete, checked line, in the order in which rows finish.

A line is `{"row":N,"digest":"...","plain":0|1,"result":{...},"crc":"........"}`; `crc` covers what stands before it.
"""

from __future__ import annotations

import json
import os
import time
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from batchinfer.errors import OutputError
from batchinfer.io.row_index import RowIndex

SYNC_SECONDS = 4.0  # with the wait for whoever syncs and the sync itself: at most 5 s are at stake
READ_BYTES = 1 << 10
ROW_MARK, DIGEST_MARK, DIGEST_DIGITS = b'{"row":', b',"digest":"', 16
RESULT_MARK = b',"result":{'
CRC_MARK = b',"crc":"'
CRC_BYTES = len(CRC_MARK) + 8 + len(b'"}')


@dataclass(slots=True)
class PartialRow:
    """A stored result: which input row it belongs to, and its columns as JSON members without braces."""

    row: int
    digest: str
    plain: bool  # the input line may be copied to the output as it is
    fragment: bytes

    def fields(self) -> dict[str, Any]:
        """The columns as Python values."""
        loaded: dict[str, Any] = json.loads(b"{" + self.fragment + b"}")
        return loaded

    @property
    def failed(self) -> bool:
        """True when the result is an error."""
        return self.fields()["error"] is not None


def encode_line(row: int, digest: str, plain: bool, fragment: str) -> bytes:
    """The line that stores one result."""
    body = f'{{"row":{row},"digest":"{digest}","plain":{1 if plain else 0},"result":{{{fragment}}}'.encode("utf-8", "backslashreplace")
    return b'%s,"crc":"%08x"}\n' % (body, zlib.crc32(body))


def try_decode_line(line: bytes) -> PartialRow | None:
    """The stored result, None when the line is torn or was changed."""
    if line[-3:] != b'"}\n' or line[-CRC_BYTES - 1 : -11] != CRC_MARK:
        return None
    body = line[: -CRC_BYTES - 1]
    if line[-11:-3] != b"%08x" % zlib.crc32(body):
        return None
    # The checksum vouches for the form, so that plain slices do for the head.
    at = body.find(RESULT_MARK)
    comma = body.find(b",")
    digest = body[comma + len(DIGEST_MARK) : comma + len(DIGEST_MARK) + DIGEST_DIGITS].decode("ascii")
    return PartialRow(int(body[len(ROW_MARK) : comma]), digest, body[at - 1 : at] == b"1", body[at + len(RESULT_MARK) : -1])


@dataclass(slots=True)
class Found:
    """What a partial file held when it was opened."""

    rows: int = 0
    failed: int = 0
    damaged_lines: int = 0
    torn_bytes: int = 0


class PartialFile:
    """Appends results, and finds them again by row."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.found = Found()
        try:
            self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
        except OSError as error:
            raise OutputError(f"{path}: cannot be written: {error.strerror}") from None
        self.index = RowIndex()
        self._size = 0
        self._synced_at = time.monotonic()
        self._unsynced = False
        self._sync_error: OutputError | None = None
        self._repair()

    @property
    def size(self) -> int:
        """Bytes in the file."""
        return self._size

    def _repair(self) -> None:
        """Index what is there; cut a torn last line off; leave damaged lines out, so that their rows run again."""
        with open(os.dup(self._fd), "rb", buffering=1 << 20) as file:
            file.seek(0)
            for line in file:
                if not line.endswith(b"\n"):
                    self.found.torn_bytes = len(line)
                    break
                stored = try_decode_line(line)
                if stored is None:
                    self.found.damaged_lines += 1
                else:
                    self.index.put(stored.row, self._size)
                self._size += len(line)
        if self.found.torn_bytes:
            os.ftruncate(self._fd, self._size)
        self.found.rows = self.index.num_rows

    def append(self, row: int, digest: str, plain: bool, fragment: str) -> None:
        """Store a finished row in one write."""
        if self._sync_error is not None:
            raise self._sync_error
        line = encode_line(row, digest, plain, fragment)
        self._write(line)
        self.index.put(row, self._size)
        self._size += len(line)
        self._unsynced = True

    def _write(self, line: bytes) -> None:
        try:
            written = os.write(self._fd, line)
            while written < len(line):  # a nearly full disk takes a part, then says so
                written += os.write(self._fd, line[written:])
        except OSError as error:
            self._cut_back()
            raise OutputError(
                f"{self.path}: {error.strerror}; everything finished is kept: free some space and run the same command again"
            ) from None

    def _cut_back(self) -> None:
        try:
            os.ftruncate(self._fd, self._size)
        except OSError:  # the torn line is repaired when the job is resumed
            return

    def sync_if_due(self) -> None:
        """Push what was appended to the disk, at most every few seconds. For another thread: an error waits for the next append."""
        if self._unsynced and time.monotonic() - self._synced_at >= SYNC_SECONDS:
            try:
                self.sync()
            except OutputError as error:
                self._sync_error = error

    def sync(self) -> None:
        """Push what was appended to the disk."""
        self._unsynced = False  # before, not after: what is appended meanwhile waits for the next time
        self._synced_at = time.monotonic()
        try:
            os.fsync(self._fd)
        except OSError as error:
            raise OutputError(f"{self.path}: {error.strerror}; the last results may be lost") from None

    def try_get(self, row: int) -> PartialRow | None:
        """The row's stored result, None when it has none."""
        offset = self.index.try_get(row)
        if offset is None:
            return None
        want = READ_BYTES
        while True:
            data = os.pread(self._fd, want, offset)
            end = data.find(b"\n")
            if end >= 0:
                return try_decode_line(data[: end + 1])
            if len(data) < want:
                return None
            want *= 4

    def members(self, names: tuple[str, ...]) -> list[str]:
        """Those of `names` that some stored result has as a column; reads the file once."""
        missing = {name: b',"%s":' % name.encode() for name in names}  # within a text its quotes would be escaped
        with open(os.dup(self._fd), "rb", buffering=1 << 20) as file:
            file.seek(0)
            for line in file:
                for name in [name for name, mark in missing.items() if mark in line]:
                    del missing[name]
                if not missing:
                    break
        return [name for name in names if name not in missing]

    def close(self) -> None:
        """Close the file; what was appended stays."""
        os.close(self._fd)
        self.index.close()
