"""The README's snippets that read results, run as they stand, with each library that is installed."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.job.world import World, write_jsonl

README = (Path(__file__).parents[2] / "README.md").read_text()
SNIPPETS = dict(re.findall(r"```python\n(import (pandas|duckdb|polars).*?)```", README, flags=re.S))
BY_LIBRARY = {library: code for code, library in SNIPPETS.items()}


@pytest.fixture
def answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    source = write_jsonl(tmp_path / "in.jsonl", [{"id": "007", "prompt": "a"}, {"id": "8", "prompt": None}, {"id": "9", "prompt": "c"}])
    for ending in ("jsonl", "parquet"):
        World().run(source, tmp_path / f"answers.{ending}")
    return tmp_path


@pytest.mark.parametrize("library", ["pandas", "duckdb", "polars"])
def test_snippets_read_what_was_written(answers: Path, library: str, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip(library)
    exec(BY_LIBRARY[library], {})
    assert capsys.readouterr().out


def test_pandas_reads_jsonl(answers: Path) -> None:
    pandas = pytest.importorskip("pandas")
    frame = pandas.read_json(answers / "answers.jsonl", lines=True, dtype=False)
    assert list(frame["id"]) == ["007", "8", "9"]
    assert list(frame["error"].notna()) == [False, True, False]


def test_polars_reads_jsonl(answers: Path) -> None:
    polars = pytest.importorskip("polars")
    assert polars.read_ndjson(answers / "answers.jsonl")["finish_reason"].to_list() == ["length", "error", "length"]


def test_duckdb_reads_jsonl(answers: Path) -> None:
    duckdb = pytest.importorskip("duckdb")
    found = duckdb.sql("SELECT id, error.code FROM 'answers.jsonl'").fetchall()
    assert [row[1] for row in found] == [None, "empty_prompt", None]
