"""CSV: records over several lines, quotes, types, and what is only a row's error."""

from __future__ import annotations

import csv
import io
import json
import os
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batchinfer.errors import InputFileError
from batchinfer.io import csv_lines, line_source, lines
from batchinfer.io.csv_lines import number_of, split_record
from batchinfer.io.data_file import LocalFile
from batchinfer.io.line_source import LineSource
from tests.job.world import World, read_jsonl

QUICK = settings(max_examples=int(os.environ.get("HYPOTHESIS_EXAMPLES", "60")), deadline=None)


def values_of(path: Path, content: bytes | str, text: tuple[str, ...] = ("prompt",)) -> list[object]:
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    source = LineSource((LocalFile(path),), "csv", text)
    rows = list(source.rows())
    for row in rows:
        source.parse(row)
    assert [row.position for row in rows] == list(range(len(rows)))
    return [row.values if row.error is None else (row.error.code, row.line) for row in rows]


def test_cells_over_several_lines(tmp_path: Path) -> None:
    found = values_of(tmp_path / "a.csv", '\ufeffid,prompt\r\n1,"two\r\nlines, ""quoted"""\r\n\r\n2,5" screen\r\n3,""\r\n4,\r\n')
    assert found == [
        {"id": 1, "prompt": 'two\r\nlines, "quoted"'},
        {"id": 2, "prompt": '5" screen'},
        {"id": 3, "prompt": ""},
        {"id": 4, "prompt": None},
    ]


@pytest.mark.parametrize("mark", [",", ";", "\t"])
def test_what_stands_between_cells(tmp_path: Path, mark: str) -> None:
    content = mark.join(["id", "prompt", '"a,b"']) + "\n" + mark.join(["1", "x", "y"]) + "\n"
    assert values_of(tmp_path / "a.csv", content) == [{"id": 1, "prompt": "x", "a,b": "y"}]


def test_numbers_only_where_no_text_is_lost(tmp_path: Path) -> None:
    content = (
        "prompt,n,x,zip,price,late,none\n1,1,0.5,007,1.50,3,\n2,-20,1e-05,123,2.25,4,\n" + "3,,0.1,1,1.0,5,\n" * 1000 + "4,7,2,x,y,N/A,\n"
    )
    first, second, *_, last = values_of(tmp_path / "a.csv", content)
    assert first == {"prompt": "1", "n": 1, "x": 0.5, "zip": "007", "price": "1.50", "late": 3, "none": None}
    assert second["n"] == -20  # type: ignore[index]
    assert last == {"prompt": "4", "n": 7, "x": 2, "zip": "x", "price": "y", "late": "N/A", "none": None}
    World().run(tmp_path / "a.csv", tmp_path / "out.parquet", {"max_tokens": 1})
    table = pq.read_table(tmp_path / "out.parquet")
    assert [str(table.schema.field(name).type) for name in ("prompt", "n", "x", "zip", "late")] == [
        "string",
        "int64",
        "double",
        "string",
        "string",
    ]
    assert table["late"].to_pylist()[0::1002] == ["3", "N/A"]


def test_wrong_records_are_row_errors(tmp_path: Path) -> None:
    content = b'id,prompt\n1,fine\n2\n3,a,b\n4,"a"b\n5,\xff\n6,"open\n7,fine\n8,fine\n'
    assert values_of(tmp_path / "a.csv", content) == [
        {"id": 1, "prompt": "fine"},
        ("wrong_columns", 3),
        ("wrong_columns", 4),
        ("invalid_csv", 5),
        ("invalid_utf8", 6),
        ("invalid_csv", 7),
        {"id": 7, "prompt": "fine"},
        {"id": 8, "prompt": "fine"},
    ]
    report = World().run(tmp_path / "a.csv", tmp_path / "out.jsonl", {"max_tokens": 1})
    rows = read_jsonl(tmp_path / "out.jsonl")
    assert (report.rows_failed, len(rows), rows[5]["raw"]) == (5, 8, '6,"open')


def test_headers(tmp_path: Path) -> None:
    assert values_of(tmp_path / "a.csv", ",prompt\n0,x\n") == [{"Unnamed: 0": 0, "prompt": "x"}]  # what a data frame with its index writes
    assert values_of(tmp_path / "a.csv", '"a\nb",prompt\n0,x\n') == [{"a\nb": 0, "prompt": "x"}]
    assert values_of(tmp_path / "a.csv", "") == values_of(tmp_path / "a.csv", "prompt\n") == []
    with pytest.raises(InputFileError, match="two columns named 'prompt'"):
        values_of(tmp_path / "a.csv", "prompt,prompt\n0,x\n")
    (tmp_path / "a.csv").write_text("text,id\nx,1\n")
    with pytest.raises(InputFileError, match="no column 'prompt'"):
        World().run(tmp_path / "a.csv")


def test_parameters_and_messages_in_cells(tmp_path: Path) -> None:
    rows = [
        ["messages", "max_tokens", "temperature", "stop", "ignore_eos", "prompt_token_ids"],
        [json.dumps([{"role": "user", "content": "hi"}]), "3.0", "0.50", "1", "True", ""],
        ["", "2", "", '["a", "b"]', "false", "[1, 2, 3]"],
    ]
    text = io.StringIO()
    csv.writer(text).writerows(rows)
    (tmp_path / "a.csv").write_text(text.getvalue())
    World().run(tmp_path / "a.csv", tmp_path / "out.jsonl")
    out = read_jsonl(tmp_path / "out.jsonl")
    assert [row["error"] for row in out] == [None, None]
    assert [row["num_generated_tokens"] for row in out] == [3, 2]
    assert out[1]["num_input_tokens"] == 3
    assert out[0]["temperature"] == "0.50"


def test_a_header_that_changed_is_another_row(tmp_path: Path) -> None:
    digests = []
    for header in ("a,prompt", "b,prompt"):
        (tmp_path / "a.csv").write_text(f"{header}\n1,x\n")
        digests.append(next(LineSource((LocalFile(tmp_path / "a.csv"),), "csv").rows()).digest())
    assert digests[0] != digests[1]


def test_a_quote_that_never_closes_costs_one_row_at_any_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (lines, line_source, csv_lines):
        monkeypatch.setattr(module, "MAX_LINE_BYTES", 100)
    content = 'id,prompt\n0,"open\n' + "".join(f"{i},text\n" for i in range(1, 60)) + f'60,{"x" * 200}\n61,"{"y" * 200}"\n62,end\n'
    found = values_of(tmp_path / "a.csv", content)
    assert found[0] == ("invalid_csv", 2)
    assert found[1] == {"id": 1, "prompt": "text"}
    assert found[60:] == [("line_too_long", 62), ("line_too_long", 63), {"id": 62, "prompt": "end"}]


cells = st.text(st.characters(exclude_categories=("Cs",), exclude_characters="\0"), max_size=8) | st.sampled_from(
    ["", "7", "0.5", "007", '"', '""', "a\nb", "\r\n", ","]
)


@QUICK
@given(
    st.integers(1, 4).flatmap(lambda width: st.lists(st.lists(cells, min_size=width, max_size=width), min_size=1, max_size=6)),
    st.booleans(),
)
def test_what_a_writer_writes_is_read(rows: list[list[str]], everything: bool) -> None:
    text = io.StringIO(newline="")
    csv.writer(text, quoting=csv.QUOTE_ALL if everything else csv.QUOTE_MINIMAL).writerows(rows)
    data, found = text.getvalue().encode(), []
    parts = [(number, part, len(part)) for number, part in enumerate(_physical(data), 1)]
    reader = csv_lines.CsvLines()
    header = (1, b",".join(b"c%d" % i for i in range(len(rows[0]))) + b"\r\n", 0)
    for _, raw, _ in reader.records(iter([header, *parts]), ""):
        found.append([cell or "" for cell in split_record(raw.decode(), ",")])
    expected = [row for row in rows if row != [""] or everything]  # a row of one empty cell, unquoted, is a blank line
    assert [row for row in found if row != [""]] == [row for row in expected if row != [""]]


def _physical(data: bytes) -> list[bytes]:
    return [part + b"\n" for part in data.split(b"\n")][:-1]


@QUICK
@given(st.floats() | st.integers() | st.text(max_size=6))
def test_a_number_reads_back_as_its_text(value: object) -> None:
    text = str(value)
    number = number_of(text)
    assert isinstance(number, str) or str(number) == text
