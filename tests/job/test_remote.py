"""Inputs and outputs in object stores, against a local server that speaks S3; and the hub's addresses without the hub."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from batchinfer.errors import BatchInferError, ConfigError, InputFileError, OutputConflict, OutputError
from batchinfer.io.remote import _expression
from tests.job.world import World, leftovers, read_jsonl, write_jsonl

ROWS = [{"prompt": f"row {i}", "id": i} for i in range(20)]
LINES = b"".join(json.dumps(row).encode() + b"\n" for row in ROWS)


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    moto = pytest.importorskip("moto.server", reason="moto is not installed: pip install 'moto[server]', or make test, which does")
    running = moto.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    running.start()
    yield "http://{}:{}".format(*running.get_host_and_port())
    running.stop()


@pytest.fixture
def bucket(server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A file system with an empty bucket of that name; this machine's folders are those of the test."""
    from pyarrow.fs import FileSystem

    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "somebody")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    monkeypatch.setenv("AWS_ENDPOINT_URL", server)
    monkeypatch.setenv("BATCHINFER_CACHE", str(tmp_path / "cache"))
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    fs, _ = FileSystem.from_uri("s3://bucket/?allow_bucket_creation=true&allow_bucket_deletion=true")
    fs.create_dir("bucket")
    fs.delete_dir_contents("bucket")
    return fs


def put(fs: Any, path: str, data: bytes) -> str:
    with fs.open_output_stream(f"bucket/{path}", compression=None) as file:
        file.write(data)
    return f"s3://bucket/{path}"


def names_in(fs: Any) -> list[str]:
    from pyarrow.fs import FileSelector

    return sorted(item.path for item in fs.get_file_info(FileSelector("bucket", recursive=True)) if item.is_file)


def lines_of(fs: Any, path: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in fs.open_input_stream(f"bucket/{path}").read().splitlines()]


def test_each_format_reads_as_it_does_here(tmp_path: Path, bucket: Any) -> None:
    table = pa.table({"prompt": [row["prompt"] for row in ROWS], "id": [row["id"] for row in ROWS]})
    pq.write_table(table, tmp_path / "a.parquet", row_group_size=7)
    with pa.ipc.new_file(tmp_path / "a.arrow", table.schema) as writer:
        writer.write_table(table, max_chunksize=6)
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(LINES))
    (tmp_path / "a.jsonl").write_bytes(LINES)
    (tmp_path / "a.csv").write_text("prompt,id\n" + "".join(f"{row['prompt']},{row['id']}\n" for row in ROWS))
    World().run(tmp_path / "a.jsonl", tmp_path / "expected.jsonl")
    expected = read_jsonl(tmp_path / "expected.jsonl")
    for name in ("a.jsonl", "a.jsonl.gz", "a.csv", "a.parquet", "a.arrow"):
        World().run(put(bucket, f"in put/{name}", (tmp_path / name).read_bytes()), tmp_path / "out.jsonl", overwrite=True)
        assert read_jsonl(tmp_path / "out.jsonl") == expected


def test_the_default_output_is_here(bucket: Any) -> None:
    World().run(put(bucket, "deep/er/in.jsonl", LINES))
    assert len(read_jsonl(Path("in.out.jsonl"))) == 20


def test_folders_and_patterns(tmp_path: Path, bucket: Any) -> None:
    for name in ("d/b.jsonl", "d/a.jsonl", "d/x/c.jsonl", "d/old.out.jsonl", "d/done.jsonl", "d/_SUCCESS", "d/t.txt"):
        put(bucket, name, json.dumps({"prompt": name}).encode())
    put(bucket, "d/done.jsonl.report.json", b"{}")

    def prompts(given: str) -> list[str]:
        World().run(given, tmp_path / "out.jsonl", overwrite=True)
        return [row["prompt"] for row in read_jsonl(tmp_path / "out.jsonl")]

    assert prompts("s3://bucket/d/*.jsonl") == ["d/a.jsonl", "d/b.jsonl"]
    assert prompts("s3://bucket/d/**/*.jsonl") == ["d/a.jsonl", "d/b.jsonl", "d/x/c.jsonl"]
    assert prompts("s3://bucket/d/[bx]*") == ["d/b.jsonl"]
    with pytest.raises(InputFileError, match="more than one kind"):
        World().run("s3://bucket/d/", tmp_path / "out.jsonl")
    bucket.delete_file("bucket/d/t.txt")
    assert prompts("s3://bucket/d/") == ["d/a.jsonl", "d/b.jsonl"]


def test_an_output_in_the_store(tmp_path: Path, bucket: Any) -> None:
    source = put(bucket, "in.jsonl", LINES)
    for ending in ("jsonl", "parquet"):
        report = World().run(source, f"s3://bucket/results/out.{ending}")
        assert report.output == f"s3://bucket/results/out.{ending}"
    assert names_in(bucket) == [f"bucket/{name}" for name in (
        "in.jsonl", "results/out.jsonl", "results/out.jsonl.report.json", "results/out.parquet", "results/out.parquet.report.json"
    )]  # fmt: skip
    rows = lines_of(bucket, "results/out.jsonl")
    assert [row["id"] for row in rows] == list(range(20))
    assert pq.read_table("bucket/results/out.parquet", filesystem=bucket)["id"].to_pylist() == list(range(20))
    assert list(Path().iterdir()) == []
    assert [path for path in (tmp_path / "cache").rglob("*") if path.is_file()] == []
    again = World()
    assert again.run(source, "s3://bucket/results/out.jsonl").already_complete
    assert again.loads == 0
    put(bucket, "results/out.jsonl", b"{}\n")
    with pytest.raises(OutputConflict, match="not those that this job sent"):
        World().run(source, "s3://bucket/results/out.jsonl")
    World().run(source, "s3://bucket/results/out.jsonl", overwrite=True)
    assert lines_of(bucket, "results/out.jsonl") == rows


def test_a_stopped_job_goes_on_from_any_folder(tmp_path: Path, bucket: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    source = put(bucket, "in.jsonl", LINES)
    first = World(stop_after=12, max_num_seqs=2)
    with pytest.raises(KeyError):
        first.run(source, "s3://bucket/out.jsonl")
    assert names_in(bucket) == ["bucket/in.jsonl"]
    [work] = (tmp_path / "cache" / "jobs").iterdir()
    assert leftovers(work / "out.jsonl") == ["out.jsonl.manifest.json", "out.jsonl.partial"]
    monkeypatch.chdir(tmp_path)
    report = World().run(source, "s3://bucket/out.jsonl")
    assert 0 < report.rows_done_before < 20
    assert [row["id"] for row in lines_of(bucket, "out.jsonl")] == list(range(20))
    assert not work.exists()


def test_rows_that_changed_in_the_store_are_noticed(bucket: Any) -> None:
    source = put(bucket, "in.jsonl", LINES)
    with pytest.raises(KeyError):
        World(stop_after=12, max_num_seqs=2).run(source, "s3://bucket/out.jsonl")
    put(bucket, "in.jsonl", LINES.replace(b"row 1", b"ROW 1"))  # as many bytes, another tag
    with pytest.raises(OutputConflict, match=r"in\.jsonl was modified"):
        World().run(source, "s3://bucket/out.jsonl")
    report = World().run(source, "s3://bucket/out.jsonl", overwrite=True)
    assert report.rows_ok == 20


def test_failed_rows_run_again_from_the_store(bucket: Any) -> None:
    source = put(bucket, "in.jsonl", b'{"prompt":"a"}\n{"prompt":"bad"}\n{"prompt":"c"}\n')
    assert World(refuse="bad").run(source, "s3://bucket/out.jsonl").rows_failed == 1
    world = World()
    report = world.run(source, "s3://bucket/out.jsonl", retry_errors=True)
    assert (report.rows_ok, world.rows_run) == (3, 1)
    assert [row["error"] for row in lines_of(bucket, "out.jsonl")] == [None, None, None]


def test_openai_lines_and_their_errors(tmp_path: Path, bucket: Any) -> None:
    lines = [
        {"custom_id": str(i), "method": "POST", "url": "/v1/chat/completions", "body": {"messages": [{"role": "user", "content": text}]}}
        for i, text in enumerate(["a", "bad"])
    ]
    source = write_jsonl(tmp_path / "in.jsonl", lines)
    report = World(refuse="bad").run(source, "s3://bucket/out.jsonl")
    assert report.message == "failed lines: s3://bucket/out.errors.jsonl"
    assert [row["custom_id"] for row in lines_of(bucket, "out.errors.jsonl")] == ["1"]
    World().run(source, "s3://bucket/out.jsonl", retry_errors=True)
    assert names_in(bucket) == ["bucket/out.jsonl", "bucket/out.jsonl.report.json"]


def test_an_upload_that_fails_loses_nothing(bucket: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from batchinfer.io import delivery

    source = put(bucket, "in.jsonl", LINES)
    with monkeypatch.context() as broken:
        broken.setattr(delivery.Store, "tag", lambda self, path: (_ for _ in ()).throw(OutputError("the store went away")))
        broken.setattr("batchinfer.io.remote.RemoteFile.stamp", lambda self: 0)
        with pytest.raises(OutputError):
            World().run(source, "s3://bucket/out.jsonl", overwrite=True)
    world = World()
    assert world.run(source, "s3://bucket/out.jsonl", overwrite=True).rows_ok == 20


def test_what_is_refused_before_the_model_loads(bucket: Any) -> None:
    source = put(bucket, "in.jsonl", LINES)
    there = put(bucket, "there.jsonl", b"precious")
    cases: list[tuple[str, str | None, type[BatchInferError], str]] = [
        ("s3://bucket/absent.jsonl", None, InputFileError, "s3://bucket/absent.jsonl: no such file"),
        ("s3://nobody/in.jsonl", None, InputFileError, "no such file"),
        ("s3://key:word@bucket/in.jsonl", None, ConfigError, "keys do not belong"),
        ("https://host/in.jsonl", None, InputFileError, "https:// is not read"),
        (source, source, OutputConflict, "the output is the input"),
        (source, there, OutputConflict, "exists already"),
        (source, "s3://nobody/out.jsonl", OutputError, "no 'nobody'"),
        (source, "s3://bucket/out.csv", ConfigError, "must end in"),
        (source, "hf://datasets/a/b/out.jsonl", ConfigError, "hf upload"),
    ]
    for given, output, error, words in cases:
        world = World()
        with pytest.raises(error, match=words) as caught:
            world.run(given, output)
        assert world.loads == 0
        assert "word@" not in str(caught.value)
    assert bucket.open_input_stream("bucket/there.jsonl").read() == b"precious"


def test_the_hub_without_the_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(InputFileError, match=r"hf://datasets/org/name/a\.jsonl: cannot be reached.*HF_HUB_OFFLINE"):
        World().run("hf://datasets/org/name/a.jsonl")


def test_the_hubs_file_system_is_read_like_any_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The hub's own is built upon fsspec; another one of that family stands in for it."""
    import fsspec
    from pyarrow.fs import FSSpecHandler, PyFileSystem

    memory = fsspec.filesystem("memory")
    monkeypatch.setattr("batchinfer.io.remote._hub", lambda: PyFileSystem(FSSpecHandler(memory)))
    pq.write_table(pa.table({"prompt": ["a", "b"]}), tmp_path / "a.parquet")
    memory.pipe_file("/datasets/org/name/data/b.parquet", (tmp_path / "a.parquet").read_bytes())
    memory.pipe_file("/datasets/org/name/data/a.jsonl.gz", gzip.compress(LINES))
    World().run("hf://datasets/org/name/data/a.jsonl.gz", tmp_path / "out.jsonl")
    assert [row["id"] for row in read_jsonl(tmp_path / "out.jsonl")] == list(range(20))
    World().run("hf://datasets/org/name/**/*.parquet", tmp_path / "out.parquet")
    assert pq.read_table(tmp_path / "out.parquet")["prompt"].to_pylist() == ["a", "b"]
    memory.rm("/datasets", recursive=True)


@pytest.mark.parametrize(
    ("pattern", "fits", "does_not"),
    [
        (["*.jsonl"], ["a.jsonl", ".jsonl"], ["a.jsonlx", "x/a.jsonl", "ajsonl"]),
        (["**", "*.jsonl"], ["a.jsonl", "x/y/a.jsonl"], ["a.txt"]),
        (["x[!b]", "**"], ["xa/b/c", "xc/d"], ["xb/c", "xa"]),
        (["part-[0-9]*.csv"], ["part-01.csv"], ["part-x.csv"]),
    ],
)
def test_patterns(pattern: list[str], fits: list[str], does_not: list[str]) -> None:
    import re

    expression = re.compile(_expression(pattern))
    assert all(expression.fullmatch(name) for name in fits)
    assert not any(expression.fullmatch(name) for name in does_not)
