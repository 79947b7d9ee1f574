"""`--unordered`: rows to a stream as they finish, every one once, each as it would stand in a file."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from batchinfer.errors import ConfigError
from tests.job.test_harm import ROWS, start
from tests.job.test_openai import chat, text
from tests.job.world import World, write_jsonl


def run_child(source: Path) -> list[bytes]:
    process = start(source, "-", "--unordered", "--seqs=4", stdout=subprocess.PIPE)
    out, told = process.communicate(timeout=60)
    assert process.returncode in (0, 3), told
    return out.splitlines(keepends=True)


def in_order(source: Path, folder: Path) -> list[bytes]:
    World().run(source, folder / "whole.jsonl", {"max_tokens": 5}, chat=False)
    lines = (folder / "whole.jsonl").read_bytes().splitlines(keepends=True)
    errors = folder / "whole.errors.jsonl"
    return lines + (errors.read_bytes().splitlines(keepends=True) if errors.exists() else [])


def test_lines(tmp_path: Path) -> None:
    rows = [{**row, "max_tokens": 1 + row["id"] % 7} for row in ROWS]  # type: ignore[operator]
    source = write_jsonl(tmp_path / "in.jsonl", [*rows[:9], "not json", {"x": 1}, *rows[9:]])
    lines, whole = run_child(source), in_order(source, tmp_path)
    assert lines != whole
    assert sorted(lines) == sorted(whole)


def test_tables(tmp_path: Path) -> None:
    rows = [{"x": [i], "prompt": None if i == 5 else f"prompt {i}", "y": {"a": i}, "max_tokens": 1 + i % 7} for i in range(40)]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "in.parquet")
    lines, whole = run_child(tmp_path / "in.parquet"), in_order(tmp_path / "in.parquet", tmp_path)
    assert lines != whole
    assert sorted(lines) == sorted(whole)


def test_openai_lines(tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "in.jsonl", [chat("a"), text("b", "x"), chat("c", temprature=1), chat("d", max_tokens=1)])
    assert sorted(run_child(source)) == sorted(in_order(source, tmp_path))


def test_a_file_is_in_order(tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "in.jsonl", [{"prompt": "x"}])
    with pytest.raises(ConfigError, match="--unordered"):
        World().run(source, tmp_path / "out.jsonl", unordered=True)
