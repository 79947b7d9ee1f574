"""Where each row's result stands in the partial file: 8 bytes a row, on disk, so that memory does not grow."""

from __future__ import annotations

import mmap
import os
import tempfile
from typing import IO

import numpy as np

FIRST_ROWS = 1 << 12


class RowIndex:
    """Maps a row's position to an offset, in a mapped file without a name."""

    def __init__(self) -> None:
        self._file = _try_open()
        self.num_rows = 0  # rows that have an offset
        self._capacity = 0
        self._offsets = np.empty(0, dtype=np.int64)  # offset + 1; 0: nothing there
        self._grow(FIRST_ROWS)

    def _grow(self, capacity: int) -> None:
        fd = -1
        if self._file is not None:
            try:
                # Reserved, not sparse: a full disk must say so here, not kill the process at a write to the map.
                os.posix_fallocate(self._file.fileno(), 0, 8 * capacity)
                fd = self._file.fileno()
            except OSError:
                self._file = None  # the old map stays readable; from here on in memory
        grown = np.frombuffer(mmap.mmap(fd, 8 * capacity), dtype=np.int64)
        if fd == -1:
            grown[: self._capacity] = self._offsets
        self._offsets = grown
        self._capacity = capacity

    def put(self, row: int, offset: int) -> None:
        """Note that the row's result stands at `offset`; a later one takes the place of an earlier one."""
        if row >= self._capacity:
            capacity = self._capacity
            while row >= capacity:
                capacity *= 2
            self._grow(capacity)
        if self._offsets[row] == 0:
            self.num_rows += 1
        self._offsets[row] = offset + 1

    def drop(self, row: int) -> None:
        """Forget the row's result."""
        if self.has(row):
            self.num_rows -= 1
            self._offsets[row] = 0

    def has(self, row: int) -> bool:
        """True when the row has a result."""
        return row < self._capacity and bool(self._offsets[row])

    def try_get(self, row: int) -> int | None:
        """Offset of the row's result, None when it has none."""
        offset = int(self._offsets[row]) if row < self._capacity else 0
        return offset - 1 if offset else None

    def close(self) -> None:
        """Give the disk space back."""
        if self._file is not None:
            self._file.close()


def _try_open() -> IO[bytes] | None:
    try:
        return tempfile.TemporaryFile()
    except OSError:
        return None
