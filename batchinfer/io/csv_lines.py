"""Rows from CSV and TSV: quoted cells over several lines, text kept as it stands, numbers where nothing is lost by it.

The form is RFC 4180's: a cell that begins with a quote ends at the next single one, and two in a row are one of the
text's own. What does not fit is that row's error. An empty cell is null, a quoted empty one (`""`) is empty text.
"""

from __future__ import annotations

import re
from collections import Counter, deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from hashlib import blake2b
from itertools import islice

from batchinfer.errors import InputError, InputFileError
from batchinfer.io.lines import MAX_LINE_BYTES, Line, whole_text
from batchinfer.io.record import InputRow

SAMPLE_ROWS = 1000
DELIMITERS = (",", ";", "\t")
INTEGER = re.compile(r"0|-?[1-9][0-9]{0,17}")
FRACTION = re.compile(r"-?[0-9]+(\.[0-9]+)?(e[+-]?[0-9]+)?")
BLANK_LINES = (b"\n", b"\r\n", b"")
QUOTE = ord('"')


@dataclass(frozen=True, slots=True)
class Header:
    """A file's first record."""

    names: tuple[str, ...]
    delimiter: str
    digest: bytes  # of the line: what a row's values depend on beside its own bytes


class CsvLines:
    """Splits records and cells; the header and the first rows of an input settle names and which columns are numbers.

    A column is numeric when every cell of the first 1,000 rows is a number that reads back as the same text (`7` and
    `0.5` do; `007`, `1.50` and `1e5` do not). A later cell that is not such a number stays text.
    """

    def __init__(self, text_columns: tuple[str, ...] = ()) -> None:
        self._headers: dict[str, Header] = {}
        self._text = set(text_columns)
        self._numeric: frozenset[str] = frozenset()

    def look(self, files: Iterable[tuple[str, Iterator[Line]]]) -> None:
        """Read the headers of all files, and the first rows."""
        seen: dict[str, bool] = {}
        count = 0
        for name, lines in files:
            for number, raw, _ in islice(self.records(lines, name), max(1, SAMPLE_ROWS - count)):
                count += 1
                row = InputRow(0, number, name, raw)
                for column, cell in (self._cells(row) or {}).items():
                    if cell is not None:
                        seen[column] = seen.get(column, True) and not isinstance(number_of(cell), str)
        self._numeric = frozenset(column for column, is_numeric in seen.items() if is_numeric and column not in self._text)

    def keep_text(self, columns: Iterable[str]) -> None:
        """Take these columns for text from now on."""
        self._numeric -= frozenset(columns)

    def records(self, lines: Iterator[Line], name: str) -> Iterator[Line]:
        """Every record behind the header; a quote that is never closed costs its own line, not the file."""
        waiting: deque[Line] = deque()
        header: Header | None = None
        while (line := waiting.popleft() if waiting else next(lines, None)) is not None:
            if line[1] in BLANK_LINES:
                continue
            delimiter = header.delimiter if header is not None else _delimiter_of(line[1], name)
            record = line
            if QUOTE in line[1] and line[2] <= MAX_LINE_BYTES and _is_open(line[1], False, delimiter.encode()):
                record = _joined(line, lines, waiting, delimiter.encode())
            if header is None:
                header = self._headers[name] = _header_of(record, delimiter, name)
            else:
                yield record[0], _without_end(record[1]), record[2]

    def parse(self, row: InputRow) -> None:
        """Fill the row's values or error."""
        cells = self._cells(row)
        if cells is not None:
            row.values = {name: number_of(cell) if cell is not None and name in self._numeric else cell for name, cell in cells.items()}

    def key(self, name: str) -> bytes:
        """The file's header."""
        return self._headers[name].digest

    def _cells(self, row: InputRow) -> dict[str, str | None] | None:
        header = self._headers[row.file]
        text = whole_text(row)
        if text is None:
            return None
        try:
            cells = split_record(text, header.delimiter)
        except InputError as error:
            row.error = InputError(f"{row.place}: {error}", error.code)
            return None
        if len(cells) != len(header.names):
            row.error = InputError(f"{row.place}: has {len(cells):,} cells, the header has {len(header.names):,}", "wrong_columns")
            return None
        return dict(zip(header.names, cells, strict=True))


def number_of(cell: str) -> int | float | str:
    """The number that the cell spells and that reads back as the same text, else the text."""
    if INTEGER.fullmatch(cell):
        return int(cell)
    if FRACTION.fullmatch(cell) and repr(number := float(cell)) == cell:
        return number
    return cell


def split_record(text: str, delimiter: str) -> list[str | None]:
    """The cells of a record, or `InputError`."""
    if '"' not in text:
        return [cell or None for cell in text.split(delimiter)]
    cells: list[str | None] = []
    at, end = 0, len(text)
    while True:
        if text.startswith('"', at):
            close = _closing(text, at + 1, '"')
            if close < 0:
                raise InputError(f"the quote at character {at + 1:,} is never closed", "invalid_csv")
            cells.append(text[at + 1 : close].replace('""', '"'))
            at = close + 1
            if at < end and text[at] != delimiter:
                raise InputError(
                    f"text behind the closing quote at character {at:,}; a quote inside a cell is written twice", "invalid_csv"
                )
        else:
            stop = text.find(delimiter, at)
            stop = end if stop < 0 else stop
            cells.append(text[at:stop] or None)
            at = stop
        if at >= end:
            return cells
        at += 1


def _closing(text: str, at: int, quote: str) -> int:
    """Where the quoted cell ends whose text begins at `at`; -1 when it does not."""
    while (at := text.find(quote, at)) >= 0:
        if not text.startswith(quote, at + 1):
            return at
        at += 2
    return -1


def _is_open(line: bytes, inside: bool, delimiter: bytes) -> bool:
    """Whether a quoted cell goes on behind this line; `inside`: one has begun before it."""
    at = 0
    while True:
        if inside or line.startswith(b'"', at):
            at += 0 if inside else 1
            while (at := line.find(b'"', at)) >= 0 and line.startswith(b'"', at + 1):
                at += 2
            if at < 0:
                return True
            inside = False
        at = line.find(delimiter, at)
        if at < 0:
            return False
        at += 1


def _joined(first: Line, lines: Iterator[Line], waiting: deque[Line], delimiter: bytes) -> Line:
    """The record that begins with an open quote. Where nothing closes it, the first line alone, and the others wait for their turn."""
    taken, size = [first], first[2]
    while size <= MAX_LINE_BYTES and (line := waiting.popleft() if waiting else next(lines, None)) is not None:
        taken.append(line)
        size += line[2]
        if line[2] <= MAX_LINE_BYTES and not _is_open(line[1], True, delimiter):
            return first[0], b"".join(raw for _, raw, _ in taken), size
    waiting.extendleft(reversed(taken[1:]))
    return first


def _without_end(raw: bytes) -> bytes:
    if raw.endswith(b"\n"):
        return raw[:-2] if raw.endswith(b"\r\n") else raw[:-1]
    return raw


def _delimiter_of(line: bytes, name: str) -> str:
    """What stands between the header's cells: the mark that it holds most of outside quotes."""
    plain = re.sub(rb'"[^"]*"', b"", line).decode("utf-8", "replace")
    return max(DELIMITERS, key=plain.count)


def _header_of(record: Line, delimiter: str, name: str) -> Header:
    row = InputRow(0, record[0], name, _without_end(record[1]))
    where = f"{name}: " if name else ""
    text = whole_text(row)
    if text is None:
        raise InputFileError(str(row.error))
    try:
        cells = split_record(text, delimiter)
    except InputError as error:
        raise InputFileError(f"{where}the header, {row.unit} {row.line}: {error}") from None
    names = tuple(cell or f"Unnamed: {index}" for index, cell in enumerate(cells))  # as pandas calls an index without a name
    twice, times = Counter(names).most_common(1)[0]
    if times > 1:
        raise InputFileError(f"{where}the header has two columns named {twice!r}; rename one of them")
    return Header(names, delimiter, blake2b(row.raw, digest_size=8).digest())
