"""The finished output as Parquet: the input's Arrow columns as they are, or types inferred from JSON."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import islice
from typing import Any, BinaryIO

import pyarrow as pa
import pyarrow.parquet as pq

from batchinfer.io.infer import ColumnTypes
from batchinfer.io.join import RAW_COLUMN, Join
from batchinfer.io.json_rows import raw_text
from batchinfer.io.json_text import without_nan
from batchinfer.io.line_source import LineSource
from batchinfer.io.logprob_text import ALL_CALLS, ALL_LOGPROBS, ALL_REASONING, ASKED_NAMES, LOGPROBS, PROMPT_LOGPROBS, REASONS, TEXTS
from batchinfer.io.parquet_types import StoredField, explain_unwritten
from batchinfer.io.partial import PartialRow
from batchinfer.io.record import InputRow
from batchinfer.io.results import ERROR, METRICS, NUM_GENERATED, NUM_INPUT, REASON, REASONING, TEXT, TOKEN_IDS, TOOL_CALLS
from batchinfer.io.table_source import TableSource

ERROR_TYPE = pa.struct([pa.field("code", pa.string()), pa.field("message", pa.string())])
FUNCTION_TYPE = pa.struct([pa.field("name", pa.string()), pa.field("arguments", pa.string())])
CALL_TYPE = pa.struct([pa.field("id", pa.string()), pa.field("type", pa.string()), pa.field("function", FUNCTION_TYPE)])
RESULT_TYPES = {
    TEXT: pa.string(),
    REASON: pa.string(),
    NUM_INPUT: pa.int64(),
    NUM_GENERATED: pa.int64(),
    ERROR: ERROR_TYPE,
    TOKEN_IDS: pa.list_(pa.int32()),
    TOOL_CALLS: pa.list_(CALL_TYPE),
    REASONING: pa.string(),
    METRICS: pa.struct(
        [
            *(pa.field(f"{stage}_seconds", pa.float64()) for stage in ("queue", "prefill", "decode")),
            *(pa.field(name, pa.int64()) for name in ("cached_tokens", "preemptions")),
        ]
    ),
}
TOKEN_FIELDS = [
    pa.field("token", pa.string()),
    pa.field("token_id", pa.int32()),
    pa.field("logprob", pa.float64()),
    pa.field("bytes", pa.list_(pa.int32())),
]
TOKENS_TYPE = pa.list_(pa.struct([*TOKEN_FIELDS, pa.field("top", pa.list_(pa.struct(TOKEN_FIELDS)))]))
RESULT_TYPES |= {
    TEXTS: pa.list_(pa.string()),
    REASONS: pa.list_(pa.string()),
    LOGPROBS: TOKENS_TYPE,
    ALL_LOGPROBS: pa.list_(TOKENS_TYPE),
    PROMPT_LOGPROBS: TOKENS_TYPE,
    ALL_CALLS: pa.list_(pa.list_(CALL_TYPE)),
    ALL_REASONING: pa.list_(pa.string()),
}
BATCH_ROWS = 1024
BATCH_BYTES = 16 << 20
GROUP_ROWS = 1 << 16
GROUP_BYTES = 64 << 20


def result_names(join: Join) -> tuple[str, ...]:
    """The result columns' names without the prefix, in order: also those that some row asked for."""
    return (*join.columns.plain_names, *join.partial.members(ASKED_NAMES))


def write_parquet(join: Join, file: BinaryIO) -> None:
    """Write the whole output table."""
    names = result_names(join)
    carried, batches = _from_table(join, names) if isinstance(join.source, TableSource) else _from_lines(join, names)
    added = [pa.field(join.columns.prefix + name, RESULT_TYPES[name]) for name in names]
    schema = pa.schema([*carried, *added], metadata=carried.metadata)
    with pq.ParquetWriter(file, schema) as writer:
        held: list[pa.RecordBatch] = []
        for batch in batches:
            held.append(batch)
            if sum(item.num_rows for item in held) >= GROUP_ROWS or sum(item.nbytes for item in held) >= GROUP_BYTES:
                _write_group(writer, held, schema)
                held = []
        _write_group(writer, held, schema)


def _write_group(writer: pq.ParquetWriter, batches: list[pa.RecordBatch], schema: pa.Schema) -> None:
    if not batches:
        return
    table = pa.Table.from_batches([pa.RecordBatch.from_arrays(batch.columns, schema=schema) for batch in batches], schema)
    try:
        writer.write_table(table)
    except pa.ArrowException as error:
        raise explain_unwritten(table, error) from None


def _result_arrays(stored: list[PartialRow], names: tuple[str, ...]) -> list[pa.Array]:
    fields = json.loads(b"[{" + b"},{".join([item.fragment for item in stored]) + b"}]") if stored else []
    return [pa.array([item.get(name) for item in fields], RESULT_TYPES[name]) for name in names]


def _from_table(join: Join, added: tuple[str, ...]) -> tuple[pa.Schema, Iterator[pa.RecordBatch]]:
    source = join.source
    assert isinstance(source, TableSource)
    names = join.kept.names(source.schema.names)
    stored_fields = [StoredField.of(source.schema.field(name)) for name in names]
    schema = pa.schema([stored.field for stored in stored_fields], metadata=source.schema.metadata)

    def batches() -> Iterator[pa.RecordBatch]:
        for position, batch in source.tables(join.start, join.stop, names):
            stored = [join.result_of(position + offset) for offset in range(batch.num_rows)]
            carried = [field.array(column) for field, column in zip(stored_fields, batch.columns, strict=True)]
            arrays = [*carried, *_result_arrays(stored, added)]
            yield pa.RecordBatch.from_arrays(arrays, names=[*names, *(join.columns.prefix + name for name in added)])

    return schema, batches()


def _from_lines(join: Join, added: tuple[str, ...]) -> tuple[pa.Schema, Iterator[pa.RecordBatch]]:
    types = ColumnTypes()
    for row in join.source.rows(*(join.typed or (join.start, join.stop))):
        types.add(_cells(join, row))
    if isinstance(join.source, LineSource) and join.source.csv is not None:  # a column that is not all numbers is the text that it was
        join.source.csv.keep_text(types.keep_text())
    if RAW_COLUMN in types.columns:  # after the named columns, where it is only there for unreadable lines
        types.columns[RAW_COLUMN] = types.columns.pop(RAW_COLUMN)
    schema = types.schema()

    def batches() -> Iterator[pa.RecordBatch]:
        rows = join.line_rows()
        while chunk := list(_by_bytes(islice(rows, BATCH_ROWS))):
            cells = [types.folded(_cells(join, row)) for row, _ in chunk]
            arrays = [types.array(name, [item.get(name) for item in cells]) for name in types.columns]
            arrays += _result_arrays([stored for _, stored in chunk], added)
            yield pa.RecordBatch.from_arrays(arrays, names=[*schema.names, *(join.columns.prefix + name for name in added)])

    return schema, batches()


def _by_bytes(rows: Iterator[tuple[InputRow, PartialRow]]) -> Iterator[tuple[InputRow, PartialRow]]:
    size = 0
    for row, stored in rows:
        yield row, stored
        size += len(row.raw)
        if size >= BATCH_BYTES:
            return


def _cells(join: Join, row: InputRow) -> dict[str, Any]:
    carried = join.carried(row)
    try:
        return carried if row.plain else {name: without_nan(value) for name, value in carried.items()}
    except RecursionError:
        return {RAW_COLUMN: raw_text(row.raw)}
