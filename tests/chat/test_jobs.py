"""What a job adds to its rows on request: tool calls, reasoning, metrics; and rows that run again with more room."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from batchinfer.__main__ import run_command
from batchinfer.errors import ConfigError, OutputConflict
from tests.job.world import World, read_jsonl, write_jsonl

TOOLS = [{"type": "function", "function": {"name": "f"}}]


def test_metrics_are_a_column(tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "in.jsonl", [{"prompt": f"row {i}"} for i in range(30)] + [{"prompt": 1}])
    World().run(source, tmp_path / "out.jsonl", metrics=True)
    World().run(source, tmp_path / "out.parquet", metrics=True)
    for rows in (read_jsonl(tmp_path / "out.jsonl"), pq.read_table(tmp_path / "out.parquet").to_pylist()):
        assert rows[-1]["metrics"] is None
        for row in rows[:-1]:
            metrics = row["metrics"]
            assert list(metrics) == ["queue_seconds", "prefill_seconds", "decode_seconds", "cached_tokens", "preemptions"]
            assert all(metrics[name] >= 0 for name in metrics)
        assert any(row["metrics"]["queue_seconds"] > rows[0]["metrics"]["queue_seconds"] for row in rows[10:-1])


def test_rows_that_were_cut_run_again_with_more_room(tmp_path: Path) -> None:
    rows: list[Any] = [{"prompt": f"row {i}", "max_tokens": 3 + i} for i in range(6)]
    source, out = write_jsonl(tmp_path / "in.jsonl", rows), tmp_path / "out.jsonl"
    World().run(source, out, {"ignore_eos": True})
    before = read_jsonl(out)
    again = World()
    report = again.run(source, out, {"ignore_eos": True}, retry_truncated=6)
    after = read_jsonl(out)
    assert again.rows_run == 3
    assert report.exit_code == 0
    assert [row["num_generated_tokens"] for row in after] == [6, 6, 6, 6, 7, 8]
    for old, new in zip(before, after, strict=True):
        assert new["generated_text"].startswith(old["generated_text"])
    still = World()
    still.run(source, out, {"ignore_eos": True}, retry_truncated=6)
    assert still.loads == 0  # nothing is left to gain
    assert read_jsonl(out) == after
    assert World().run(source, out, {"ignore_eos": True}).already_complete


def test_rows_that_the_context_cut_do_not_run_again(tmp_path: Path) -> None:
    source, out = write_jsonl(tmp_path / "in.jsonl", [{"prompt": "x" * 50, "max_tokens": 100}]), tmp_path / "out.jsonl"
    World(max_model_len=64).run(source, out, {"ignore_eos": True})
    again = World(max_model_len=64)
    again.run(source, out, {"ignore_eos": True}, retry_truncated=200)
    assert again.loads == 0


def test_openai_lines_run_again_too(tmp_path: Path) -> None:
    body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 3, "ignore_eos": True}
    lines = [{"custom_id": str(i), "method": "POST", "url": "/v1/chat/completions", "body": body} for i in range(3)]
    source, out = write_jsonl(tmp_path / "in.jsonl", lines), tmp_path / "out.jsonl"
    World().run(source, out, {}, metrics=True)
    World().run(source, out, {}, metrics=True, retry_truncated=5)
    answers = [row["response"]["body"] for row in read_jsonl(out)]
    assert [answer["usage"]["completion_tokens"] for answer in answers] == [5, 5, 5]
    assert all("queue_seconds" in answer["metrics"] for answer in answers)


def test_settings_that_say_two_things() -> None:
    for wrong in ({"retry_truncated": 0}, {"retry_truncated": 5, "overwrite": True}):
        with pytest.raises(ConfigError):
            World().run("x.jsonl", "y.jsonl", **wrong)


def test_tools_add_a_column_and_reach_openai_answers(tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "in.jsonl", [{"prompt": "a"}, {"prompt": "b", "tools": TOOLS}])
    world = World()
    world.run(source, tmp_path / "out.jsonl")
    assert [row["tool_calls"] for row in read_jsonl(tmp_path / "out.jsonl")] == [None, None]
    assert any("not known" in note for note in world.notes)
    source = write_jsonl(tmp_path / "in.jsonl", [{"prompt": "a"}, {"prompt": "b", "tools": TOOLS}])
    World().run(source, tmp_path / "raw.jsonl", chat=False)
    assert [row["error"] and row["error"]["code"] for row in read_jsonl(tmp_path / "raw.jsonl")] == [None, "unsupported_parameter"]
    World().run(source, tmp_path / "off.jsonl", row_params=False)
    assert "tool_calls" not in read_jsonl(tmp_path / "off.jsonl")[0]


def test_a_resumed_job_keeps_to_its_template_settings(tmp_path: Path) -> None:
    source, out = write_jsonl(tmp_path / "in.jsonl", [{"prompt": "a"}]), tmp_path / "out.jsonl"
    World().run(source, out, prompt_template="{{ prompt }}!")
    with pytest.raises(OutputConflict, match="--prompt-template was"):
        World().run(source, out, prompt_template="{{ prompt }}?")


@pytest.mark.model
def test_the_default_model_continues_an_answer(tmp_path: Path) -> None:
    talk = [{"role": "user", "content": "What is the capital of Italy?"}, {"role": "assistant", "content": "The capital of Italy is"}]
    source = write_jsonl(tmp_path / "in.jsonl", [{"messages": talk, "continue_final_message": True, "max_tokens": 4}])
    assert run_command(["run", str(source), "-o", str(tmp_path / "out.jsonl"), "-q"]) == 0
    [row] = read_jsonl(tmp_path / "out.jsonl")
    assert row["generated_text"].startswith(" Rome"), json.dumps(row)


def test_tables_hold_tools_as_structs_or_as_text(tmp_path: Path) -> None:
    function = {"name": "f", "parameters": {"type": "object"}}
    tools = [[{"type": "function", "function": function}], [{"type": "function", "function": {"name": "g", "parameters": None}}], None]
    pq.write_table(pa.table({"prompt": ["a", "b", "c"], "tools": tools}), tmp_path / "in.parquet")
    pq.write_table(pa.table({"prompt": ["a"], "tools": [json.dumps(tools[0])]}), tmp_path / "text.parquet")
    for source in ("in.parquet", "text.parquet"):
        World().run(tmp_path / source, tmp_path / f"{source}.out.parquet")
        table = pq.read_table(tmp_path / f"{source}.out.parquet")
        assert table["error"].null_count == table.num_rows
        assert str(table.schema.field("tool_calls").type).startswith("list<")
