"""What is refused, and that it is refused before the model loads and before anything is touched."""

from __future__ import annotations

import os
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from batchinfer.errors import BatchInferError, ConfigError, InputFileError, OutputConflict
from batchinfer.io.options import InputOptions, OutputOptions
from tests.job.world import World, leftovers, read_jsonl, write_jsonl


@pytest.fixture
def world() -> World:
    return World()


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write_jsonl(tmp_path / "in.jsonl", [{"prompt": "a"}])


def refused(world: World, *args: object, match: str, **options: object) -> BatchInferError:
    with pytest.raises(BatchInferError, match=match) as caught:
        world.run(*args, **options)  # type: ignore[arg-type]
    assert world.loads == 0
    assert "\n" not in str(caught.value)
    return caught.value


def test_output_that_is_the_input(tmp_path: Path, source: Path, world: World) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "soft.jsonl").symlink_to(source)
    os.link(source, tmp_path / "hard.jsonl")
    before = source.read_bytes()
    for output in (source, tmp_path / "sub" / ".." / "in.jsonl", tmp_path / "soft.jsonl", tmp_path / "hard.jsonl"):
        for overwrite in (False, True):
            assert refused(world, source, output, match="is the input", overwrite=overwrite).exit_code == 2
    assert source.read_bytes() == before
    assert leftovers(source) == []


def test_output_that_is_another_jobs(tmp_path: Path, source: Path, world: World) -> None:
    (tmp_path / "out.jsonl").write_text("precious")
    error = refused(world, source, tmp_path / "out.jsonl", match="--overwrite")
    assert isinstance(error, OutputConflict)
    assert (tmp_path / "out.jsonl").read_text() == "precious"
    world.run(source, tmp_path / "out.jsonl", overwrite=True)
    assert read_jsonl(tmp_path / "out.jsonl")[0]["prompt"] == "a"


def test_output_that_cannot_be(tmp_path: Path, source: Path, world: World) -> None:
    (tmp_path / "folder.jsonl").mkdir()
    refused(world, source, tmp_path / "folder.jsonl", match="folder")
    refused(world, source, tmp_path / "missing" / "out.jsonl", match="does not exist")
    assert refused(world, source, tmp_path / "out.csv", match=r"\.jsonl or \.parquet").exit_code == 2


def test_inputs_that_are_not_read(tmp_path: Path, world: World) -> None:
    for name in ("a.arrow", "a.feather", "a.json", "a.docx", "a.parquet.gz", "a.arrow.zst", "a.jsonl.bz2"):
        (tmp_path / name).write_bytes(b"x,y\n")
        refused(world, tmp_path / name, match=name)
    refused(world, tmp_path / "*.jsonl", match="no file has such a name")
    refused(world, "https://host/a.jsonl", match="https")
    refused(world, tmp_path / "absent.jsonl", match="no such file")


def test_damaged_parquet(tmp_path: Path, world: World) -> None:
    pq.write_table(pa.table({"prompt": ["a"] * 100}), tmp_path / "good.parquet")
    data = (tmp_path / "good.parquet").read_bytes()
    cases = {"cut": data[: len(data) // 2], "head": data[:4], "zero": b"", "nofooter": data[:-8], "lines": b'{"prompt": "a"}\n'}
    for name, content in cases.items():
        (tmp_path / f"{name}.parquet").write_bytes(content)
        (tmp_path / "out.jsonl").write_text("SENTINEL")
        refused(world, tmp_path / f"{name}.parquet", tmp_path / "out.jsonl", match=rf"{name}\.parquet.*[Pp]arquet")
        assert (tmp_path / "out.jsonl").read_text() == "SENTINEL"
    (tmp_path / "in.jsonl").write_bytes(data)
    refused(world, tmp_path / "in.jsonl", match="content is Parquet")


def test_no_usable_column(tmp_path: Path, world: World) -> None:
    write_jsonl(tmp_path / "a.jsonl", [{"id": i, "question": "q"} for i in range(3)])
    assert isinstance(refused(world, tmp_path / "a.jsonl", match="'prompt'.*id, question"), InputFileError)
    pq.write_table(pa.table({"id": [1], "question": ["q"]}), tmp_path / "a.parquet")
    refused(world, tmp_path / "a.parquet", match="'prompt'.*id, question")
    pq.write_table(pa.table({"prompt": [1, 2]}), tmp_path / "b.parquet")
    refused(world, tmp_path / "b.parquet", match="'prompt' has type int64")
    (tmp_path / "c.jsonl").write_bytes(b"\x00\x01\nzzz\n")
    refused(world, tmp_path / "c.jsonl", match="none of the first 2 rows is a JSON object; line 1")
    refused(world, tmp_path / "a.jsonl", match="'nope'", prompt_column="nope")


def test_settings_that_cannot_work(tmp_path: Path, source: Path, world: World) -> None:
    refused(world, source, match="temperature", sampling={"temperature": -1})
    refused(world, source, match="--system-prompt", system_prompt="s", chat=False)
    refused(World(chat=False), source, match="--chat", chat=True)
    pq.write_table(pa.table({"prompt": ["a"], "error": ["mine"]}), tmp_path / "a.parquet")
    refused(world, tmp_path / "a.parquet", match="--output-prefix")
    pq.write_table(pa.table({"prompt": ["a"]}), tmp_path / "b.parquet")
    refused(world, tmp_path / "b.parquet", match="'nope'", keep_columns=("nope",))
    for wrong in ({"on_too_long": "truncate-up"}, {"on_too_long": "pray"}, {"limit": -1}, {"offset": -1}):
        with pytest.raises(ConfigError):
            InputOptions("a", **wrong)  # type: ignore[arg-type]
    with pytest.raises(ConfigError):
        OutputOptions(keep_columns=("a",), drop_columns=("b",))


def test_folder_of_two_kinds(tmp_path: Path, world: World) -> None:
    write_jsonl(tmp_path / "a.jsonl", [{"prompt": "a"}])
    pq.write_table(pa.table({"prompt": ["a"]}), tmp_path / "b.parquet")
    refused(world, tmp_path, tmp_path / "out.jsonl", match="more than one kind")


def test_names_that_are_empty_or_too_long(tmp_path: Path, source: Path, world: World) -> None:
    assert refused(world, "", tmp_path / "out.jsonl", match="the input's name is empty").exit_code == 2
    assert refused(world, source, "", match="-o: the output's name is empty").exit_code == 2
    for length in (232, 249, 300, 5000):
        output = tmp_path / ("x" * length + ".jsonl")
        assert refused(world, source, output, match="too long for the file system").exit_code == 2
    long = write_jsonl(tmp_path / ("y" * 240 + ".jsonl"), [{"prompt": "a"}])
    assert refused(world, long, match="too long for the file system").exit_code == 2
    assert leftovers(source) == []
    world.run(source, tmp_path / ("x" * 231 + ".jsonl"))
