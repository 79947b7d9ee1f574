"""Whole jobs from every format to every other: what a prompt may look like, which columns stay, what is read at all."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
import pytest

from batchinfer.errors import OutputError
from batchinfer.io import infer
from batchinfer.io.arrow_file import ArrowTable
from batchinfer.io.data_file import LocalFile
from batchinfer.io.parquet_file import ParquetTable
from tests.job.test_memory import peak_of
from tests.job.world import World, read_jsonl, write_jsonl

CHAT = [{"role": "user", "content": "hi"}]
RESULTS = ["generated_text", "finish_reason", "num_input_tokens", "num_generated_tokens", "error"]


def write_arrow(path: Path, table: pa.Table, streamed: bool = False, rows: int | None = None) -> Path:
    with (pa.ipc.new_stream if streamed else pa.ipc.new_file)(path, table.schema) as writer:
        writer.write_table(table, max_chunksize=rows)
    return path


def texts(kind: pa.DataType) -> pa.Array:
    return pa.array(["one", None, "three"], kind)


PROMPTS: dict[str, pa.Array] = {
    "string": texts(pa.string()),
    "large_string": texts(pa.large_string()),
    "string_view": texts(pa.string_view()),
    "dictionary": texts(pa.string()).dictionary_encode(),
    "dictionary of large": pa.DictionaryArray.from_arrays(pa.array([0, None, 1], pa.int8()), pa.array(["one", "three"], pa.large_string())),
    "dictionary with a null": pa.DictionaryArray.from_arrays(pa.array([0, 1, 2], pa.uint16()), texts(pa.string())),
    "dictionary of views": pa.DictionaryArray.from_arrays(pa.array([0, None, 1], pa.int64()), pa.array(["one", "three"], pa.string_view())),
    "runs": pa.RunEndEncodedArray.from_arrays(pa.array([1, 2, 3], pa.int32()), texts(pa.string())),
    "json": texts(pa.json_()),
}


@pytest.mark.parametrize("name", PROMPTS)
def test_every_kind_of_text_is_a_prompt(tmp_path: Path, name: str) -> None:
    World().run(write_arrow(tmp_path / "a.arrow", pa.table({"prompt": PROMPTS[name]})), tmp_path / "out.jsonl")
    rows = read_jsonl(tmp_path / "out.jsonl")
    assert [row["prompt"] for row in rows] == ["one", None, "three"]
    assert [(row["error"] or {}).get("code") for row in rows] == [None, "empty_prompt", None]
    World().run(tmp_path / "a.arrow")
    assert pq.read_table(tmp_path / "a.out.parquet")["prompt"].to_pylist() == ["one", None, "three"]


ITEM = pa.struct([("role", pa.string()), ("content", pa.large_string()), ("name", pa.null())])
MESSAGES: dict[str, pa.Array] = {
    "list": pa.array([CHAT, None, []], pa.list_(ITEM)),
    "large_list": pa.array([CHAT, None, []], pa.large_list(ITEM)),
    "list_view": pa.array([CHAT, None, []], pa.list_view(ITEM)),
    "fixed_size_list": pa.array([CHAT, None, None], pa.list_(ITEM, 1)),
    "of views": pa.array([CHAT, None, []], pa.list_(pa.struct([("role", pa.string_view()), ("content", pa.string_view())]))),
    "text": pa.array([json.dumps(CHAT), None, "[]"], pa.large_string()),
    "json": pa.array([json.dumps(CHAT), None, "[]"], pa.json_()),
    "dictionary": pa.array([json.dumps(CHAT), None, "[]"]).dictionary_encode(),
    "parts": pa.array([[{"role": "user", "content": [{"type": "text", "text": "hi"}]}], None, []]),
}


@pytest.mark.parametrize("name", MESSAGES)
def test_every_kind_of_list_is_a_chat(tmp_path: Path, name: str) -> None:
    write_jsonl(tmp_path / "a.jsonl", [{"messages": CHAT}])
    World().run(tmp_path / "a.jsonl", tmp_path / "expected.jsonl")
    World().run(write_arrow(tmp_path / "a.arrow", pa.table({"messages": MESSAGES[name]}), streamed=True), tmp_path / "out.jsonl")
    rows = read_jsonl(tmp_path / "out.jsonl")
    assert rows[0]["generated_text"] == read_jsonl(tmp_path / "expected.jsonl")[0]["generated_text"]
    assert [(row["error"] or {}).get("code") for row in rows] == [None, "empty_prompt", "empty_prompt"]


IDS: dict[str, pa.Array] = {
    "list": pa.array([[5, 6], None], pa.list_(pa.int64())),
    "uint16": pa.array([[5, 6], None], pa.list_(pa.uint16())),
    "large_list": pa.array([[5, 6], None], pa.large_list(pa.int32())),
    "list_view": pa.array([[5, 6], None], pa.large_list_view(pa.int32())),
    "fixed_size_list": pa.array([[5, 6], None], pa.list_(pa.int32(), 2)),
    "text": pa.array(["[5, 6]", None]),
}


@pytest.mark.parametrize("name", IDS)
def test_every_kind_of_list_is_token_ids(tmp_path: Path, name: str) -> None:
    table = pa.table({"prompt_token_ids": IDS[name], "prompt": ["loses", "used"], "messages": pa.nulls(2)})
    World().run(write_arrow(tmp_path / "a.arrow", table), tmp_path / "out.jsonl", chat=False)
    assert [row["num_input_tokens"] for row in read_jsonl(tmp_path / "out.jsonl")] == [2, 4]


PARAMETERS: dict[str, pa.Array] = {
    "int8": pa.array([2, None], pa.int8()),
    "float": pa.array([2.0, None], pa.float32()),
    "half": pa.array([2.0, None], pa.float16()),
    "dictionary": pa.array([2, None], pa.int64()).dictionary_encode(),
    "runs": pa.RunEndEncodedArray.from_arrays(pa.array([1, 2], pa.int32()), pa.array([2, None], pa.int64())),
}


@pytest.mark.parametrize("name", PARAMETERS)
def test_every_kind_of_number_is_a_parameter(tmp_path: Path, name: str) -> None:
    table = pa.table({"prompt": ["a", "b"], "max_tokens": PARAMETERS[name], "temperature": pa.nulls(2), "stop": pa.nulls(2, pa.string())})
    World().run(write_arrow(tmp_path / "a.arrow", table), tmp_path / "out.jsonl")
    assert [row["num_generated_tokens"] for row in read_jsonl(tmp_path / "out.jsonl")] == [2, 6]


TABLE = pa.table({"id": [1, 2, 3], "prompt": ["a", "b", "c"], "x": [0.5, 1.5, 2.5], "error": ["my", "own", "word"]})
WRITERS: dict[str, Callable[[Path], object]] = {
    "jsonl": lambda path: write_jsonl(path, TABLE.to_pylist()),
    "csv": lambda path: pyarrow.csv.write_csv(TABLE, path),
    "parquet": lambda path: pq.write_table(TABLE, path),
    "arrow": lambda path: write_arrow(path, TABLE),
}


@pytest.mark.parametrize("ending", ["jsonl", "parquet"])
@pytest.mark.parametrize("kind", WRITERS)
def test_columns_are_chosen_and_named_alike_in_every_format(tmp_path: Path, kind: str, ending: str) -> None:
    source, out = tmp_path / f"a.{kind}", tmp_path / f"out.{ending}"
    WRITERS[kind](source)

    def made(**options: Any) -> list[dict[str, Any]]:
        World().run(source, out, overwrite=True, **options)
        return read_jsonl(out) if ending == "jsonl" else pq.read_table(out).to_pylist()

    prefixed = ["my_" + name for name in RESULTS]
    rows = made(prefix="my_")
    assert list(rows[0]) == ["id", "prompt", "x", "error", *prefixed]
    assert [{name: row[name] for name in TABLE.column_names} for row in rows] == TABLE.to_pylist()
    assert list(made(prefix="my_", keep_columns=("x", "id"))[0]) == ["id", "x", *prefixed]
    assert list(made(prefix="my_", keep_columns=())[0]) == prefixed
    assert list(made(prefix="my_", drop_columns=("prompt", "error"))[2]) == ["id", "x", *prefixed]


def test_types_are_right_though_the_first_rows_failed(tmp_path: Path) -> None:
    rows: list[Any] = ["not json", {"prompt": None, "n": None}, {"prompt": "a", "n": 2}]
    World().run(write_jsonl(tmp_path / "a.jsonl", rows), tmp_path / "out.parquet")
    World().run(write_jsonl(tmp_path / "b.jsonl", [*rows[:2], {"prompt": None}]), tmp_path / "bad.parquet")
    World().run(write_jsonl(tmp_path / "c.jsonl", rows[2:]), tmp_path / "good.parquet")
    for name in ("out", "bad", "good"):
        schema = pq.read_schema(tmp_path / f"{name}.parquet")
        kinds = [str(schema.field(column).type) for column in RESULTS]
        assert kinds == ["string", "string", "int64", "int64", "struct<code: string, message: string>"]
    assert pq.read_schema(tmp_path / "out.parquet").field("n").type == pa.int64()


def test_a_cell_that_parquet_cannot_hold_loses_nothing(tmp_path: Path) -> None:
    table = pa.table({"prompt": ["a", "b"], "when": pa.array([0, 2**62], pa.timestamp("s"))})
    source = write_arrow(tmp_path / "a.arrow", table)
    with pytest.raises(OutputError, match=r"'when' \(timestamp\[s\]\) cannot be written.*--drop-columns when"):
        World().run(source, tmp_path / "out.parquet")
    world = World()
    assert world.run(source, tmp_path / "out.parquet", drop_columns=("when",)).rows_done_before == 2
    assert world.loads == 0


def test_very_many_columns_stand_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(infer, "MAX_COLUMNS", 5)
    rows = [{"prompt": "a", f"key{i}": i, "other_columns": "mine"} for i in range(9)]
    World().run(write_jsonl(tmp_path / "a.jsonl", rows), tmp_path / "out.parquet")
    out = pq.read_table(tmp_path / "out.parquet")
    assert out.column_names[:6] == ["prompt", "key0", "other_columns", "key1", "key2", "other_columns_"]
    assert out["other_columns_"].to_pylist() == [None, None, None, *(json.dumps({f"key{i}": i}).replace(" ", "") for i in range(3, 9))]


def test_only_columns_that_are_used_or_kept_are_read(tmp_path: Path) -> None:
    """A column whose bytes are damaged is not noticed where nobody asks for it."""
    table = pa.table({"prompt": [f"p{i}" for i in range(1000)], "wide": [f"{i:0500}" for i in range(1000)]})
    pq.write_table(table, tmp_path / "a.parquet", compression="gzip", use_dictionary=False)
    chunk = pq.ParquetFile(tmp_path / "a.parquet").metadata.row_group(0).column(1)
    data = bytearray((tmp_path / "a.parquet").read_bytes())
    data[chunk.data_page_offset + 40 : chunk.data_page_offset + 400] = b"\xff" * 360
    (tmp_path / "a.parquet").write_bytes(data)
    report = World().run(tmp_path / "a.parquet", tmp_path / "out.parquet", {"max_tokens": 1}, drop_columns=("wide",))
    assert report.rows_ok == 1000


@pytest.mark.parametrize("ending", ["jsonl", "parquet"])
@pytest.mark.parametrize("kind", ["parquet", "arrow"])
def test_one_huge_group_is_read_in_pieces(tmp_path: Path, kind: str, ending: str) -> None:
    peaks = []
    for count in (2_000, 10_000):
        table = pa.table({"id": range(count), "prompt": [f"a prompt of some forty characters, {i}" for i in range(count)]})
        path = tmp_path / f"{count}.{kind}"
        pq.write_table(table, path, row_group_size=count) if kind == "parquet" else write_arrow(path, table)
        peaks.append(peak_of(path, tmp_path / f"{count}.out.{ending}"))
    assert peaks[1] < peaks[0] + (1 << 20)


def test_large_cells_make_small_batches(tmp_path: Path) -> None:
    table = pa.table({"prompt": ["x" * (1 << 20) for _ in range(100)]})
    pq.write_table(table, tmp_path / "a.parquet", use_dictionary=False)
    write_arrow(tmp_path / "a.arrow", table)
    for found in (ParquetTable(LocalFile(tmp_path / "a.parquet")), ArrowTable(LocalFile(tmp_path / "a.arrow"))):
        sizes = [batch.num_rows for _, batch in found.batches(0, 100, ["prompt"])]
        assert sum(sizes) == 100
        assert max(sizes) <= 33


@pytest.mark.parametrize("streamed", [False, True])
def test_torn_arrow_files_are_named(tmp_path: Path, streamed: bool) -> None:
    data = write_arrow(tmp_path / "a.arrow", pa.table({"prompt": ["a"] * 100}), streamed, rows=10).read_bytes()
    for size in (0, 4, len(data) // 2, len(data) - 8, len(data) - 1):
        (tmp_path / "b.arrow").write_bytes(data[:size])
        world = World()
        with pytest.raises(Exception, match=r"b\.arrow: the (content is not Arrow|Arrow data is cut off)"):
            world.run(tmp_path / "b.arrow", tmp_path / "out.jsonl")
        assert world.loads == 0


def test_folders_and_patterns_of_any_kind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "in"
    (folder / "deep").mkdir(parents=True)
    (folder / "b.csv").write_text("prompt;n\nb1;1\nb2;2\n")
    (folder / "a.csv").write_text("m,prompt\nx,a1\n")
    (folder / "deep" / "c.csv").write_text("prompt\nc1\n")
    (folder / "d.jsonl").write_text('{"prompt": "d1"}\n')
    (folder / "old.csv.report.json").write_text("{}")
    (folder / "old.csv").write_text("prompt\nold\n")

    def prompts(given: str) -> list[str]:
        report = World().run(given)
        found = [row["prompt"] for row in read_jsonl(Path(report.output))]
        Path(report.output).unlink()
        return found

    assert prompts("in/*.csv") == ["a1", "b1", "b2"]
    assert prompts("in/**/*.csv") == ["a1", "b1", "b2", "c1"]
    assert prompts("in/[db].*l") == ["d1"]
    with pytest.raises(Exception, match=r"more than one kind: csv \(a.csv\), jsonl \(d.jsonl\)"):
        World().run("in")
    (folder / "d.jsonl").unlink()
    report = World().run("in", folder / "out.parquet")
    assert pq.read_table(folder / "out.parquet")["n"].to_pylist() == [None, 1, 2]
    assert World().run("in", folder / "out.parquet").already_complete  # its own output is not its input
    assert report.rows_total == 3


def test_wide_files_of_different_schemas(tmp_path: Path) -> None:
    folder = tmp_path / "in"
    folder.mkdir()
    write_arrow(folder / "a.arrow", pa.table({"prompt": texts(pa.string()).dictionary_encode(), "n": pa.nulls(3)}))
    write_arrow(folder / "b.arrow", pa.table({"n": pa.array([1, 2, 3], pa.int8()), "prompt": texts(pa.string_view())}), streamed=True)
    World().run(folder, tmp_path / "out.parquet")
    out = pq.read_table(tmp_path / "out.parquet")
    assert out["prompt"].to_pylist() == ["one", None, "three"] * 2
    assert out["n"].to_pylist() == [None, None, None, 1, 2, 3]
