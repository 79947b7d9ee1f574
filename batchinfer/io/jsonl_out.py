"""The finished output as JSONL: the input's own bytes where they are strict JSON, written again where not."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from batchinfer.io.join import RAW_COLUMN, Join
from batchinfer.io.json_rows import raw_text
from batchinfer.io.json_text import dump_json, encode_json
from batchinfer.io.kinds import TABLE_KINDS
from batchinfer.io.openai_out import response_line, response_lines
from batchinfer.io.partial import PartialRow
from batchinfer.io.record import InputRow


def output_lines(join: Join) -> Iterator[bytes]:
    """Yield one complete line for each row, in input order."""
    if join.openai:
        yield from (line for line, _ in response_lines(join))
        return
    if is_table(join):
        yield from _table_lines(join)
        return
    for row, stored in join.line_rows():
        yield line_of(join, row, stored)


def is_table(join: Join) -> bool:
    """True when rows are those of typed columns."""
    return join.source.kind in TABLE_KINDS.values()


def line_of_any(join: Join, row: InputRow, stored: PartialRow) -> bytes:
    """The output line of a row of any format, taken by itself; a table row must hold all columns that are kept."""
    if join.openai:
        return response_line(join, row, stored)[0]
    if not is_table(join):
        return line_of(join, row, stored)
    values = row.values or {}
    return _joined(dump_json({name: values[name] for name in join.kept.names(list(values))}), join, stored)


def line_of(join: Join, row: InputRow, stored: PartialRow) -> bytes:
    """The output line of one row of a line format."""
    if stored.plain and join.kept.all and not join.columns.prefix:
        return _spliced(row.raw, stored.fragment)
    try:
        return _joined(dump_json(join.carried(row)), join, stored)
    except RecursionError:  # deeper than Python writes, though not than it reads
        return _joined(dump_json({RAW_COLUMN: raw_text(row.raw)}), join, stored)


def _spliced(raw: bytes, fragment: bytes) -> bytes:
    """The line's own bytes with the result's members before the closing brace."""
    if b'"' not in raw:  # no member: nothing but padding stands between the braces
        return b"{%s}\n" % fragment
    return b"%s,%s}\n" % (raw[:-1], fragment)


def _joined(carried: str, join: Join, stored: PartialRow) -> bytes:
    fragment = stored.fragment
    if join.columns.prefix:
        fragment = encode_json(dump_json(join.columns.renamed(stored.fields())))[1:-1]
    return b"%s%s%s}\n" % (encode_json(carried[:-1]), b"," if len(carried) > 2 else b"", fragment)


def _table_lines(join: Join) -> Iterator[bytes]:
    from batchinfer.io.arrow_cells import python_values
    from batchinfer.io.table_source import TableSource

    source = join.source
    assert isinstance(source, TableSource)
    names = join.kept.names(source.schema.names)
    for position, batch in source.tables(join.start, join.stop, names):
        columns = [python_values(column) for column in batch.columns]
        cells: Iterator[tuple[Any, ...]] = zip(*columns, strict=True) if columns else iter([()] * batch.num_rows)
        for offset, row in enumerate(cells):
            carried = dump_json(dict(zip(names, row, strict=True)))
            yield _joined(carried, join, join.result_of(position + offset))
