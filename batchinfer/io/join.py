"""Input rows and their stored results, side by side, in input order and constant memory."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from batchinfer.errors import InputFileError, OutputError
from batchinfer.io.json_rows import raw_text
from batchinfer.io.partial import PartialFile, PartialRow
from batchinfer.io.record import InputRow
from batchinfer.io.results import ResultColumns
from batchinfer.io.source import Source

RAW_COLUMN = "raw"


@dataclass(frozen=True, slots=True)
class KeptColumns:
    """Which input columns go to the output."""

    keep: frozenset[str] | None = None  # None: all
    drop: frozenset[str] = frozenset()

    @property
    def all(self) -> bool:
        """True when no column is left out."""
        return self.keep is None and not self.drop

    def names(self, names: list[str]) -> list[str]:
        """Those of `names` that are kept, in their order."""
        return [name for name in names if (self.keep is None or name in self.keep) and name not in self.drop]


@dataclass(frozen=True, slots=True)
class Join:
    """What the finish needs: the rows, their results, and which columns stand in the output."""

    source: Source
    partial: PartialFile
    start: int
    stop: int | None
    columns: ResultColumns
    kept: KeptColumns
    openai: bool = False  # rows and results are lines of OpenAI's batch format
    model: str = ""  # named in these
    typed: tuple[int, int | None] | None = None  # rows whose values decide column types, where not the joined ones alone

    def result_of(self, position: int) -> PartialRow:
        """The row's stored result."""
        stored = self.partial.try_get(position)
        if stored is None:
            raise OutputError(f"{self.partial.path}: the result of row {position:,} is missing; run the same command again")
        return stored

    def line_rows(self) -> Iterator[tuple[InputRow, PartialRow]]:
        """Each row of a line format with its result; raises when the input is not what it was."""
        for row in self.source.rows(self.start, self.stop):
            stored = self.result_of(row.position)
            if row.digest() != stored.digest:
                raise InputFileError(f"{row.place} changed while the job ran; start again with --overwrite")
            yield row, stored

    def carried(self, row: InputRow) -> dict[str, Any]:
        """The input columns that stand in the output; a row that could not be read is kept as `raw`."""
        self.source.parse(row)
        if row.values is None or has_clash(row.values, self.columns.reserved):
            return {RAW_COLUMN: raw_text(row.raw)}
        if self.kept.all:
            return row.values
        return {name: row.values[name] for name in self.kept.names(list(row.values))}


def has_clash(values: dict[str, Any], names: tuple[str, ...]) -> bool:
    """True when a column of the row has the name of a result column."""
    return any(name in values for name in names)
