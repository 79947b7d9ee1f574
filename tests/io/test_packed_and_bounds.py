"""gzip and zstd, damaged and whole; and what a line, a document and an archive may hold at most."""

from __future__ import annotations

import gzip
import json
import tracemalloc
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from batchinfer.errors import InputFileError
from batchinfer.io import line_source
from batchinfer.io.data_file import LocalFile
from batchinfer.io.json_rows import MAX_DEPTH
from batchinfer.io.line_source import LineSource
from batchinfer.io.lines import KEPT_OF_LONG
from tests.job.world import World, leftovers, read_jsonl

PACK = {"gz": lambda data: gzip.compress(data, 1), "zst": lambda data: pa.compress(data, "zstd", asbytes=True)}
CONTENT = {
    "jsonl": b'{"prompt":"a","n":1}\n{"prompt":"b","n":2}\n',
    "csv": b'prompt,n\n"a",1\nb,2\n',
    "txt": b"a\nb\n",
}


@pytest.mark.parametrize("packing", PACK)
@pytest.mark.parametrize("kind", CONTENT)
def test_packed_files_are_read_as_what_they_hold(tmp_path: Path, kind: str, packing: str) -> None:
    plain, packed, twice = tmp_path / f"a.{kind}", tmp_path / f"b.{kind}.{packing}", tmp_path / f"c.{kind}"
    plain.write_bytes(CONTENT[kind])
    half = CONTENT[kind].index(b"b")
    packed.write_bytes(PACK[packing](CONTENT[kind][:half]) + PACK[packing](CONTENT[kind][half:]))  # as `cat a.gz b.gz` makes them
    twice.write_bytes(PACK[packing](CONTENT[kind]))  # the first bytes decide, whatever the name says
    outs = []
    for source in (plain, packed, twice):
        World().run(source, tmp_path / "out.jsonl", overwrite=True)
        outs.append(read_jsonl(tmp_path / "out.jsonl"))
    assert outs[0] == outs[1] == outs[2]
    assert [row["prompt"] for row in outs[0]] == ["a", "b"]
    World().run(packed)
    assert (tmp_path / "b.out.jsonl").exists()


@pytest.mark.parametrize("packing", PACK)
def test_a_damaged_archive_keeps_what_was_finished(tmp_path: Path, packing: str) -> None:
    rows = b"".join(b'{"prompt":"%d","x":"%s"}\n' % (i, str(hash(str(i)) ** 7).encode()) for i in range(8000))
    whole = PACK[packing](rows)
    source = tmp_path / f"a.jsonl.{packing}"
    broken = bytearray(whole)
    broken[len(whole) * 3 // 4] ^= 0xFF
    contents = [whole[: len(whole) * 3 // 4], whole + b"junk"]
    if packing == "gz":  # zstd notices a changed byte only where its writer added a checksum
        contents.append(bytes(broken))
    for content in contents:
        source.write_bytes(content)
        with pytest.raises(InputFileError, match=r"a\.jsonl.*damaged or cut off after line [\d,]+"):
            World().run(source, tmp_path / "out.jsonl", {"max_tokens": 1}, chat=False, overwrite=True)
        assert not (tmp_path / "out.jsonl").exists()
        assert leftovers(tmp_path / "out.jsonl") == ["out.jsonl.manifest.json", "out.jsonl.partial"]
        assert (tmp_path / "out.jsonl.partial").read_bytes().count(b"\n") > 100


def test_a_line_beyond_the_limit_is_a_row_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(line_source, "MAX_LINE_BYTES", 10_000)
    long = '{"prompt":"' + "x" * 30_000 + '"}'
    (tmp_path / "a.jsonl").write_text('{"prompt":"a"}\n' + long + "\n" + '{"prompt":"b"}\n' + long)
    report = World().run(tmp_path / "a.jsonl", tmp_path / "out.jsonl")
    rows = read_jsonl(tmp_path / "out.jsonl")
    assert report.rows_failed == 2
    assert [(row["error"] or {}).get("code") for row in rows] == [None, "line_too_long", None, "line_too_long"]
    assert rows[1]["raw"] == long[:KEPT_OF_LONG]
    assert "has 30,01" in rows[1]["error"]["message"]


@pytest.mark.parametrize("packing", PACK)
def test_an_archive_that_unpacks_to_very_much_stays_small(tmp_path: Path, packing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(line_source, "MAX_LINE_BYTES", 1 << 20)
    part = PACK[packing](b"\0" * (16 << 20))
    (tmp_path / f"a.jsonl.{packing}").write_bytes(PACK[packing](b'{"prompt":"a"}\n') + part * 4 + PACK[packing](b'\n{"prompt":"b"}\n'))
    tracemalloc.start()
    before = pa.total_allocated_bytes()
    rows = list(LineSource((LocalFile(tmp_path / f"a.jsonl.{packing}"),), "jsonl").rows())
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert [row.error and row.error.code for row in rows] == [None, "line_too_long", None]
    assert peak < 16 << 20
    assert pa.total_allocated_bytes() - before < 16 << 20


def test_depth(tmp_path: Path) -> None:
    def nested(depth: int) -> str:
        return '{"prompt":"a","x":' + "[" * (depth - 1) + "]" * (depth - 1) + "}"

    wide = json.dumps({"prompt": "a", "x": [[]] * 1000})
    (tmp_path / "a.jsonl").write_text("\n".join([nested(MAX_DEPTH), nested(MAX_DEPTH + 1), nested(100_000), wide]))
    for ending in ("jsonl", "parquet"):
        World().run(tmp_path / "a.jsonl", tmp_path / f"out.{ending}")
    rows = read_jsonl(tmp_path / "out.jsonl")
    assert [(row["error"] or {}).get("code") for row in rows] == [None, "invalid_json", "invalid_json", None]
    assert f"more than {MAX_DEPTH} deep" in rows[1]["error"]["message"]


@pytest.mark.parametrize("where", ["x", "messages", "tools", "response_format", "chat_template_kwargs", "sampling_params", "stop"])
def test_the_deepest_json_ends_in_an_answer_or_in_an_error_of_its_row(tmp_path: Path, where: str) -> None:
    """Whatever column it stands in, and with a NaN at the bottom, which the output has to be written without."""
    for inside in ("[NaN]", '{"a":NaN}'):
        opened, closed = ("[", "]") if inside[0] == "[" else ('{"a":', "}")
        deep = opened * (MAX_DEPTH - 2) + inside + closed * (MAX_DEPTH - 2)
        asked = "" if where == "messages" else '"prompt":"a",'
        middle = f'{{"id":2,{asked}"{where}":{deep}}}'
        (tmp_path / "a.jsonl").write_text(f'{{"id":1,"prompt":"a"}}\n{middle}\n{{"id":3,"prompt":"a"}}\n')
        for ending in ("jsonl", "parquet"):
            World().run(tmp_path / "a.jsonl", tmp_path / f"out.{ending}", overwrite=True)
        first, row, last = read_jsonl(tmp_path / "out.jsonl")
        assert first["error"] is last["error"] is None
        assert (row["error"] is None) == (where == "x"), row["error"]
        assert row["id"] == 2
        assert json.dumps(row[where]).replace(" ", "") == deep.replace("NaN", "null")
        stored = pq.read_table(tmp_path / "out.parquet").to_pylist()[1]
        assert stored[where].replace(" ", "") == deep.replace("NaN", "null")
