"""Whatever bytes or tables come in: as many rows come out, in order, each carried unchanged or an error."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from batchinfer.errors import InputFileError
from batchinfer.io.arrow_cells import python_values
from batchinfer.io.json_text import dump_json, without_nan
from batchinfer.io.parquet_types import StoredField
from tests.job.world import World, read_jsonl

QUICK = settings(
    max_examples=int(os.environ.get("HYPOTHESIS_EXAMPLES", "60")),
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
FIRST = b'{"prompt":"first"}'  # so that the file is never refused as a whole

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters(exclude_categories=())),
    lambda inside: st.lists(inside, max_size=3) | st.dictionaries(st.text(max_size=5), inside, max_size=3),
    max_leaves=8,
)
names = st.sampled_from(
    [
        "prompt",
        "messages",
        "tools",
        "chat_template_kwargs",
        "continue_final_message",
        "tool_choice",
        "stop_repetition",
        "id",
        "max_tokens",
        "sampling_params",
        "x",
        "stop",
        "é",
        "",
    ]
) | st.text(max_size=4)
objects = st.dictionaries(names, json_values, max_size=5)
lines = st.one_of(
    st.binary(max_size=40),
    objects.map(lambda value: json.dumps(value).encode()),
    objects.map(lambda value: json.dumps(value, ensure_ascii=False).encode("utf-8", "surrogatepass")),
    objects.map(lambda value: json.dumps(value).encode()[:-1]),
    st.sampled_from(
        [
            b"{}",
            b" { } ",
            b"[" * 5000,
            b'{"a":' * 3000,
            b'{"prompt":' + b"9" * 5000 + b"}",
            b'{"prompt":"a","prompt":"b"}',
            b"\xef\xbb\xbf{}",
        ]
    ),
).map(lambda line: line.replace(b"\n", b"").replace(b"\r", b""))


def rows_of(data: bytes) -> list[bytes]:
    """What the specification calls a row: a non-blank line, by the plainest code there is."""
    return [line for line in data.removeprefix(b"\xef\xbb\xbf").replace(b"\r\n", b"\n").split(b"\n") if line.strip(b" \t\r")]


def try_object(line: bytes) -> dict[str, Any] | None:
    try:
        value = json.loads(line.decode())
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


@QUICK
@given(st.lists(lines, max_size=8), st.sampled_from([b"\n", b"\r\n", b"\n\n"]))
def test_any_bytes_as_jsonl(parts: list[bytes], ending: bytes) -> None:
    data = ending.join([FIRST, *parts])
    expected = rows_of(data)
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "in.jsonl"
        source.write_bytes(data)
        World().run(source, Path(folder) / "out.jsonl", {"max_tokens": 1})
        out = read_jsonl(Path(folder) / "out.jsonl")
        World().run(source, Path(folder) / "out.parquet", {"max_tokens": 1})
        table = pq.read_table(Path(folder) / "out.parquet")
    assert len(out) == len(expected) == table.num_rows
    for line, row, error in zip(expected, out, table["error"].to_pylist(), strict=True):
        value = try_object(line)
        assert (row["error"] is None) == (error is None)
        if row["error"] is None:
            assert value is not None
        if value is None:
            assert row["raw"] == line.decode("utf-8", "backslashreplace")
            assert row["error"]["code"] in ("invalid_utf8", "invalid_json", "not_an_object")
        elif row["error"] is None or row["error"]["code"] != "reserved_column":
            carried = {name: row[name] for name in value}
            # Numbers such as 1e400 stand in the output as they stood in the input.
            assert json.dumps(without_nan(carried)) == json.dumps(without_nan(value))


def arrow_columns(size: int) -> st.SearchStrategy[pa.Array]:
    def column(kind: pa.DataType, cells: st.SearchStrategy[Any]) -> st.SearchStrategy[pa.Array]:
        return st.lists(st.none() | cells, min_size=size, max_size=size).map(lambda values: pa.array(values, kind))

    small = st.integers(-(2**31), 2**31 - 1)
    wide = st.integers(-(2**63), 2**63 - 1)
    seconds = st.integers(-(2**63) // 1000, (2**63 - 1) // 1000)  # Parquet holds milliseconds
    text = st.text(max_size=6)
    struct = pa.struct([("a", pa.int64()), ("b", pa.string())])
    text_or_list = pa.large_list(pa.string())
    inner = st.fixed_dictionaries({"a": st.none() | small, "b": st.none() | text})
    deep = st.fixed_dictionaries({"deep": st.none() | st.lists(st.none() | inner, max_size=2), "when": st.none() | seconds})
    return st.one_of(
        column(pa.int32(), small),
        column(pa.int64(), wide),
        column(pa.uint64(), st.integers(0, 2**64 - 1)),
        column(pa.float64(), st.floats()),
        column(pa.bool_(), st.booleans()),
        column(pa.string(), text),
        column(pa.large_string(), text),
        st.just(pa.nulls(size)),
        column(pa.uint8(), st.integers(0, 255)),
        column(pa.float32(), st.floats(width=32)),
        column(pa.float16(), st.floats(width=16)),
        column(pa.large_binary(), st.binary(max_size=6)),
        column(pa.binary(3), st.binary(min_size=3, max_size=3)),
        column(pa.date64(), small.map(lambda days: days * 86_400_000)),
        column(pa.time32("s"), st.integers(0, 86_399)),
        column(pa.decimal256(50, 7), st.decimals(-(10**30), 10**30, places=7)),
        column(pa.decimal128(5, 0), st.decimals(-99_999, 99_999, places=0)),
        column(pa.large_list(text_or_list), st.lists(st.none() | st.lists(text, max_size=2), max_size=3)),
        column(pa.list_(pa.float32(), 2), st.lists(st.floats(width=32), min_size=2, max_size=2)),
        column(pa.struct([("deep", pa.list_(struct)), ("when", pa.timestamp("s"))]), deep),
        column(pa.list_(pa.decimal128(8, 3)), st.lists(st.none() | st.decimals(-10_000, 10_000, places=3), max_size=2)),
        column(pa.int64(), wide).map(lambda array: array.dictionary_encode()),
        column(pa.list_(pa.string()), st.lists(text, max_size=2)).map(lambda array: array.cast(pa.list_(pa.large_string()))),
        column(pa.string_view(), text),
        column(pa.string(), text).map(lambda array: array.dictionary_encode()),
        column(pa.binary(), st.binary(max_size=6)),
        column(pa.timestamp("us", tz="UTC"), wide),
        column(pa.timestamp("ns"), wide),
        column(pa.duration("ms"), wide),
        column(pa.date32(), small),
        column(pa.time64("us"), st.integers(0, 86_399_999_999)),
        column(pa.decimal128(20, 2), st.decimals(-(10**10), 10**10, places=2)),
        column(pa.list_(pa.int64()), st.lists(small, max_size=3)),
        column(pa.list_(pa.timestamp("ns")), st.lists(wide, max_size=3)),
        column(struct, st.fixed_dictionaries({"a": st.none() | small, "b": st.none() | text})),
        column(pa.list_(struct), st.lists(st.fixed_dictionaries({"a": small, "b": text}), max_size=2)),
        column(pa.map_(pa.string(), pa.int64()), st.dictionaries(text, small, max_size=2).map(lambda value: list(value.items()))),
    )


def shown(column: pa.ChunkedArray) -> list[str]:
    return [str(column.slice(index, 1).combine_chunks()) for index in range(len(column))]


@st.composite
def tables(draw: st.DrawFn) -> pa.Table:
    size = draw(st.integers(0, 5))
    prompts = draw(st.lists(st.none() | st.text(max_size=8), min_size=size, max_size=size))
    kind = draw(st.sampled_from([pa.string(), pa.large_string(), pa.string_view()]))
    columns = {"prompt": pa.array(prompts, kind)}
    for name in draw(st.lists(st.sampled_from(["id", "x", "max_tokens", "stop", "seed", "é", "sampling_params"]), unique=True, max_size=4)):
        columns[name] = draw(arrow_columns(size))
    return pa.table(columns)


@QUICK
@given(tables(), st.integers(1, 3))
def test_any_table_as_parquet(table: pa.Table, group: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "in.parquet"
        pq.write_table(table, source, row_group_size=group)
        stored = pq.read_table(source)
        World().run(source, Path(folder) / "out.parquet", {"max_tokens": 1})
        out = pq.read_table(Path(folder) / "out.parquet")
        World().run(source, Path(folder) / "out.jsonl", {"max_tokens": 1})
        lines = read_jsonl(Path(folder) / "out.jsonl")
    carried = out.select(table.column_names)
    assert carried.schema.equals(stored.schema)
    for ours, theirs in zip(carried.columns, stored.columns, strict=True):  # as text: NaN equals NaN there
        assert shown(ours) == shown(theirs)
    assert [row["error"] is None for row in lines] == [error is None for error in out["error"].to_pylist()]
    assert [row["prompt"] for row in lines] == table["prompt"].to_pylist()
    assert [row["generated_text"] for row in lines] == out["generated_text"].to_pylist()


def arrow_only_columns(size: int) -> st.SearchStrategy[pa.Array]:
    """What Arrow files hold and Parquet files do not, or not in this form."""
    texts = st.lists(st.none() | st.text(max_size=4), min_size=size, max_size=size)
    ints = st.lists(st.none() | st.integers(-9, 9), min_size=size, max_size=size)
    indices = st.lists(st.none() | st.integers(0, 1), min_size=size, max_size=size).map(lambda values: pa.array(values, pa.int8()))

    def coded(values: pa.Array) -> st.SearchStrategy[pa.Array]:
        return indices.map(lambda array: pa.DictionaryArray.from_arrays(array, values))

    def union(values: list[int | None]) -> pa.Array:
        kinds = pa.array([index % 2 for index in range(size)], pa.int8())
        return pa.UnionArray.from_sparse(kinds, [pa.array(values, pa.int64()), pa.array([str(value) for value in values], pa.string())])

    def runs(values: list[Any]) -> pa.Array:
        return pa.RunEndEncodedArray.from_arrays(pa.array(range(1, size + 1), pa.int32()), pa.array(values))

    def nested(values: list[Any]) -> pa.Array:
        return pa.StructArray.from_arrays([pa.array(values, pa.int64()).dictionary_encode(), pa.nulls(size)], ["code", "nothing"])

    return st.one_of(
        texts.map(lambda values: pa.array(values, pa.large_string())),
        texts.map(lambda values: runs(values) if size else pa.array([], pa.string())),
        texts.map(lambda values: pa.array([None if value is None else [value, None] for value in values], pa.list_view(pa.string_view()))),
        texts.map(lambda values: pa.array([[value] for value in values], pa.large_list_view(pa.string()))),
        texts.map(lambda values: pa.array([json.dumps(value) for value in values], pa.json_())),
        texts.map(lambda values: pa.array([{} if value else None for value in values], pa.struct([]))),
        texts.map(lambda values: pa.array([[{}] if value else None for value in values], pa.list_(pa.struct([])))),
        ints.map(union),
        ints.map(nested),
        ints.map(lambda values: pa.array([None if value is None else (value, 1, 10) for value in values], pa.month_day_nano_interval())),
        ints.map(lambda values: pa.array([None if value is None else bytes([value + 9]) * 16 for value in values], pa.uuid())),
        ints.map(lambda values: pa.array([b""] * size, pa.binary(0))),
        ints.map(lambda values: pa.array(values, pa.time32("s"))),
        ints.map(lambda values: pa.array(values, pa.timestamp("s", "Europe/Paris"))),
        ints.map(lambda values: pa.array(values, pa.decimal32(3, 1))),
        coded(pa.array([1, 2])),
        coded(pa.array(["a", "b"], pa.string_view())),
        coded(pa.array([[1, None], None])),
        coded(pa.array([{"x": 1}, None])),
        coded(pa.nulls(2)),
    )


@st.composite
def arrow_tables(draw: st.DrawFn) -> pa.Table:
    size = draw(st.integers(0, 5))
    prompts = draw(st.lists(st.none() | st.text(max_size=8), min_size=size, max_size=size))
    kinds = [pa.string(), pa.large_string(), pa.string_view(), pa.dictionary(pa.int16(), pa.large_string()), pa.json_()]
    columns = {"prompt": pa.array(prompts, draw(st.sampled_from(kinds)))}
    for name in draw(st.lists(st.sampled_from(["id", "x", "y", "é"]), unique=True, max_size=4)):
        columns[name] = draw(arrow_only_columns(size) | arrow_columns(size))
    return pa.table(columns)


def plainly(value: Any) -> Any:
    return json.loads(dump_json(value))


@QUICK
@given(arrow_tables(), st.booleans(), st.sampled_from([None, "lz4", "zstd"]), st.integers(1, 3))
def test_any_table_as_arrow(table: pa.Table, streamed: bool, packing: str | None, chunk: int) -> None:
    """As many rows, in order; cells as they were, or as JSON text where Parquet has no such type."""
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "in.arrow"
        write = pa.ipc.new_stream if streamed else pa.ipc.new_file
        with write(source, table.schema, options=pa.ipc.IpcWriteOptions(compression=packing, unify_dictionaries=True)) as writer:
            writer.write_table(table, max_chunksize=chunk)
        World().run(source, Path(folder) / "out.parquet", {"max_tokens": 1})
        out = pq.read_table(Path(folder) / "out.parquet")
        World().run(source, Path(folder) / "out.jsonl", {"max_tokens": 1})
        lines = read_jsonl(Path(folder) / "out.jsonl")
    assert out.column_names[: table.num_columns] == table.column_names
    assert [row["generated_text"] for row in lines] == out["generated_text"].to_pylist()
    for name in table.column_names:
        cells = [cell for chunk in table[name].chunks for cell in python_values(chunk)]
        stored = [cell for chunk in out[name].chunks for cell in python_values(chunk)]
        if StoredField.of(table.schema.field(name)).as_json:
            stored = [None if cell is None else json.loads(cell) for cell in stored]
        assert plainly([row[name] for row in lines]) == plainly(cells)
        same_unit = table.schema.field(name).type == out.schema.field(name).type
        assert plainly(stored) == plainly(cells) or not same_unit  # Parquet has no seconds: they come back as milliseconds
        assert [cell is None for cell in stored] == [cell is None for cell in cells]


@QUICK
@given(st.binary(max_size=200))
def test_any_bytes_as_parquet_are_refused(data: bytes) -> None:
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "in.parquet"
        source.write_bytes(data)
        with pytest.raises(InputFileError, match="arquet"):
            World().run(source, Path(folder) / "out.jsonl")
