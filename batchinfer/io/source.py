"""An input once it was found: its files, the reader for them, and how to tell whether they changed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Protocol

from batchinfer.io.data_file import DataFile, LocalFile
from batchinfer.io.kinds import TABLE_KINDS, without_packing
from batchinfer.io.record import InputRow


class Source(Protocol):
    """Rows in a fixed order that can be read again."""

    kind: str  # "jsonl" | "text" | "csv" | "parquet" | "arrow"
    num_rows: int | None  # of the whole input, where that is known without reading it

    def rows(self, start: int = 0, stop: int | None = None) -> Iterator[InputRow]:
        """Yield rows `start` to `stop` by position; line formats leave parsing to `parse`."""

    def count(self, start: int = 0, stop: int | None = None) -> int:
        """How many rows there are from `start` to `stop`; line formats read the input for it."""

    def parse(self, row: InputRow) -> None:
        """Fill the row's values or error."""

    def fraction_read(self) -> float:
        """How far the latest `rows()` has come, 0 to 1."""


@dataclass(frozen=True, slots=True)
class InputFiles:
    """The files of an input, all of one kind, in reading order.

    `home` names an output in the current folder, for inputs that are more than one file or not of this machine;
    None: the output's place is beside the one file. `text_columns` of CSV files hold text even where it looks like numbers.
    """

    kind: str
    files: tuple[DataFile, ...]
    home: str | None = None
    streamed: bool = False  # stdin or a pipe: to be spooled before anything reads it
    text_columns: tuple[str, ...] = ()

    @property
    def is_table(self) -> bool:
        """True for formats whose rows have typed columns."""
        return self.kind in TABLE_KINDS.values()

    @property
    def paths(self) -> tuple[Path, ...]:
        """Those of the files that lie on this machine."""
        return tuple(file.path for file in self.files if isinstance(file, LocalFile))


def stem_of(name: str) -> str:
    """The name without what says its kind: `a` for `a.jsonl.gz`."""
    return Path(without_packing(name)).stem


def open_source(files: InputFiles) -> Source:
    """The reader for these files."""
    if files.is_table:
        from batchinfer.io.table_source import TableSource

        return TableSource(files.files, files.kind)
    from batchinfer.io.line_source import LineSource

    return LineSource(files.files, files.kind, files.text_columns)


def identity_of(files: tuple[DataFile, ...]) -> list[list[object]]:
    """Name, size and stamp of each file: what a resumed job compares first."""
    return [[file.name, file.size, file.stamp()] for file in files]


def content_digest(files: tuple[DataFile, ...]) -> str:
    """Hash of what the files hold: tells a file that was copied or touched from one that was changed.

    A store's tag stands for the content, so that nothing is fetched once more.
    """
    digest = blake2b(digest_size=16)
    for file in files:
        digest.update(f"{file.name}\0{file.size}\0".encode("utf-8", "surrogateescape"))
        stamp = file.stamp()
        if isinstance(stamp, str):
            digest.update(stamp.encode())
            continue
        with file.open() as opened:
            while chunk := opened.read(1 << 20):
                digest.update(chunk)
    return digest.hexdigest()
