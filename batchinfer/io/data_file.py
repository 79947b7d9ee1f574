"""One file of an input: on this machine, or in an object store that `pyarrow.fs` reaches."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Protocol

from batchinfer.errors import InputFileError

LOCAL_BUFFER_BYTES = 1 << 20
LOCAL_COLUMN_BYTES = 1 << 18


class DataFile(Protocol):
    """A file that can be opened again and again, and told from what it was."""

    @property
    def name(self) -> str:
        """What messages call it among the other files of its input."""

    @property
    def label(self) -> str:
        """Its whole path or address."""

    @property
    def size(self) -> int:
        """Bytes, as they are now on a disk, as they were found in a store."""

    @property
    def column_buffer(self) -> int:
        """Bytes worth reading at once from one column of a table."""

    def open(self) -> BinaryIO:
        """The bytes from the first one on; `InputFileError` when they cannot be read."""

    def table(self) -> Any:
        """What Arrow's readers open: a path, or a file with random access."""

    def stamp(self) -> int | str:
        """What changes when the content does: the modification time in nanoseconds, or a store's tag as text."""


@dataclass(frozen=True, slots=True)
class LocalFile:
    """A file on this machine."""

    path: Path
    name: str = ""

    def __post_init__(self) -> None:
        """Fall back on the path's last part for the name."""
        if not self.name:
            object.__setattr__(self, "name", self.path.name)

    @property
    def label(self) -> str:
        """The path as it was given."""
        return str(self.path)

    @property
    def size(self) -> int:
        """Bytes, now."""
        return self.path.stat().st_size

    @property
    def column_buffer(self) -> int:
        """A quarter of a mebibyte: seeking is cheap."""
        return LOCAL_COLUMN_BYTES

    def open(self) -> BinaryIO:
        """The file, buffered."""
        try:
            return self.path.open("rb", buffering=LOCAL_BUFFER_BYTES)
        except OSError as error:
            raise InputFileError(f"{self.path}: cannot be read: {error.strerror}") from None

    def table(self) -> Any:
        """The path."""
        return str(self.path)

    def stamp(self) -> int | str:
        """Modification time in nanoseconds."""
        return self.path.stat().st_mtime_ns


def read_head(file: DataFile, count: int = 8) -> bytes:
    """The first bytes."""
    with file.open() as opened:
        return opened.read(count)
