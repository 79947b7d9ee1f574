"""Whole jobs over the fake model: what comes in comes out, in order, with the result behind it."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from batchinfer.errors import BatchInferError
from tests.job.world import World, leftovers, read_jsonl, write_jsonl

RESULT = ["generated_text", "finish_reason", "num_input_tokens", "num_generated_tokens", "error"]


LINES = [
    b'{"id": "a", "prompt": "fine"}',
    b"",
    b"  \t",
    b'{"id": "b", "prompt": "caf\xe9"}',
    b'{"id": "c", "prompt": ',
    b'{"id": 1} {"id": 2}',
    b"[1, 2]",
    b"null",
    b'{"id": "d", "prompt": ""}',
    b'{"id": "e", "prompt": null}',
    b'{"id": "f"}',
    b'{"id": "g", "messages": []}',
    b'{"id": "h", "prompt": "x", "messages": [{"role": "user", "content": "y"}]}',
    b'{"id": "i", "prompt": 5}',
    b'{"id": "j", "messages": "text"}',
    b'{"id": "k", "prompt": "x", "temperature": NaN}',
    b'{"id": "l", "prompt": "x", "max_tokens": "8"}',
    b'{"id": "m", "prompt": "' + b"y" * 500 + b'"}',
    b'{"id": "n", "prompt_token_ids": [1, 2, 257]}',
    b'{"id": "o", "prompt_token_ids": []}',
    b'{"id": "p", "prompt": "x", "sampling_params": {"temprature": 1}}',
    b'{"id": "q", "prompt": "half \\ud800 pair"}',
    b'{"id": "r", "prompt": "x", "n": 2, "best_of": 4}',
    b'{"id": "z", "prompt": " ", "score": NaN}',
]
CODES = {
    '{"id": "b", "prompt": "caf\\xe9"}': "invalid_utf8",
    '{"id": "c", "prompt": ': "invalid_json",
    '{"id": 1} {"id": 2}': "invalid_json",
    "[1, 2]": "not_an_object",
    "null": "not_an_object",
    "d": "empty_prompt",
    "e": "empty_prompt",
    "f": "no_prompt",
    "g": "empty_prompt",
    "h": "ambiguous_prompt",
    "i": "invalid_prompt",
    "j": "invalid_messages",
    "k": "invalid_parameter",
    "l": "invalid_parameter",
    "m": "too_long",
    "n": "invalid_token_id",
    "o": "empty_prompt",
    "p": "unknown_parameter",
    "q": "invalid_text",
    "r": "unsupported_parameter",
}


@pytest.fixture
def world() -> World:
    return World()


def test_rows_come_out_in_input_order_with_their_columns(tmp_path: Path, world: World) -> None:
    rows = [{"id": i, "prompt": f"prompt {i}", "extra": {"k": [i, None]}, "max_tokens": 1 + i * 7 % 9} for i in range(60)]
    report = world.run(write_jsonl(tmp_path / "in.jsonl", rows))
    assert report.exit_code == 0
    out = read_jsonl(tmp_path / "in.out.jsonl")
    assert [{key: row[key] for key in rows[0]} for row in out] == rows
    assert list(out[0]) == ["id", "prompt", "extra", "max_tokens", *RESULT]
    assert all(row["num_generated_tokens"] == row["max_tokens"] and row["finish_reason"] == "length" for row in out)
    assert all(row["error"] is None and row["generated_text"] for row in out)
    assert (report.rows_total, report.rows_ok, report.rows_failed) == (60, 60, 0)
    assert report.output_tokens == sum(row["max_tokens"] for row in rows)
    assert leftovers(tmp_path / "in.out.jsonl") == []
    saved = json.loads((tmp_path / "in.out.jsonl.report.json").read_text())
    assert saved["rows"] == {"total": 60}
    assert saved["failed_positions"] == []


def test_input_bytes_are_copied_exactly(tmp_path: Path, world: World) -> None:
    line = '{"prompt" : "\\u00e9\\ud83d\\ude00 é",  "big": 9007199254740993, "f": 1.10e2, "s": "\u2028" }'
    write_jsonl(tmp_path / "in.jsonl", [line, '{"prompt":"x"}'])
    world.run(tmp_path / "in.jsonl")
    first = (tmp_path / "in.out.jsonl").read_bytes().split(b"\n")[0].decode()
    assert first.startswith(line[:-1] + ',"generated_text":')


def test_every_bad_row_is_its_own_error(tmp_path: Path, world: World) -> None:
    (tmp_path / "in.jsonl").write_bytes(b"\r\n".join(LINES))
    report = world.run(tmp_path / "in.jsonl")
    out = read_jsonl(tmp_path / "in.out.jsonl")
    assert report.exit_code == 3
    assert len(out) == len(LINES) - 2
    good = [row["id"] for row in out if row["error"] is None]
    assert good == ["a", "z"]
    assert out[-1]["score"] is None
    codes = {row.get("id", row.get("raw")): row["error"]["code"] for row in out if row["error"]}
    assert codes == CODES
    for row in out:
        if row["error"]:
            assert row["generated_text"] is None
            assert row["finish_reason"] == "error"
            assert row["error"]["message"].startswith("line ")
    too_long = next(row for row in out if row.get("id") == "m")["error"]["message"]
    assert "507" in too_long
    assert "200" in too_long
    assert next(row for row in out if row.get("raw", "").startswith('{"id": "c"'))["error"]["message"].startswith("line 5:")
    assert report.rows_failed == 20
    assert report.failed_positions == [(1, 20)]


@pytest.mark.parametrize("ending", [".jsonl", ".parquet"])
def test_zero_rows_need_no_model(tmp_path: Path, world: World, ending: str) -> None:
    empty = {
        "empty.jsonl": b"",
        "blank.jsonl": b"\n  \n\r\n",
        "bom.jsonl": b"\xef\xbb\xbf",
        "zipped.jsonl.gz": gzip.compress(b""),
        "empty.txt": b"\n",
    }
    for name, data in empty.items():
        (tmp_path / name).write_bytes(data)
    pq.write_table(pa.table({"prompt": pa.array([], pa.string())}), tmp_path / "none.parquet")
    for name in [*empty, "none.parquet"]:
        output = tmp_path / f"{name}.result{ending}"
        report = world.run(tmp_path / name, output)
        assert report.exit_code == 0
        assert "0 rows" in report.message
        if ending == ".parquet":
            assert pq.read_table(output).num_rows == 0
            assert set(RESULT) <= set(pq.read_schema(output).names)
            assert pa.types.is_struct(pq.read_schema(output).field("error").type)
        else:
            assert output.read_bytes() == b""
    assert world.loads == 0


def test_all_rows_failed_need_no_weights(tmp_path: Path, world: World) -> None:
    report = world.run(write_jsonl(tmp_path / "in.jsonl", [{"prompt": ""}, {"prompt": None}]))
    assert report.exit_code == 3
    assert world.loads == 0
    assert len(read_jsonl(tmp_path / "in.out.jsonl")) == 2


def test_chat_and_raw(tmp_path: Path, world: World) -> None:
    source = write_jsonl(tmp_path / "in.jsonl", [{"prompt": "hi"}, {"messages": [{"role": "user", "content": "yo"}]}])
    world.run(source, tmp_path / "a.jsonl", system_prompt="be kind")
    assert world.prompts == ["system:be kind\nuser:hi\n>"]
    world.prompts.clear()
    world.run(source, tmp_path / "b.jsonl", chat=False)
    assert world.prompts == ["hi"]
    assert [row["num_input_tokens"] for row in read_jsonl(tmp_path / "b.jsonl")] == [2, len("user:yo\n>")]


def test_row_parameters_win_over_the_jobs(tmp_path: Path) -> None:
    world = World(defaults={"max_tokens": 9})
    rows = [{"prompt": "a"}, {"prompt": "b", "max_tokens": 3}, {"prompt": "c", "sampling_params": {"max_tokens": 4}}]
    rows.append({"prompt": "d", "sampling_params": {"max_tokens": 4}, "max_tokens": 2})
    rows.append({"prompt": "e", "max_new_tokens": 1, "max_tokens": None})
    source = write_jsonl(tmp_path / "in.jsonl", rows)
    world.run(source, tmp_path / "a.jsonl", sampling={})
    assert [row["num_generated_tokens"] for row in read_jsonl(tmp_path / "a.jsonl")] == [9, 3, 4, 2, 1]
    assert world.infos[0].parameter_columns == ("max_tokens", "sampling_params", "max_new_tokens")
    world.run(source, tmp_path / "b.jsonl", sampling={"max_tokens": 5}, row_params=False)
    assert [row["num_generated_tokens"] for row in read_jsonl(tmp_path / "b.jsonl")] == [5] * 5


def test_limit_and_offset_keep_positions(tmp_path: Path, world: World) -> None:
    source = write_jsonl(tmp_path / "in.jsonl", [{"prompt": f"p{i}", "temperature": 1.0} for i in range(20)])
    world.run(source, tmp_path / "all.jsonl")
    world.run(source, tmp_path / "some.jsonl", offset=5, limit=4)
    assert (tmp_path / "all.jsonl").read_bytes().split(b"\n")[5:9] == (tmp_path / "some.jsonl").read_bytes().split(b"\n")[:-1]
    assert world.run(source, tmp_path / "none.jsonl", limit=0).exit_code == 0
    assert (tmp_path / "none.jsonl").read_bytes() == b""


def test_columns_kept_dropped_and_prefixed(tmp_path: Path, world: World) -> None:
    source = write_jsonl(tmp_path / "in.jsonl", [{"id": 1, "prompt": "a", "error": "mine"}, {"prompt": "b", "error": None}])
    with pytest.raises(BatchInferError, match="--output-prefix"):
        world.run(source, tmp_path / "a.jsonl")
    assert world.loads == 0
    world.run(source, tmp_path / "a.jsonl", prefix="llm_", keep_columns=("id", "error"))
    first, second = read_jsonl(tmp_path / "a.jsonl")
    assert list(first) == ["id", "error", *("llm_" + name for name in RESULT)]
    assert first["error"] == "mine"
    assert "prompt" not in second
    world.run(source, tmp_path / "b.parquet", prefix="llm_", drop_columns=("prompt",))
    assert pq.read_schema(tmp_path / "b.parquet").names == ["id", "error", *("llm_" + name for name in RESULT)]


def test_late_clash_keeps_the_line(tmp_path: Path, world: World) -> None:
    rows = [{"prompt": "x"}] * 1200 + [{"prompt": "y", "error": "mine"}]
    report = world.run(write_jsonl(tmp_path / "in.jsonl", rows), sampling={"max_tokens": 1})
    last = read_jsonl(tmp_path / "in.out.jsonl")[-1]
    assert last["raw"] == '{"prompt": "y", "error": "mine"}'
    assert last["error"]["code"] == "reserved_column"
    assert report.rows_failed == 1


def test_token_ids_on_request(tmp_path: Path, world: World) -> None:
    source = write_jsonl(tmp_path / "in.jsonl", [{"prompt_token_ids": [1, 2, 3]}, {"prompt": ""}])
    world.run(source, tmp_path / "a.jsonl", generated_token_ids=True)
    good, bad = read_jsonl(tmp_path / "a.jsonl")
    assert len(good["generated_token_ids"]) == good["num_generated_tokens"] == 6
    assert bad["generated_token_ids"] is None
    world.run(source, tmp_path / "a.parquet", generated_token_ids=True)
    assert pq.read_table(tmp_path / "a.parquet")["generated_token_ids"].to_pylist() == [good["generated_token_ids"], None]


def test_text_files_and_gzip_and_folders(tmp_path: Path, world: World) -> None:
    (tmp_path / "in.txt").write_bytes("\ufefffirst\r\n\n  second \nthird".encode())
    world.run(tmp_path / "in.txt")
    assert [row["prompt"] for row in read_jsonl(tmp_path / "in.out.jsonl")] == ["first", "  second ", "third"]
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "b.jsonl.gz").write_bytes(gzip.compress(b'{"prompt": "b1"}\nbroken\n'))
    (folder / "a.jsonl").write_bytes(b'{"prompt": "a1"}\n')
    for name in (".hidden.jsonl", "_SUCCESS", "README.md", "c.jsonl.tmp", "old.out.jsonl"):
        (folder / name).write_text("never data")
    (folder / "sub").mkdir()
    for _ in range(2):  # the second time its own output stands inside
        report = world.run(folder, folder / "mine.jsonl")
        out = read_jsonl(folder / "mine.jsonl")
        assert [row.get("prompt") for row in out] == ["a1", "b1", None]
        assert out[2]["error"]["message"].startswith("b.jsonl.gz line 2")
    assert report.already_complete


def test_prompts_from_a_named_column(tmp_path: Path, world: World) -> None:
    source = write_jsonl(tmp_path / "in.jsonl", [{"question": "q", "prompt": "not this"}])
    world.run(source, prompt_column="question", chat=False)
    assert world.prompts == ["q"]


def test_strict_ends_at_the_first_bad_row(tmp_path: Path, world: World) -> None:
    source = write_jsonl(tmp_path / "in.jsonl", [{"prompt": "a"}, {"prompt": ""}])
    with pytest.raises(BatchInferError, match="line 2") as caught:
        world.run(source, strict=True)
    assert caught.value.exit_code == 1
    assert not (tmp_path / "in.out.jsonl").exists()
    with pytest.raises(BatchInferError, match="line 2"):  # going on does not pass over it
        world.run(source, strict=True)


def test_messages_name_the_row_by_its_id(tmp_path: Path, world: World) -> None:
    source = write_jsonl(tmp_path / "in.jsonl", [{"key": "k1", "id": 5, "prompt": ""}])
    world.run(source, tmp_path / "a.jsonl")
    assert read_jsonl(tmp_path / "a.jsonl")[0]["error"]["message"] == "line 1 (id 5): prompt is empty"
    world.run(source, tmp_path / "b.jsonl", id_column="key")
    assert read_jsonl(tmp_path / "b.jsonl")[0]["error"]["message"] == "line 1 (id 'k1'): prompt is empty"
    with pytest.raises(BatchInferError, match="'nope'"):
        world.run(source, tmp_path / "c.jsonl", id_column="nope")


def test_columns_that_no_row_has_are_mentioned(tmp_path: Path, world: World) -> None:
    world.run(write_jsonl(tmp_path / "in.jsonl", [{"prompt": "a", "id": 1}]), drop_columns=("id", "idd"))
    assert any(note.startswith("--drop-columns idd:") for note in world.notes)
    assert not any("'id'" in note for note in world.notes)


def test_pool_need_covers_the_widest_rows(tmp_path: Path, world: World) -> None:
    rows = [{"prompt_token_ids": [1] * n, "max_tokens": 10} for n in range(1, 21)]
    world.run(write_jsonl(tmp_path / "in.jsonl", rows), max_num_seqs=4)
    assert world.need == sum(n + 10 for n in (20, 19, 18, 17))


def test_faces_hear_of_the_job(tmp_path: Path, world: World) -> None:
    rows = [{"prompt": f"p{i}"} for i in range(30)]
    report = world.run(write_jsonl(tmp_path / "in.jsonl", rows))
    assert world.infos[0].num_rows == 30
    assert world.snapshots[-1].rows_done == 30
    assert world.snapshots[-1].fraction_read == 1.0
    assert len(world.answers) == 1
    assert report.seconds.io > 0
    assert report.stats.steps > 0


def test_every_column_may_be_dropped(tmp_path: Path, world: World) -> None:
    write_jsonl(tmp_path / "in.jsonl", [{"prompt": "a"}, {"prompt": "b"}])
    pq.write_table(pa.table({"prompt": ["a", "b"]}), tmp_path / "in.parquet", row_group_size=1)
    for kind in ("jsonl", "parquet"):
        for ending in ("jsonl", "parquet"):
            output = tmp_path / f"{kind}.out.{ending}"
            world.run(tmp_path / f"in.{kind}", output, drop_columns=("prompt",))
            rows = read_jsonl(output) if ending == "jsonl" else pq.read_table(output).to_pylist()
            assert [list(row) for row in rows] == [RESULT, RESULT]
            assert all(row["generated_text"] for row in rows)


@pytest.mark.parametrize("padding", [0, 1, 61, 62, 63, 100, 70_000])
def test_an_empty_object_however_padded(tmp_path: Path, padding: int) -> None:
    source = write_jsonl(tmp_path / "in.jsonl", ["{" + " " * padding + "}", {"prompt": "x"}])
    World().run(source, tmp_path / "out.jsonl")
    first, second = read_jsonl(tmp_path / "out.jsonl")
    assert next(iter(first)) == "generated_text"
    assert first["error"] is not None
    assert second["error"] is None


def test_names_that_read_alike_stay_apart(tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "in.jsonl", ['{"prompt":"x","\\\\udc80":1,"\\udc80":2,"\\\\udc80_2":3}'])
    World().run(source, tmp_path / "out.parquet")
    row = pq.read_table(tmp_path / "out.parquet").to_pylist()[0]
    assert [row["\\udc80"], row["\\udc80_3"], row["\\udc80_2"]] == [1, 2, 3]


def test_places_of_bad_rows(tmp_path: Path) -> None:
    """Lines are counted from 1, as editors do; rows of tables from 0, as the report's positions are."""
    write_jsonl(tmp_path / "a.jsonl", [{"prompt": "x"}, '{"prompt":"a\tb"}'])
    World().run(tmp_path / "a.jsonl", tmp_path / "a.out.jsonl")
    message = read_jsonl(tmp_path / "a.out.jsonl")[1]["error"]["message"]
    assert message == "line 2: not JSON: invalid control character at column 13"
    pq.write_table(pa.table({"prompt": ["x", "", "y"]}), tmp_path / "b.parquet")
    report = World().run(tmp_path / "b.parquet", tmp_path / "b.out.jsonl")
    assert report.failed_positions == [(1, 1)]
    assert report.first_errors == ["empty_prompt: row 1: prompt is empty"]
    with pytest.raises(BatchInferError, match=r"^--strict: row 1: prompt is empty \(empty_prompt\)$"):
        World().run(tmp_path / "b.parquet", tmp_path / "c.out.jsonl", strict=True)


def test_counts_of_failed_rows_are_counts(tmp_path: Path) -> None:
    """Data frames keep integer columns; what is known of a prompt that was too long is told."""
    rows: list[Any] = [{"prompt_token_ids": [1] * 250}, {"prompt": "x" * 250}, {"prompt": ""}, "no JSON", {"prompt": "y"}]
    World().run(write_jsonl(tmp_path / "in.jsonl", rows), tmp_path / "out.jsonl", chat=False)
    out = read_jsonl(tmp_path / "out.jsonl")
    assert [row["num_input_tokens"] for row in out] == [250, 0, 0, 0, 1]
    assert [row["num_generated_tokens"] for row in out] == [0, 0, 0, 0, 6]


def test_nothing_found_and_nothing_chosen(tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "in.jsonl", [{"prompt": "x"}])
    assert "0 rows chosen" in World().run(source, tmp_path / "a.jsonl", limit=0).message
    assert "0 rows chosen" in World().run(source, tmp_path / "b.jsonl", offset=9).message
    assert "0 rows found" in World().run(write_jsonl(tmp_path / "empty.jsonl", []), tmp_path / "c.jsonl", limit=1).message
