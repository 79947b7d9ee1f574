"""Shards: parts of one job's rows whose outputs, laid end to end, are that job's output."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from batchinfer.errors import ConfigError
from batchinfer.io.options import Shard
from tests.job.test_openai import chat
from tests.job.world import World, leftovers, read_jsonl, write_jsonl

SAMPLED = {"max_tokens": 6, "temperature": 1.0}


def mixed_rows(count: int) -> list[Any]:
    """Rows whose columns change type and appear late, so that a shard by itself would guess other types."""
    rows: list[Any] = [{"id": i, "prompt": f"prompt {i}", "x": i if i < count // 2 else "text"} for i in range(count)]
    rows[count - 2]["late"] = {"a": 1}
    rows[count // 2] = "not json"
    return rows


def run_shards(source: Path, ending: str, count: int, **options: Any) -> list[Path]:
    outputs = []
    for index in range(1, count + 1):
        output = source.parent / f"part{index}.{ending}"
        World(max_num_seqs=index + 1).run(source, output, SAMPLED, shard=Shard(index, count), **options)
        assert leftovers(output) == []
        outputs.append(output)
    return outputs


@pytest.mark.parametrize(("offset", "limit"), [(0, None), (3, None), (2, 9), (0, 5), (15, 100), (40, None)])
@pytest.mark.parametrize("count", [1, 3, 8])
def test_jsonl_shards_are_the_job(tmp_path: Path, count: int, offset: int, limit: int | None) -> None:
    source = write_jsonl(tmp_path / "in.jsonl", mixed_rows(17))
    World().run(source, tmp_path / "whole.jsonl", SAMPLED, offset=offset, limit=limit)
    whole = (tmp_path / "whole.jsonl").read_bytes()
    parts = run_shards(source, "jsonl", count, offset=offset, limit=limit)
    assert b"".join(part.read_bytes() for part in parts) == whole
    sizes = [part.read_bytes().count(b"\n") for part in parts]
    assert max(sizes) - min(sizes) <= 1


@pytest.mark.parametrize("kind", ["jsonl", "jsonl.gz", "parquet"])
def test_parquet_shards_are_the_job(tmp_path: Path, kind: str) -> None:
    source = tmp_path / f"in.{kind}"
    if kind == "parquet":
        rows = [{"id": i, "prompt": f"prompt {i}", "x": [i] * (i % 3)} for i in range(23)]
        pq.write_table(pa.Table.from_pylist(rows), source, row_group_size=5)
    else:
        text = "".join((row if isinstance(row, str) else json.dumps(row)) + "\n\n" for row in mixed_rows(23)).encode()
        source.write_bytes(gzip.compress(text) if kind.endswith("gz") else text)
    World().run(source, tmp_path / "whole.parquet", SAMPLED, offset=1)
    whole = pq.read_table(tmp_path / "whole.parquet")
    parts = [pq.read_table(part) for part in run_shards(source, "parquet", 4, offset=1)]
    assert all(part.schema.equals(whole.schema, check_metadata=True) for part in parts)
    assert pa.concat_tables(parts).combine_chunks().equals(whole.combine_chunks())


def test_a_shard_is_judged_by_the_first_rows_of_all(tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "in.jsonl", [*(chat(f"row-{i}") for i in range(6)), {"prompt": "plain"}, {"prompt": "plain"}])
    World().run(source, tmp_path / "whole.jsonl", {})
    outputs = run_shards(source, "jsonl", 4)
    assert b"".join(part.read_bytes() for part in outputs) == (tmp_path / "whole.jsonl").read_bytes()
    assert (tmp_path / "part4.errors.jsonl").read_bytes() == (tmp_path / "whole.errors.jsonl").read_bytes()


def test_names_that_sort_and_a_job_of_its_own(tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "in.jsonl", [{"prompt": f"p{i}", "max_tokens": i + 1} for i in range(10)])
    for index in (1, 2):
        World().run(source, shard=Shard(index, 2))
    assert [len(read_jsonl(tmp_path / f"in.0000{index}-of-00002.out.jsonl")) for index in (1, 2)] == [5, 5]
    assert World().run(source, shard=Shard(2, 2)).already_complete
    world = World(stop_after=5)
    with pytest.raises(KeyError):
        world.run(source, tmp_path / "a.jsonl", shard=Shard(2, 3))
    with pytest.raises(Exception, match="shard"):
        World().run(source, tmp_path / "a.jsonl", shard=Shard(1, 3))
    World().run(source, tmp_path / "a.jsonl", shard=Shard(2, 3))
    assert [row["prompt"] for row in read_jsonl(tmp_path / "a.jsonl")] == ["p3", "p4", "p5"]


@pytest.mark.parametrize("text", ["", "1", "0/4", "5/4", "1/0", "-1/3", "1/3/5", "a/b", "1.0/2"])
def test_what_is_no_shard(text: str) -> None:
    with pytest.raises(ConfigError, match="--shard"):
        Shard.parse(text)
