"""Whole jobs over Parquet: columns kept, types inferred, values as other formats spell them."""

from __future__ import annotations

import json
from decimal import Decimal
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.job.world import World, read_jsonl, write_jsonl


@pytest.fixture
def world() -> World:
    return World()


def test_parquet_to_parquet_keeps_every_column(tmp_path: Path, world: World) -> None:
    table = pa.table(
        {
            "prompt": pa.array(["one", None, "three"], pa.large_string()),
            "when": pa.array([1, None, 2**60], pa.timestamp("ns")),
            "blob": pa.array([b"\xff", None, b""]),
            "kind": pa.array(["x", "y", "x"]).dictionary_encode(),
            "max_tokens": pa.array([2, 3, None], pa.int32()),
        }
    ).replace_schema_metadata({"mine": "kept"})
    pq.write_table(table, tmp_path / "in.parquet", row_group_size=2)
    report = world.run(tmp_path / "in.parquet")
    out = pq.read_table(tmp_path / "in.out.parquet")
    assert report.exit_code == 3
    assert out.select(table.column_names).equals(table)
    assert out.schema.metadata[b"mine"] == b"kept"
    assert out["num_generated_tokens"].to_pylist() == [2, 0, 6]
    assert [item and item["code"] for item in out["error"].to_pylist()] == [None, "empty_prompt", None]


def test_parquet_messages_equal_jsonl_messages(tmp_path: Path, world: World) -> None:
    rows = [[{"role": "user", "content": "hi"}], [{"role": "system", "content": "s"}, {"role": "user", "content": "yo"}], None, []]
    kind = pa.list_(pa.struct([("role", pa.string()), ("content", pa.string()), ("name", pa.string())]))
    pq.write_table(pa.table({"messages": pa.array(rows, kind)}), tmp_path / "in.parquet")
    pq.write_table(pa.table({"messages": [None if row is None else json.dumps(row) for row in rows]}), tmp_path / "text.parquet")
    write_jsonl(tmp_path / "in.jsonl", [{"messages": row} for row in rows])
    for name in ("in.parquet", "text.parquet", "in.jsonl"):
        world.run(tmp_path / name, tmp_path / f"{name}.out.jsonl")
    outs = [
        [row["generated_text"] for row in read_jsonl(tmp_path / f"{name}.out.jsonl")] for name in ("in.parquet", "text.parquet", "in.jsonl")
    ]
    assert outs[0] == outs[1] == outs[2]
    assert [text is None for text in outs[0]] == [False, False, True, True]


def test_jsonl_to_parquet_infers_types(tmp_path: Path, world: World) -> None:
    rows = [
        {"prompt": "a", "n1": 1, "meta": 1, "deep": [{"x": 1}]},
        {"prompt": "b", "n1": 2.5, "meta": "one", "deep": [{"x": 2, "y": "z"}]},
        {"prompt": "c", "n1": None, "meta": {"k": [1, "x", None]}, "late": True},
        "not json",
        {"prompt": "d", "half": "\ud800", "big": 2**70, "empty": {}},
    ]
    world.run(write_jsonl(tmp_path / "in.jsonl", rows), tmp_path / "out.parquet")
    out = pq.read_table(tmp_path / "out.parquet")
    assert out["n1"].to_pylist() == [1.0, 2.5, None, None, None]
    assert out["meta"].to_pylist() == ["1", '"one"', '{"k":[1,"x",null]}', None, None]
    assert out["deep"].to_pylist()[1] == [{"x": 2, "y": "z"}]
    assert out["late"].to_pylist() == [None, None, True, None, None]
    assert out["raw"].to_pylist()[3] == "not json"
    assert out["big"].to_pylist()[4] == str(2**70)
    assert out["empty"].to_pylist()[4] == "{}"
    assert out["half"].to_pylist()[4] == "\ufffd"


def test_a_folder_of_tables_with_different_columns(tmp_path: Path, world: World) -> None:
    folder = tmp_path / "in"
    folder.mkdir()
    pq.write_table(pa.table({"prompt": ["a1", "a2"], "id": [1, 2]}), folder / "a.parquet")
    pq.write_table(
        pa.table({"id": pa.array([3.5]), "extra": pa.nulls(1), "prompt": pa.array(["b1"], pa.large_string())}), folder / "b.parquet"
    )
    pq.write_table(pa.table({"prompt": pa.array([None], pa.string()), "extra": ["late"]}), folder / "c.parquet")
    world.run(folder, tmp_path / "out.parquet")
    out = pq.read_table(tmp_path / "out.parquet")
    assert out["prompt"].to_pylist() == ["a1", "a2", "b1", None]
    assert out["id"].to_pylist() == [1.0, 2.0, 3.5, None]
    assert out["extra"].to_pylist() == [None, None, None, "late"]
    assert out["error"].to_pylist()[3]["message"].startswith("c.parquet row 0")
    world.run(folder, tmp_path / "out.jsonl")
    assert [row["extra"] for row in read_jsonl(tmp_path / "out.jsonl")] == [None, None, None, "late"]


def test_times_are_iso_8601(tmp_path: Path) -> None:
    when = pa.array([1_704_164_645_000], pa.int64())
    table = {
        "prompt": ["x"],
        "at": when.cast(pa.timestamp("ms")),
        "utc": when.cast(pa.timestamp("ms", "UTC")),
        "there": when.cast(pa.timestamp("ms", "+05:30")),
        "day": when.cast(pa.timestamp("ms")).cast(pa.date32()),
        "inside": pa.array([{"list": [when.cast(pa.timestamp("ms"))[0].as_py(), None], "text": "a b"}]),
    }
    pq.write_table(pa.table(table), tmp_path / "in.parquet")
    World().run(tmp_path / "in.parquet", tmp_path / "out.jsonl")
    row = read_jsonl(tmp_path / "out.jsonl")[0]
    assert (row["at"], row["utc"]) == ("2024-01-02T03:04:05.000", "2024-01-02T03:04:05.000Z")
    assert (row["there"], row["day"]) == ("2024-01-02T08:34:05.000+05:30", "2024-01-02")
    assert row["inside"] == {"list": ["2024-01-02T03:04:05.000000", None], "text": "a b"}


def test_parameters_as_tables_hold_them(tmp_path: Path) -> None:
    """Decimals, maps of numbers, maps of text."""
    floats, texts = pa.map_(pa.string(), pa.float64()), pa.map_(pa.string(), pa.string())
    tables = {
        "decimal": {"max_tokens": pa.array([Decimal("3.00")], pa.decimal128(9, 2)), "temperature": pa.array([Decimal("0.50")])},
        "floats": {"sampling_params": pa.array([[("max_tokens", 3.0), ("temperature", 0.5)]], floats)},
        "texts": {"sampling_params": pa.array([[("max_tokens", "3"), ("temperature", "0.5"), ("stop", "1")]], texts)},
    }
    for name, columns in tables.items():
        pq.write_table(pa.table({"prompt": ["x"], **columns}), tmp_path / f"{name}.parquet")
        World().run(tmp_path / f"{name}.parquet", tmp_path / f"{name}.jsonl")
        row = read_jsonl(tmp_path / f"{name}.jsonl")[0]
        assert row["error"] is None
        assert row["num_generated_tokens"] == 3
