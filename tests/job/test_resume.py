"""A job that was stopped anywhere goes on and ends with the bytes of one that was not; two jobs never mix."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from batchinfer.errors import InputFileError, OutputConflict
from batchinfer.io.lock import OutputLock
from tests.job.world import World, leftovers, read_jsonl, write_jsonl

ROWS = [{"id": i, "prompt": f"prompt {i % 7} é", "temperature": 0.5 * (i % 2)} if i % 9 else {"id": i, "prompt": ""} for i in range(40)]


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write_jsonl(tmp_path / "in.jsonl", ROWS)


@pytest.fixture
def whole(tmp_path: Path, source: Path) -> bytes:
    World().run(source, tmp_path / "whole.jsonl")
    return (tmp_path / "whole.jsonl").read_bytes()


def stop_early(source: Path, output: Path, steps: int = 12, **options: object) -> None:
    with pytest.raises(KeyError, match="power cut"):
        World(stop_after=steps).run(source, output, **options)  # type: ignore[arg-type]
    assert not output.exists()
    assert leftovers(output) == [output.name + ".manifest.json", output.name + ".partial"]


@pytest.mark.parametrize("steps", [4, 12, 20, 28])
def test_goes_on_and_computes_nothing_twice(tmp_path: Path, source: Path, whole: bytes, steps: int) -> None:
    output = tmp_path / "out.jsonl"
    stop_early(source, output, steps)
    stored = [json.loads(line) for line in (tmp_path / "out.jsonl.partial").read_bytes().splitlines()]
    good = sum(line["result"]["error"] is None for line in stored)
    world = World()
    report = world.run(source, output)
    assert output.read_bytes() == whole
    assert world.rows_run == sum(bool(row["prompt"]) for row in ROWS) - good
    assert report.rows_done_before == len(stored)
    assert (report.rows_total, report.rows_failed, report.exit_code) == (40, 5, 3)
    assert report.failed_positions == [(i, i) for i in range(0, 40, 9)]
    assert leftovers(output) == []


def test_a_partial_cut_or_damaged_anywhere(tmp_path: Path, source: Path, whole: bytes) -> None:
    output, partial = tmp_path / "out.jsonl", tmp_path / "out.jsonl.partial"
    stop_early(source, output, 25)
    data = partial.read_bytes()
    manifest = (tmp_path / "out.jsonl.manifest.json").read_bytes()
    for at in range(0, len(data), 397):
        for damaged in (data[:at], data[:at] + b"\x00" + data[at + 1 :], data[:at] + b"garbage" + data[at:], data[:at] + data[at + 1 :]):
            output.unlink(missing_ok=True)
            (tmp_path / "out.jsonl.report.json").unlink(missing_ok=True)
            partial.write_bytes(damaged)
            (tmp_path / "out.jsonl.manifest.json").write_bytes(manifest)
            World().run(source, output)
            assert output.read_bytes() == whole


def test_says_what_it_found(tmp_path: Path, source: Path) -> None:
    output = tmp_path / "out.jsonl"
    stop_early(source, output)
    with (tmp_path / "out.jsonl.partial").open("ab") as file:
        file.write(b'damaged\n{"row":3,')
    world = World()
    world.run(source, output)
    told = "\n".join(world.notes)
    assert "torn last line of 9 bytes" in told
    assert "1 damaged lines" in told
    assert "rows are done already" in told


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"sampling": {"max_tokens": 7}}, "--max-tokens was 6, is 7"),
        ({"seed": 5}, "--seed was 0, is 5"),
        ({"system_prompt": "new"}, "--system-prompt was not given"),
        ({"chat": False}, "--chat/--no-chat"),
        ({"limit": 30}, "--limit was not given, is 30"),
        ({"row_params": False}, "--row-params"),
        ({"prompt_column": "id"}, "--prompt-column"),
        ({"dtype": "float32"}, '--dtype was "auto", is "float32"'),
        ({"generated_token_ids": True}, "--generated-token-ids"),
        ({"max_model_len": 150}, "--max-model-len"),
    ],
)
def test_other_settings_are_refused_by_name(tmp_path: Path, source: Path, change: dict[str, object], named: str) -> None:
    output = tmp_path / "out.jsonl"
    stop_early(source, output)
    before = (tmp_path / "out.jsonl.partial").read_bytes()
    world = World()
    with pytest.raises(OutputConflict, match="--overwrite") as caught:
        world.run(source, output, **change)  # type: ignore[arg-type]
    assert named in str(caught.value)
    assert world.loads == 0
    assert (tmp_path / "out.jsonl.partial").read_bytes() == before
    world.run(source, output, overwrite=True, **change)  # type: ignore[arg-type]
    assert output.exists()


def test_another_model_and_another_input_are_refused(tmp_path: Path, source: Path, whole: bytes) -> None:
    output = tmp_path / "out.jsonl"
    stop_early(source, output)
    with pytest.raises(OutputConflict, match="model"):
        World(fingerprint="model-2").run(source, output)
    original = source.read_bytes()
    source.write_bytes(original + b'{"prompt": "one more"}\n')
    with pytest.raises(OutputConflict, match=r"in\.jsonl was modified since the job began \([\d,]+ bytes then, [\d,]+ now\)"):
        World().run(source, output)


def test_an_input_changed_behind_its_date_is_noticed(tmp_path: Path, source: Path) -> None:
    output = tmp_path / "out.jsonl"
    stop_early(source, output)
    facts = source.stat()
    source.write_bytes(source.read_bytes().replace(b"prompt 1", b"prompt 2"))
    os.utime(source, ns=(facts.st_atime_ns, facts.st_mtime_ns))
    with pytest.raises(Exception, match="is not what it was when the job began"):
        World().run(source, output)


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
@pytest.mark.parametrize("finished", [False, True])
def test_a_copy_of_the_input_is_the_input(tmp_path: Path, kind: str, finished: bool) -> None:
    source, output = tmp_path / f"a.{kind}", tmp_path / "out.jsonl"
    if kind == "jsonl":
        write_jsonl(source, ROWS)
    else:
        pq.write_table(pa.Table.from_pylist(ROWS), source)
    World().run(source, tmp_path / "other.jsonl")
    if finished:
        World().run(source, output)
    else:
        stop_early(source, output)
    os.utime(source, ns=(1, 1))
    report = World().run(source, output)
    assert report.already_complete == finished
    assert output.read_bytes() == (tmp_path / "other.jsonl").read_bytes()
    if kind == "jsonl":  # as long as it was, and another one
        source.write_bytes(source.read_bytes().replace(b"prompt 1", b"prompt 2"))
        with pytest.raises(OutputConflict, match=r"a\.jsonl was modified since the job began"):
            World().run(source, output)


class Machine(World):
    """Whose automatic choices come out as told."""

    def __init__(self, chosen: dict[str, object] | None = None, **more: Any) -> None:
        super().__init__(**more)
        self.chosen = chosen or {}

    def _build(self, config: Any, model: Any, need: Any) -> Any:
        engine = super()._build(config, model, need)
        given = {} if config.dtype == "auto" else {"dtype": config.dtype}
        engine.settings = {"device": "cpu", "dtype": "bf16", "kv_cache_dtype": "bf16", "attention": "native", **self.chosen, **given}
        return engine


def test_another_machine_goes_on_in_the_same_arithmetic_or_not_at_all(tmp_path: Path, source: Path, whole: bytes) -> None:
    output = tmp_path / "out.jsonl"
    with pytest.raises(KeyError):
        Machine(stop_after=12).run(source, output)
    stored = (tmp_path / "out.jsonl.partial").read_bytes()
    with pytest.raises(OutputConflict, match=r"computed with dtype bf16; now it comes out as float32.*--dtype bf16") as caught:
        Machine({"dtype": "float32"}).run(source, output)
    assert caught.value.exit_code == 2
    with pytest.raises(OutputConflict, match="attention native; now it comes out as reference"):
        Machine({"attention": "reference, slower"}).run(source, output)
    with pytest.raises(OutputConflict, match="--dtype was"):
        Machine().run(source, output, dtype="float32")
    assert (tmp_path / "out.jsonl.partial").read_bytes() == stored
    other = Machine({"dtype": "float32", "batch_invariant": False})
    other.run(source, output, dtype="bf16")  # the way out that it named
    assert output.read_bytes() == whole
    assert any("may depend on the rows beside it" in note for note in other.notes)
    assert Machine({"dtype": "float32"}).run(source, output).already_complete


@pytest.mark.parametrize(
    "name, was, now, way_back",
    [
        ("native", "AVX2", "AVX-512 (VNNI, BF16)", "BATCHINFER_NATIVE=avx2"),
        ("native", "AVX-512 (VNNI)", "AVX-512 (VNNI, BF16)", "BATCHINFER_NATIVE=on"),
        ("native", "AVX-512 (VNNI, BF16)", "AVX-512 (VNNI, BF16, AMX)", "BATCHINFER_NATIVE=avx512"),
        ("native", "AVX-512 (VNNI, BF16, AMX)", "AVX-512 (VNNI, BF16)", "BATCHINFER_NATIVE=on"),
        ("native", "none", "AVX2", "BATCHINFER_NATIVE=off"),
        ("attention", "reference", "native", "go on with --no-flash-attention"),
        ("attention", "native", "reference", "without --no-flash-attention"),
        ("rms_norm", "reference", "native", "go on with --enforce-eager"),
        ("matmul", "oneDNN, int8", "oneDNN, int8 with 7-bit weights", "batchinfer doctor"),
    ],
)
def test_another_processor_may_round_otherwise(tmp_path: Path, source: Path, name: str, was: str, now: str, way_back: str) -> None:
    output = tmp_path / "out.jsonl"
    with pytest.raises(KeyError):
        Machine({name: was}, stop_after=12).run(source, output)
    with pytest.raises(OutputConflict, match=f"{re.escape(was)}; now it comes out as {re.escape(now)}.*{way_back}"):
        Machine({name: now}).run(source, output)
    Machine({name: was}).run(source, output)


def test_a_resume_with_another_number_of_bits_is_refused(tmp_path: Path, source: Path) -> None:
    output = tmp_path / "out.jsonl"
    stop_early(source, output)
    with pytest.raises(OutputConflict, match='--quantization was "none", is "int8"'):
        World().run(source, output, quantization="int8")
    with pytest.raises(OutputConflict, match='--kv-cache-dtype was "auto", is "int8"'):
        World().run(source, output, kv_cache_dtype="int8")


def test_rows_that_failed_run_again_in_the_same_arithmetic(tmp_path: Path, source: Path, whole: bytes) -> None:
    output = tmp_path / "out.jsonl"
    Machine(refuse="prompt 3").run(source, output)
    with pytest.raises(OutputConflict, match="computed with dtype bf16"):
        Machine({"dtype": "float32"}).run(source, output, retry_errors=True)
    Machine({"dtype": "float32"}).run(source, output, retry_errors=True, dtype="bf16")
    assert output.read_bytes() == whole


def test_what_cannot_change_text_may_differ(tmp_path: Path, source: Path, whole: bytes) -> None:
    output = tmp_path / "out.jsonl"
    stop_early(source, output)
    world = World(max_num_seqs=3)
    world.run(source, output, max_num_seqs=3, threads=1, num_kv_blocks=500)
    assert output.read_bytes() == whole
    assert any("--max-num-seqs was not given, is 3" in note for note in world.notes)


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_an_input_that_changes_while_the_job_runs(tmp_path: Path, kind: str) -> None:
    rows = [{"id": i, "prompt": f"prompt {i}"} for i in range(5)]
    source = tmp_path / f"a.{kind}"

    def write(text: str) -> None:
        changed = [{**row, "prompt": row["prompt"] + text} for row in rows]
        if kind == "jsonl":
            write_jsonl(source, changed)
        else:
            pq.write_table(pa.Table.from_pylist(changed), source)

    class Meddler(World):
        def started(self, info: object) -> None:
            write("!")

    write("")
    with pytest.raises(InputFileError, match="changed while the job ran"):
        Meddler().run(source, tmp_path / "out.jsonl")
    assert not (tmp_path / "out.jsonl").exists()


def test_a_finished_job_says_so(tmp_path: Path, source: Path, whole: bytes) -> None:
    world = World()
    report = world.run(source, tmp_path / "whole.jsonl")
    assert report.already_complete
    assert report.exit_code == 0
    assert "complete" in report.message
    assert world.loads == 0
    assert (tmp_path / "whole.jsonl").read_bytes() == whole
    with pytest.raises(OutputConflict, match=r"another job.*--max-tokens"):
        world.run(source, tmp_path / "whole.jsonl", {"max_tokens": 9})
    with pytest.raises(OutputConflict):
        world.run(source, tmp_path / "whole.jsonl", drop_columns=("id",))


def test_the_finish_can_be_interrupted_and_repeated(tmp_path: Path, source: Path, whole: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    output = tmp_path / "out.jsonl"

    def cut(path: Path, data: bytes) -> None:
        if path.name.endswith(".report.json"):
            raise KeyError("power cut")
        path.write_bytes(data)

    with monkeypatch.context() as patch:
        patch.setattr("batchinfer.job.workplace.write_whole", cut)
        with pytest.raises(KeyError):
            World().run(source, output)
    assert output.exists()  # renamed already, its working files still there
    world = World()
    world.run(source, output)
    assert world.loads == 0
    assert output.read_bytes() == whole
    assert leftovers(output) == []


def test_nothing_stays_of_a_job_that_did_nothing(tmp_path: Path, source: Path) -> None:
    world = World()
    world.max_model_len = 0  # the engine cannot be built
    with pytest.raises(Exception):  # noqa: B017 - whatever the engine says
        world.run(write_jsonl(tmp_path / "x.jsonl", [{"prompt_token_ids": [1]}]), tmp_path / "out.jsonl", stop_after=0)
    assert leftovers(tmp_path / "out.jsonl") == []


def test_parquet_goes_on_too(tmp_path: Path) -> None:
    pq.write_table(pa.Table.from_pylist(ROWS), tmp_path / "in.parquet", row_group_size=7)
    World().run(tmp_path / "in.parquet", tmp_path / "whole.parquet")
    stop_early(tmp_path / "in.parquet", tmp_path / "out.parquet")
    World().run(tmp_path / "in.parquet", tmp_path / "out.parquet")
    assert (tmp_path / "out.parquet").read_bytes() == (tmp_path / "whole.parquet").read_bytes()


def test_an_unreadable_manifest_is_refused(tmp_path: Path, source: Path) -> None:
    output = tmp_path / "out.jsonl"
    stop_early(source, output)
    (tmp_path / "out.jsonl.manifest.json").write_bytes(b'{"format": 1, "finger')
    with pytest.raises(OutputConflict, match="--overwrite"):
        World().run(source, output)
    World().run(source, output, overwrite=True)
    assert len(read_jsonl(output)) == 40


def test_two_jobs_on_one_output(tmp_path: Path, source: Path) -> None:
    output = tmp_path / "out.jsonl"
    with OutputLock(tmp_path / "out.jsonl.lock", output), pytest.raises(OutputConflict, match=rf"another job.*{os.getpid()}"):
        World().run(source, output)
    (tmp_path / "out.jsonl.lock").write_text("999999")  # left by a killed process
    World().run(source, output)
    assert len(read_jsonl(output)) == 40


def test_failed_rows_are_retried(tmp_path: Path, source: Path, whole: bytes) -> None:
    output = tmp_path / "out.jsonl"
    stop_early(source, output, 25)
    world = World()
    report = world.run(source, output, retry_errors=True)
    assert report.rows_failed == 5
    assert output.read_bytes() == whole


@pytest.mark.parametrize("ending", ["jsonl", "parquet"])
@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_failed_rows_of_a_finished_job_are_retried(tmp_path: Path, source: Path, kind: str, ending: str) -> None:
    """Nothing but the failed rows runs again; those that fail for good come out as before."""
    rows = [{"id": i, "prompt_token_ids": [1] * (150 if i % 5 == 0 else 5), "note": None if i % 2 else "x"} for i in range(20)]
    if kind == "jsonl":
        write_jsonl(tmp_path / "a.jsonl", [*rows, "broken"])
    else:
        pq.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet")
    output = tmp_path / f"out.{ending}"
    first = World()
    first.run(tmp_path / f"a.{kind}", output, prefix="r_", drop_columns=("note",))
    before = output.read_bytes()
    assert first.rows_run == 20
    world = World()
    report = world.run(tmp_path / f"a.{kind}", output, prefix="r_", drop_columns=("note",), retry_errors=True)
    assert report.rows_total == (21 if kind == "jsonl" else 20)
    assert world.rows_run == 0
    assert output.read_bytes() == before
    assert leftovers(output) == []


def test_a_retry_can_succeed(tmp_path: Path, source: Path, whole: bytes) -> None:
    output = tmp_path / "out.jsonl"
    report = World(refuse="prompt 3").run(source, output)
    failed = report.rows_failed
    assert failed > 5
    assert output.read_bytes() != whole
    world = World()
    report = world.run(source, output, retry_errors=True)
    assert output.read_bytes() == whole
    assert world.rows_run == failed - 5
    assert report.rows_done_before == 40 - failed
    assert report.failed_positions == [(i, i) for i in range(0, 40, 9)]


def test_another_pool_is_told(tmp_path: Path, source: Path) -> None:
    """Rows that outgrow the pool are cut where it ends."""
    output, manifest = tmp_path / "out.jsonl", tmp_path / "out.jsonl.manifest.json"
    stop_early(source, output)
    record = json.loads(manifest.read_bytes())
    assert record["resolved"]["longest_row"] == 200
    record["resolved"]["longest_row"] = 97
    manifest.write_text(json.dumps(record))
    world = World()
    world.run(source, output)
    assert any("hold rows of 200 tokens, 97 when the job began" in note for note in world.notes)
