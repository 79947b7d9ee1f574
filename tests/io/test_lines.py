"""Lines: what ends one, what is blank, gzip, folders, and that memory does not grow."""

from __future__ import annotations

import gzip
import tracemalloc
from pathlib import Path

import pytest

from batchinfer.errors import InputFileError
from batchinfer.io.data_file import LocalFile
from batchinfer.io.find import find_files
from batchinfer.io.line_source import LineSource
from batchinfer.io.source import open_source, stem_of


def rows_of(path: Path, **span: int) -> list[tuple[int, int, bytes]]:
    return [(row.position, row.line, row.raw) for row in LineSource((LocalFile(path),), "jsonl").rows(**span)]


def test_only_newlines_end_a_line(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes('{"a":"\u2028\u0085\x0b\x0c\r"}\r\n\n \t\r\n{"b":1}\r\r\n{"c":2}'.encode())
    assert rows_of(path) == [(0, 1, '{"a":"\u2028\u0085\x0b\x0c\r"}'.encode()), (1, 4, b'{"b":1}\r'), (2, 5, b'{"c":2}')]


def test_one_leading_mark_is_dropped(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"a":"\xef\xbb\xbf"}\n\xef\xbb\xbf{}\n')
    source = LineSource((LocalFile(path),), "jsonl")
    first, second = source.rows()
    source.parse(first)
    source.parse(second)
    assert first.values == {"a": "\ufeff"}
    assert second.error is not None


def test_spans_keep_positions_and_lines(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b"{}\n\n" * 10)
    assert rows_of(path, start=3, stop=5) == [(3, 7, b"{}"), (4, 9, b"{}")]
    assert rows_of(path, start=30) == []


def test_memory_does_not_grow_with_the_file(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl.gz"
    with gzip.open(path, "wb", compresslevel=1) as file:
        for _ in range(40):
            file.write(b'{"prompt":"0123456789012345678901234567890123456789"}\n' * 10_000)
    tracemalloc.start()
    count = sum(1 for _ in LineSource((LocalFile(path),), "jsonl").rows())
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert count == 400_000
    assert peak < 8 << 20


def test_a_cut_gzip_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl.gz"
    path.write_bytes(gzip.compress(b"{}\n" * 1000, 1)[:-12])
    with pytest.raises(InputFileError, match=r"a\.jsonl\.gz.*damaged or cut off"):
        rows_of(path)


def test_names(tmp_path: Path) -> None:
    assert [stem_of(name) for name in ("a.jsonl", "a.b.jsonl.gz", "a.ndjson.zst")] == ["a", "a.b", "a"]
    for name in ("A.JSONL", "b.NDJSON.GZ", "c.Txt"):
        (tmp_path / name).write_bytes(b"{}\n")
        assert find_files(str(tmp_path / name)).kind == ("text" if name == "c.Txt" else "jsonl")


def test_folders_are_read_in_the_order_of_names(tmp_path: Path) -> None:
    for name in ("b.jsonl", "a.jsonl", "c.jsonl"):
        (tmp_path / name).write_text(f'{{"prompt":"{name}"}}\n')
    (tmp_path / "c.jsonl.report.json").write_text("{}")  # c is the output of a job
    files = find_files(str(tmp_path))
    assert [path.name for path in files.files] == ["a.jsonl", "b.jsonl"]
    rows = list(open_source(files).rows())
    assert [(row.position, row.place) for row in rows] == [(0, "a.jsonl line 1"), (1, "b.jsonl line 1")]
    (tmp_path / "empty").mkdir()
    with pytest.raises(InputFileError, match=r"no \.jsonl"):
        find_files(str(tmp_path / "empty"))
